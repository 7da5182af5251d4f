"""Votes sent by the caller's thread: none is lost, whatever the control thread does."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from peers.cluster import Cluster

import pccl
from pccl.ext import tables
from pccl.runtime.client.connection import Dealer


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
    monkeypatch.setattr(Dealer, "send_now", lambda *arguments: False)
    with Cluster(2) as cluster:
        cluster.each(lambda _, comm: reduce_often(comm, 20))


class Alarm(Exception):
    """Comes right after the vote was sent."""


def test_a_vote_that_is_gone_is_taken_back(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(2) as cluster:
        ours, other = cluster.comms
        send = Dealer.send_now

        def interrupted(*arguments: object) -> bool:
            send(*arguments)  # type: ignore[arg-type]
            raise Alarm

        with monkeypatch.context() as patch:
            patch.setattr(Dealer, "send_now", interrupted)
            with pytest.raises(Alarm):
                ours.all_reduce(np.ones(8, np.float32))
        with pytest.raises(pccl.PCCLTimeoutError):
            other.all_reduce(np.ones(8, np.float32), timeout=0.2)
        cluster.each(lambda _, comm: reduce_often(comm, 20))
