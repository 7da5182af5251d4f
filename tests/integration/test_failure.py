"""Peers that are killed, freeze, leave and join, as real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from peers.cluster import Cluster, in_threads
from peers.processes import PROGRAMS, Reporter, Worker, agree
from peers.waiting import PATIENCE_S

import pccl

Start = Callable[..., Worker]


@pytest.fixture
def workers(backend: str) -> Iterator[Start]:
    started: list[Worker] = []

    def start(master: str, slot: int, count: int, what: str = "all_reduce") -> Worker:
        started.append(Worker(master, slot, count, what))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.kill()


def churn(start: Start, kills: int, count: int, seed: int, what: str = "all_reduce") -> None:
    """Kills one of three peers at a random moment and lets a fresh one join, again and again."""
    rng = random.Random(seed)
    with pccl.MasterNode("127.0.0.1:0") as master:
        alive = [start(master.address, slot, count, what) for slot in range(3)]
        everyone = list(alive)
        for slot in range(3, 3 + kills):
            for worker in alive:
                worker.wait_for(lambda r: r.get("world") == 3)
            pause = threading.Event()
            pause.wait(rng.uniform(0, 0.1))  # the moment of death is what is random here
            victim = alive.pop(rng.randrange(3))
            victim.kill()
            for worker in alive:
                worker.wait_for(lambda r: r.get("world") == 2)
            alive.append(start(master.address, slot, count, what))
            everyone.append(alive[-1])
        for worker in alive:
            worker.wait_for(lambda r: r.get("world") == 3)
            worker.kill()
    agree(everyone)


@pytest.mark.parametrize(
    "backend", ["libzmq", pytest.param("pyzmq", marks=pytest.mark.slow)], indirect=True
)
def test_kill_one_of_three_again_and_again(workers: Start) -> None:
    churn(workers, kills=6, count=100_003, seed=int(time.time()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_one_of_three_fifty_times(workers: Start) -> None:
    churn(workers, kills=50, count=500_009, seed=int(time.time()))


@pytest.mark.parametrize(
    "backend", ["libzmq", pytest.param("pyzmq", marks=pytest.mark.slow)], indirect=True
)
def test_kill_one_of_three_in_any_collective(workers: Start) -> None:
    churn(workers, kills=5, count=300_007, seed=int(time.time()), what="all")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_one_of_three_fifty_times_in_any_collective(workers: Start) -> None:
    churn(workers, kills=50, count=500_009, seed=int(time.time()), what="all")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
@pytest.mark.parametrize(
    ("count", "times"),
    [
        (1_000_000, 3),
        pytest.param(1000, 40, marks=pytest.mark.slow),
        pytest.param(1_000_000, 40, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_beside_a_stopped_peer_ends_no_other(count: int, times: int) -> None:
    """The others get PeerLostError, which `run` handles, and not a time-out."""
    script = PROGRAMS / "interrupted.py"
    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as stack:
        peers = [Reporter(script, master.address, count, patience_s=PATIENCE_S) for _ in range(3)]
        for peer in peers:
            stack.callback(peer.kill)

        def go_on() -> None:
            """Returns when all have made a new step together."""
            done = max(report.get("step", 0) for peer in peers for report in [{}, *peer.reports])
            for peer in peers:
                peer.wait_for(lambda report: report.get("step", 0) > done + 3)

        for turn in range(times):
            go_on()
            stopped, interrupted = peers[turn % 3], peers[(turn + 1 + turn // 3 % 2) % 3]
            blows = (
                (stopped, signal.SIGSTOP),
                (interrupted, signal.SIGINT),
                (stopped, signal.SIGCONT),
            )
            for who, blow in blows:
                time.sleep(random.random() * 0.2)  # any moment of a step will do
                os.kill(who.process.pid, blow)
            interrupted.wait_for(lambda report: "interrupted" in report)
        go_on()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
def test_a_frozen_peer_is_dropped(workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_MS", "200")
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", "1000")
    with pccl.MasterNode("127.0.0.1:0") as master:
        alive = [workers(master.address, slot, 10_000) for slot in range(3)]
        for worker in alive:
            worker.wait_for(lambda r: r.get("world") == 3)
        os.kill(alive[0].process.pid, signal.SIGSTOP)
        for worker in alive[1:]:
            worker.wait_for(lambda r: r.get("world") == 2)
        agree(alive)


def test_a_peer_that_leaves_costs_the_others_nothing(backend: str) -> None:
    with Cluster(3) as cluster:
        leaver = cluster.comms.pop()
        array = np.ones(1000)

        def job(index: int, comm: pccl.Communicator) -> None:
            mine = np.ones(1000)
            comm.all_reduce(mine, mine, op=pccl.ReduceOp.SUM)
            assert (mine == 2).all()

        in_threads([leaver.close, lambda: cluster.each(job)])
        assert [comm.world_size for comm in cluster.comms] == [2, 2]
        with pytest.raises(pccl.PCCLError, match="closed"):
            leaver.all_reduce(array, array, op=pccl.ReduceOp.SUM)


def test_the_last_survivor_is_told_that_it_is_alone(backend: str) -> None:
    with Cluster(2) as cluster:
        survivor, victim = cluster.comms
        array = np.arange(1000.0)
        handle = survivor.all_reduce_async(array, array, op=pccl.ReduceOp.SUM)
        victim.close()
        assert handle.error is None
        assert handle.wait() == (False, 8, pccl.ReduceInfo(0, 0, 0))
        assert isinstance(handle.error, pccl.PeerLostError)
        assert "left" in str(handle.error) and "all_reduce_async" in str(handle.error)
        np.testing.assert_array_equal(array, np.arange(1000.0))
        with pytest.raises(pccl.TooFewPeersError):
            survivor.all_reduce(array, array, op=pccl.ReduceOp.SUM)
        assert survivor.world_size == 1


def test_a_lost_master_is_a_different_result(backend: str) -> None:
    with Cluster(2) as cluster:
        array = np.ones(1000)
        handle = cluster.comms[0].all_reduce_async(array, array, op=pccl.ReduceOp.SUM)
        cluster.master.interrupt()
        ok, status, _ = handle.wait()
        assert (ok, status) == (False, pccl.Result.MASTER_CONNECTION_FAILED.value)
        with pytest.raises(pccl.MasterLostError):
            cluster.comms[0].update_topology()


def test_deleting_a_communicator_with_a_collective_pending(backend: str) -> None:
    with Cluster(2) as cluster:
        survivor, deleted = cluster.comms
        array = np.ones(1000)
        handle = deleted.all_reduce_async(array, array, op=pccl.ReduceOp.SUM)
        cluster.comms = [survivor]
        del deleted
        ok, status, _ = handle.wait()
        assert (ok, status) == (False, pccl.Result.INVALID_USAGE.value)
        while survivor.world_size > 1:
            survivor.are_peers_pending()


def test_no_master() -> None:
    comm = pccl.Communicator("127.0.0.1:1")
    with pytest.raises(pccl.MasterLostError, match="no pccl master answers"):
        comm.connect(n_attempts=1)
