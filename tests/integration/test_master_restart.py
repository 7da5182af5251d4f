"""A master that is killed and started again, as a real process, in the middle of everything."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import in_threads
from peers.processes import Master, Worker, agree

import pccl

ONE_BACKEND = pytest.mark.parametrize(  # by default: a restart does not depend on it
    "backend", ["libzmq", pytest.param("pyzmq", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def team(backend: str) -> Iterator[Callable[[str, int], Worker]]:
    started: list[Worker] = []

    def start(address: str, slot: int) -> Worker:
        started.append(Worker(address, slot, 100_003))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.kill()


def restart_again_and_again(
    team: Callable[[str, int], Worker], state: Path | None, times: int, pause_s: float
) -> None:
    rng = random.Random(time.time())
    master = Master(*([] if state is None else ["--state", str(state)]))
    try:
        workers = [team(master.address, slot) for slot in range(3)]
        for _ in range(times):
            for worker in workers:
                worker.wait_for(lambda r: r.get("world") == 3)
            moment = threading.Event()
            moment.wait(rng.uniform(0, 0.2))  # the moment of death is what is random here
            master.kill()
            moment.wait(rng.uniform(0, pause_s))
            master.start()
            for worker in workers:
                while not worker.news.empty():
                    worker.wait_for(lambda r: True)
        for worker in workers:
            worker.wait_for(lambda r: r.get("world") == 3)
        joined = team(master.address, 3)
        for worker in [*workers, joined]:
            worker.wait_for(lambda r: r.get("world") == 4)
            worker.kill()
        agree([*workers, joined])
    finally:
        master.kill()


@ONE_BACKEND
def test_with_a_journal(team: Callable[[str, int], Worker], tmp_path: Path) -> None:
    restart_again_and_again(team, tmp_path / "master.db", times=3, pause_s=1.0)


@ONE_BACKEND
@pytest.mark.slow
def test_without_a_journal(team: Callable[[str, int], Worker]) -> None:
    restart_again_and_again(team, None, times=2, pause_s=1.0)


def test_a_newcomer_is_still_pending_after_a_restart(tmp_path: Path) -> None:
    """Being welcomed once more is not being admitted: connect() goes on waiting."""
    master = Master("--state", str(tmp_path / "master.db"))
    first, newcomer = pccl.Communicator(master.address), pccl.Communicator(master.address)

    def join() -> float:
        newcomer.connect()
        return total(newcomer)

    def total(comm: pccl.Communicator) -> float:
        x = np.ones(10)
        comm.all_reduce(x, op="sum")
        return float(x[0])

    def admit() -> float:
        while not first.are_peers_pending():
            pass
        master.kill()
        master.start()
        while not first.are_peers_pending():
            pass
        for _ in range(50):  # it is asked time and again whether it stays so
            assert first.are_peers_pending()
        first.update_topology()
        return total(first)

    try:
        first.connect()
        assert in_threads([join, admit]) == [2.0, 2.0]
    finally:
        first.close()
        newcomer.close()
        master.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_times(team: Callable[[str, int], Worker], tmp_path: Path) -> None:
    restart_again_and_again(team, tmp_path / "master.db", times=20, pause_s=5.0)
