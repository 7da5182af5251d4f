"""`Communicator.admit` and `run`: newcomers at any place of a loop, losses in the middle."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl.runtime.client.sync import Staging

STEPS = 12


def state_of(size: int) -> tuple[np.ndarray, pccl.SharedState]:
    weights = np.zeros(size, np.float32)
    return weights, pccl.SharedState.from_tensors({"weights": weights})


class Peers:
    """Peers in threads that train until all steps are made."""

    def __init__(self, address: str, elements: int = 1000) -> None:
        self.address, self.elements = address, elements
        self.pool = ThreadPoolExecutor(8)
        self.changed = threading.Condition()
        self.steps: dict[str, list[int]] = {}
        self.comms: dict[str, pccl.Communicator] = {}

    def made(self, name: str, number: int) -> None:
        with self.changed:
            self.steps.setdefault(name, []).append(number)
            self.changed.notify_all()

    def until(self, name: str, number: int) -> None:
        """Waits until that peer has made that step."""
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.steps.get(name, ()), 30)

    def begin(self, way: str, name: str, until: int = STEPS, **how: int) -> Future[np.ndarray]:
        return self.pool.submit(getattr(self, way), name, until, **how)

    def by_hand(self, name: str, until: int, wait_for: int = 1) -> np.ndarray:
        """Admits on the first line of the loop."""
        weights, state = state_of(self.elements)
        with pccl.Communicator(self.address) as comm:
            self.comms[name] = comm
            comm.wait_for_peers(wait_for)
            while True:
                comm.admit(state)
                if state.revision >= until:
                    return weights
                progress = np.full_like(weights, state.revision)
                try:
                    comm.all_reduce(progress)
                except pccl.PeerLostError:
                    continue
                except pccl.TooFewPeersError:
                    pass
                weights += progress
                self.made(name, state.revision)
                state.push_revision()

    def at_the_end(self, name: str, until: int, wait_for: int = 1) -> np.ndarray:
        """Synchronizes before the loop, and admits on its last line."""
        weights, state = state_of(self.elements)
        with pccl.Communicator(self.address) as comm:
            self.comms[name] = comm
            comm.sync_shared_state(state, min_peers=wait_for)
            while state.revision < until:
                progress = np.full_like(weights, state.revision)
                try:
                    comm.all_reduce(progress)
                except pccl.PeerLostError:
                    continue
                except pccl.TooFewPeersError:
                    pass
                weights += progress
                self.made(name, state.revision)
                state.push_revision()
                comm.admit(state)
        return weights

    def helped(self, name: str, until: int, wait_for: int = 1) -> np.ndarray:
        """By `run`."""
        weights, state = state_of(self.elements)
        with pccl.Communicator(self.address) as comm:
            self.comms[name] = comm

            def step(number: int) -> None:
                progress = np.full_like(weights, number)
                comm.all_reduce(progress)
                np.add(weights, progress, out=weights)
                self.made(name, number)

            comm.run(step, state, steps=until, min_peers=max(2, wait_for))
        return weights


WAYS = ("by_hand", "at_the_end", "helped")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("elements", [1000, 100_000])
def test_a_newcomer_enters_at_the_right_call(address: str, way: str, elements: int) -> None:
    peers = Peers(address, elements)
    first = [peers.begin(way, name, 200, wait_for=2) for name in "ab"]
    peers.until("a", 5)
    late = [peers.begin(way, name, 200) for name in "cd"]
    results = [future.result(PATIENCE_S) for future in (*first, *late)]
    wanted = np.full(elements, sum(range(200)), np.float32)
    for found in results:
        np.testing.assert_array_equal(found, wanted)
    assert all(peers.steps[name][0] > 5 for name in "cd"), "newcomers go on where the others are"


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_made_again_after_a_loss(address: str, way: str) -> None:
    peers = Peers(address, 100_000)
    futures = {name: peers.begin(way, name, 200, wait_for=3) for name in "abc"}
    peers.until("b", 5)
    peers.comms["c"].close()
    peers.until("a", 20)
    futures["d"] = peers.begin(way, "d", 200)
    with pytest.raises(pccl.PCCLError):
        futures.pop("c").result(PATIENCE_S)
    wanted = np.full(100_000, sum(range(200)), np.float32)
    for future in futures.values():
        np.testing.assert_array_equal(future.result(PATIENCE_S), wanted)
    assert peers.steps["a"] == [*range(200)], "each step is made once"


def test_the_last_peer_waits_for_others(address: str) -> None:
    peers = Peers(address)
    futures = {name: peers.begin("helped", name, 200, wait_for=2) for name in "ab"}
    peers.until("b", 5)
    peers.comms["b"].close()
    with pytest.raises(pccl.PCCLError):
        futures.pop("b").result(PATIENCE_S)
    futures["c"] = peers.begin("helped", "c", 200)
    found = [future.result(PATIENCE_S) for future in futures.values()]
    np.testing.assert_array_equal(found[0], found[1])
    assert peers.steps["a"] == [*range(200)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("peers", [1, 2])
def test_a_run_that_an_exception_has_ended_may_be_called_again(
    address: str, peers: int, when: str
) -> None:
    """The step's exception, before or after its collective, costs the other peer nothing."""

    def peer(number: int) -> np.ndarray:
        weights, state = state_of(100)
        errors = [RuntimeError("of the test")] if number == 0 else []

        def step(number: int) -> None:
            progress = np.full_like(weights, number)
            if number == 5 and errors and when == "before":
                raise errors.pop()
            if peers > 1:
                comm.all_reduce(progress)
            if number == 5 and errors:
                raise errors.pop()
            np.add(weights, progress, out=weights)

        with pccl.Communicator(address) as comm:
            with contextlib.suppress(RuntimeError):
                comm.run(step, state, steps=20, min_peers=peers)
            if number == 0:
                comm.run(step, state, steps=20, min_peers=peers)
        return weights

    with ThreadPoolExecutor(peers) as pool:
        for found in pool.map(peer, range(peers)):
            np.testing.assert_array_equal(found, np.full(100, sum(range(20)), np.float32))


