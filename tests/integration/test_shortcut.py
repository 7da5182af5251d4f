"""Votes sent by the caller's thread: none is lost, whatever the control thread does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster, client_of, in_threads
from peers.waiting import wait_until

import pccl
from pccl.ext import tables
from pccl.runtime.client.connection import Dealer

LARGE = 1_000_000  # elements, which go around the ring


@pytest.fixture
def quick() -> None:
    if tables.load().name != "libzmq":
        pytest.skip("libzmq's functions are out of reach here")


def reduce_often(comm: pccl.Communicator, times: int, tag: int = 0) -> None:
    x = np.ones(8, np.float32)
    for _ in range(times):
        comm.all_reduce(x, op="max", tag=tag, timeout=30.0)


def test_no_answer_is_overlooked(quick: None) -> None:
    with Cluster(2) as cluster:
        cluster.each(lambda _, comm: reduce_often(comm, 1500))


def test_messages_that_arrive_during_a_send_are_read(quick: None) -> None:
    """Sends of one thread take in the notice of what comes for another."""
    with Cluster(2) as cluster:

        def both(_: int, comm: pccl.Communicator) -> None:
            threads = [
                threading.Thread(target=reduce_often, args=(comm, 300, tag)) for tag in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        cluster.each(both)


def test_unsent_messages_are_left_to_the_control_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Dealer, "ask", lambda *arguments: (False, None))
    with Cluster(2) as cluster:
        cluster.each(lambda _, comm: reduce_often(comm, 20))


class Alarm(Exception):
    """Comes right after the vote was sent."""


def test_a_vote_that_is_gone_is_taken_back(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(2) as cluster:
        ours, other = cluster.comms
        ask = Dealer.ask

        def interrupted(*arguments: Any) -> None:
            ask(*arguments)
            raise Alarm

        with monkeypatch.context() as patch:
            patch.setattr(Dealer, "ask", interrupted)
            with pytest.raises(Alarm):
                ours.all_reduce(np.ones(8, np.float32))
        with pytest.raises(pccl.PCCLTimeoutError):
            other.all_reduce(np.ones(8, np.float32), timeout=0.2)
        cluster.each(lambda _, comm: reduce_often(comm, 20))


def test_a_caller_reads_its_answer_and_the_control_thread_soon_reads_it_too(quick: None) -> None:
    with Cluster(2) as cluster:

        def counted(_: int, comm: pccl.Communicator) -> None:
            for calls in range(1, 41):
                x = np.full(8, calls, np.float32)
                comm.all_reduce(x, op="sum")
                assert (x == 2 * calls).all()
                if calls % 10 == 0:
                    assert comm.stats().collectives["all_reduce"] == calls
            comm.all_reduce(x, op="sum")
            wait_until(lambda: client_of(comm)._unread == 0)
            assert comm.stats().collectives["all_reduce"] == calls + 1

        cluster.each(counted)


def test_what_a_caller_has_read_counts_before_the_end(quick: None) -> None:
    with Cluster(2) as cluster:

        def end(_: int, comm: pccl.Communicator) -> None:
            reduce_often(comm, 7)
            comm.close()
            assert comm.stats().collectives == {"all_reduce": 7} and not comm.stats().failures

        cluster.each(end)


def test_a_caller_that_waits_for_its_answer_holds_up_no_other_call(quick: None) -> None:
    """One peer waits in tag 2 until the other one has ended its calls with tags 1 and 3."""
    with Cluster(2) as cluster:

        def both(index: int, comm: pccl.Communicator) -> None:
            reduce_often(comm, 3)
            large = comm.all_reduce_async(np.ones(LARGE, np.float32), op="max", tag=1)
            others = [lambda: reduce_often(comm, 1, tag=3), lambda: assert_ok(large)]
            if index:
                in_threads([lambda: reduce_often(comm, 1, tag=2), *others])
            else:
                in_threads(others)
                reduce_often(comm, 1, tag=2)

        cluster.each(both)


def assert_ok(handle: pccl.AsyncReduceHandle) -> None:
    assert handle.wait(timeout=30.0)[0]
