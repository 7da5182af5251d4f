"""Waiting for peers takes no processor time, and the log says what a call waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.runtime import limits

RunCluster = Callable[..., Cluster]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUIET_S", 0.2)


def said(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)


def wait_until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    wait_until(lambda: said(caplog, text))


def test_all_return_when_there_are_as_many_as_are_wanted() -> None:
    sizes: list[int] = []
    with pccl.MasterNode("127.0.0.1:0") as master:

        def peer() -> None:
            with pccl.Communicator(master.address) as comm:
                sizes.append(comm.wait_for_peers(3, timeout=30))
                x = np.ones(10, np.float32)
                comm.all_reduce(x, op="sum", timeout=30)
                assert (x == 3).all()

        for thread in [in_thread(peer) for _ in range(3)]:
            ends(thread)
    assert sizes == [3, 3, 3]


def test_enough_peers_do_not_wait() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        assert comm.wait_for_peers(1) == 1
        with pytest.raises(ValueError, match="n is 0"):
            comm.wait_for_peers(0)
        with pytest.raises(pccl.PCCLTimeoutError, match=r"1 of 2 peers are there after 0\.1 s"):
            comm.wait_for_peers(2, timeout=0.1)


def test_it_meets_a_loop_that_asks_and_admits() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pccl.Communicator(master.address) as first:
            waits = in_thread(lambda: first.wait_for_peers(3, timeout=30))
            both = threading.Barrier(2)  # who leaves at once is not there for the other one to see

            def loop() -> None:
                with pccl.Communicator(master.address) as comm:
                    while comm.world_size < 3:
                        if comm.are_peers_pending():
                            comm.update_topology()
                    both.wait(30)

            others = [in_thread(loop) for _ in range(2)]
            for thread in [waits, *others]:
                ends(thread)


def test_a_loop_that_asks_again_and_again_is_slowed_down_and_a_yes_is_not() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        said_no = 0

        def join() -> None:
            with pccl.Communicator(master.address):
                pass

        comm.are_peers_pending()
        newcomer, began_s = in_thread(join), time.monotonic()
        while not comm.are_peers_pending():
            said_no += 1
        took_s = time.monotonic() - began_s
        comm.update_topology()
        ends(newcomer)
        assert (said_no - 1) * limits.PENDING_AGAIN_S < took_s, "it asks without a pause"


@pytest.mark.usefixtures("impatient")
def test_a_long_wait_names_the_missing_peers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pccl")
    with Cluster(2) as cluster:
        first, second = cluster.comms
        x = np.ones(4, np.float32)
        waits = in_thread(lambda: first.all_reduce(x, tag=7))
        wait_until_said(caplog, "in all_reduce(4 elements of float32, avg) with tag 7: peer 2 (")
        handle = second.all_reduce_async(np.ones(4, np.float32), tag=8)
        wait_until_said(caplog, "is in all_reduce(4 elements of float32, avg) with tag 8")
        second.all_reduce(np.ones(4, np.float32), tag=7)
        ends(waits)
        first.all_reduce(x, tag=8)
        assert handle.wait()[0]


@pytest.mark.usefixtures("impatient")
def test_a_waiting_newcomer_names_the_peers_that_admit_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pccl")
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        newcomer = pccl.Communicator(master.address)
        joins = in_thread(newcomer.connect)
        wait_until_said(caplog, "to be admitted: peer 1 (")
        comm.update_topology()
        ends(joins)
        newcomer.close()