@pytest.mark.parametrize("how", ["lost", "exception"])
def test_what_befalls_a_newcomer_that_fetches_costs_the_others_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is lost, or an exception leaves its run; then it comes again."""
    errors, make = [MemoryError("of the test")], Staging.__init__

    def fail(*arguments: Any) -> None:
        if errors and how == "lost":
            comm.close()
        if errors:
            raise errors.pop()
        make(*arguments)

    peers = Peers(address)
    first = [peers.begin("helped", name, 200, wait_for=2) for name in "ab"]
    peers.until("a", 5)
    monkeypatch.setattr(Staging, "__init__", fail)
    weights, state = state_of(1000)
    with pccl.Communicator(address) as comm:
        with pytest.raises(MemoryError):
            comm.run(lambda _: None, state, steps=200)

        def step(number: int) -> None:
            progress = np.full_like(weights, number)
            comm.all_reduce(progress)
            np.add(weights, progress, out=weights)

        comm.run(step, state, steps=200)
    for future in first:
        np.testing.assert_array_equal(future.result(50), weights)
    assert not errors


def test_what_happens_before_a_run_does_not_keep_it_from_synchronizing(address: str) -> None:
    def peer(number: int) -> np.ndarray:
        weights, state = state_of(100)
        weights += number
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(3)
            comm.barrier()
            comm.run(lambda _: comm.all_reduce(weights), state, steps=3)
            return weights

    with ThreadPoolExecutor(3) as pool:
        one, *others = pool.map(peer, range(3))
    for other in others:
        np.testing.assert_array_equal(one, other)


# ---- one peer is wrong, and the others go on ----


def test_whoever_miscounts_is_refused_at_the_next_admission(address: str) -> None:
    peers = Peers(address)
    wait = threading.Event()

    def miscounts() -> None:
        weights, state = state_of(peers.elements)
        with pccl.Communicator(address) as comm:

            def step(number: int) -> None:
                comm.all_reduce(np.full_like(weights, number))
                peers.made("c", number)
                if number == 20:
                    state.push_revision()
                    wait.set()

            comm.run(step, state, steps=200, min_peers=3)

    wrong = peers.pool.submit(miscounts)
    right = [peers.begin("helped", name, 200, wait_for=3) for name in "ab"]
    assert wait.wait(PATIENCE_S)
    right.append(peers.begin("helped", "d", 200))
    with pytest.raises(pccl.PCCLError, match="revision"):
        wrong.result(PATIENCE_S)
    found = [future.result(PATIENCE_S) for future in right]
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def test_other_content_is_found_at_the_end(address: str, caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers(address)

    def drifts() -> None:
        weights, state = state_of(peers.elements)
        with pccl.Communicator(address) as comm:

            def step(number: int) -> None:
                comm.all_reduce(progress := np.full_like(weights, number))
                weights[:] += progress
                weights[7] += number == 3

            comm.run(step, state, steps=9, min_peers=3)

    wrong = peers.pool.submit(drifts)
    right = [peers.begin("helped", name, 9, wait_for=3) for name in "ab"]
    with pytest.raises(pccl.DivergenceError, match=r"run: .* ended the run with another shared"):
        wrong.result(PATIENCE_S)
    for future in right:
        np.testing.assert_array_equal(
            future.result(PATIENCE_S), np.full(1000, sum(range(9)), np.float32)
        )
    assert caplog.text.count("ended the run with another shared state") == 2


# ---- the end of a run ----


def test_a_finished_run_admits_no_peer(address: str) -> None:
    peers = Peers(address)
    futures = [peers.begin("helped", name, 50, wait_for=2) for name in "ab"]
    for future in futures:
        future.result(PATIENCE_S)
    with pytest.raises(pccl.RunFinishedError, match="the run is finished") as found:
        peers.by_hand("late", 50)
    assert found.value.result is pccl.Result.INVALID_USAGE
    assert isinstance(found.value, SystemExit) and found.value.code == 0


def test_a_pending_peer_gets_run_finished_error(address: str) -> None:
    with ThreadPoolExecutor(1) as pool, pccl.Communicator(address) as comm:
        late = pool.submit(pccl.Communicator(address).connect)
        while not comm.are_peers_pending():
            pass
        comm.finish()
        with pytest.raises(pccl.RunFinishedError):
            late.result(PATIENCE_S)
        comm.finish()  # again is fine, and who is there may go on
        assert comm.admit() in (True, False)


def test_finish_waits_for_all_living_peers(address: str) -> None:
    with ThreadPoolExecutor(1) as pool, pccl.Communicator(address) as comm:
        other = pccl.Communicator(address)
        joined = pool.submit(other.connect)
        comm.wait_for_peers(2)
        joined.result(PATIENCE_S)
        with pytest.raises(pccl.PCCLTimeoutError, match="finish"):
            comm.finish(timeout=0.2)
        finishing = pool.submit(comm.finish)
        other.close()  # it is not waited for any more
        finishing.result(PATIENCE_S)


def test_a_restarted_master_knows_that_the_run_is_finished(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with (
        pccl.MasterNode("127.0.0.1:0", state=journal) as master,
        pccl.Communicator(master.address) as comm,
    ):
        comm.finish()
    with pccl.MasterNode("127.0.0.1:0", state=journal) as master:
        with pytest.raises(pccl.RunFinishedError):
            pccl.Communicator(master.address).connect()


LATE = """
import pccl, os
with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
    print("joined")
    comm.finish()
"""


def test_a_copy_that_comes_too_late_ends_with_0(address: str) -> None:
    with pccl.Communicator(address) as comm:
        comm.finish()
    command = [sys.executable, "-m", "pccl", "run", "-n", "2", "--master", address, "--"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", LATE], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stderr
    assert "joined" not in ended.stdout and "started again" not in ended.stderr
    assert "the run is finished" in ended.stderr
