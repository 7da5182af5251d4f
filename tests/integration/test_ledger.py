"""The ledger among real peers: each sample has its effect once, whoever comes and goes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl.data import Ledger, LedgerSampler

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "exactly_once.py"
SAMPLES, EPOCHS = 70, 3
PEERS, DESERTERS = 4, 2
JOIN_AT = 12  # the revision at which others take the places of the deserters


class Left(Exception):
    """A peer is gone, as a test wanted it."""


class Leaving:
    """A communicator that leaves the run instead of its `nth` call of `name`; None: it stays."""

    def __init__(self, comm: pccl.Communicator, name: str | None, nth: int) -> None:
        self._comm, self._name, self._left = comm, name, nth

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._left -= 1
            if not self._left:
                raise Left
        return getattr(self._comm, name)


def reduce(comm: Any, arrays: list[np.ndarray]) -> None:
    while True:
        try:
            comm.all_reduce(arrays, op="sum")
            return
        except pccl.PeerLostError:
            pass
        except pccl.TooFewPeersError:
            return


def train(address: str, share: int, leave_in: str | None, nth: int, left: threading.Event) -> Any:
    """A peer; its model is how often each sample has had its effect."""
    ledger = Ledger(SAMPLES, share=share, epochs=EPOCHS, peers_max=PEERS)
    effect = np.zeros(SAMPLES * EPOCHS, np.int64)
    effect_info = pccl.TensorInfo.from_numpy(effect, "effect")
    shared = pccl.SharedState([effect_info, *ledger.entries()])
    seen: list[int] = []
    try:
        with pccl.Communicator(address) as real:
            comm: Any = Leaving(real, leave_in, nth)
            comm.wait_for_peers(PEERS)
            comm.sync_shared_state(shared)
            ledger.claim(comm)
            while not ledger.finished:
                seen += LedgerSampler(ledger, seed=5)
                progress = np.zeros_like(effect)
                for part in ledger.share:
                    progress[part.start : part.stop] += 1
                vote = ledger.vote()
                reduce(comm, [progress, vote])
                effect += progress
                ledger.settle(vote)
                shared.push_revision()
                if shared.revision == JOIN_AT:
                    comm.wait_for_peers(PEERS)
                comm.sync_shared_state(shared, raise_on_divergence=shared.revision != JOIN_AT)
                ledger.claim(comm)
    except Left:
        left.set()
        return None
    return effect, seen


@pytest.mark.parametrize("nth", [2, 5])
@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "sync_shared_state"])
def test_each_sample_counts_once_through_losses_and_joins(
    address: str, name: str, nth: int
) -> None:
    left = [threading.Event() for _ in range(DESERTERS)]

    def newcomer(number: int) -> Any:
        assert left[number].wait(PATIENCE_S)
        return train(address, 2, None, 0, left[number])

    with ThreadPoolExecutor(PEERS + DESERTERS) as pool:
        stay = threading.Event()
        peers = [pool.submit(train, address, 1 + i, None, 0, stay) for i in range(2)]
        for i in range(DESERTERS):
            pool.submit(train, address, 3, name, nth + i, left[i])
        peers += [pool.submit(newcomer, i) for i in range(DESERTERS)]
        results = [peer.result(PATIENCE_S) for peer in peers]
    assert all((effect == 1).all() for effect, _ in results)
    seen = {place for _, own in results for place in own}
    assert seen <= set(range(SAMPLES))
    assert all(own for _, own in results)


def count(address: str, text: Path) -> subprocess.Popen[str]:
    words = [str(EXAMPLE), str(text), "--master-address", address, "--min-peers", "3"]
    return subprocess.Popen(
        [sys.executable, *words, "--round-s", "0.03"], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing_and_count_nothing_twice(
    address: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"".join(file.read_bytes() for file in EXAMPLE.parent.glob("*.py")) * 4)
    peers = [count(address, text) for _ in range(3)]
    first = peers[0].stdout
    assert first is not None
    try:
        for place in (1, 2, 1):
            for _ in range(8):
                assert first.readline()
            peers[place].kill()
            peers[place].wait()
            assert peers[place].stdout is not None
            peers[place].stdout.close()
            peers[place] = count(address, text)
        outputs = [peer.communicate(timeout=PATIENCE_S)[0] for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    assert [output.splitlines()[-1] for output in outputs] == ["exact: True"] * 3
    joined = [int(output.split()[0]) for output in outputs[1:]]
    assert all(joined), "they have joined a run of theirs"
