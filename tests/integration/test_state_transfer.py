"""Transfers of shared state when peers die, lie or differ; and how they are reported."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, client_of, grow
from peers.waiting import PATIENCE_S

import pccl
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.sync import LeafResult, Staging

SUPPORT = Path(__file__).resolve().parents[1] / "support"
MIB = 1 << 20


def state(array: np.ndarray, revision: int = 0) -> pccl.SharedState:
    made = pccl.SharedState.from_tensors({"x": array})
    made.revision = revision
    return made


def test_several_holders_share_the_work(backend: str) -> None:
    """Of different sizes, so that the last leaves and chunks are short ones."""
    count = 41 * MIB + 17
    held = np.random.default_rng(1).integers(0, 256, count, np.uint8)
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            array = held.copy() if index < 2 else ~held
            info = comm.sync_shared_state(state(array, revision=int(index < 2)))
            assert np.array_equal(array, held)
            assert info.hashed_bytes == count and info.hash_seconds > 0
            return info

        infos = cluster.each(job)
        assert infos[2].rx_bytes == infos[0].tx_bytes + infos[1].tx_bytes == count
        assert min(info.tx_bytes for info in infos[:2]) > 0


def test_a_holder_keeps_its_budget(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower bound of the time, so no load can break it: 4 MB at 80 Mbit/s, but for one chunk."""
    monkeypatch.setenv("PCCL_SYNC_MBITS", "80")
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> float:
            array = np.full(4_000_000, 1 - index, np.uint8)
            began = time.monotonic()
            comm.sync_shared_state(state(array, revision=1 - index))
            assert (array == 1).all()
            return time.monotonic() - began

        assert min(cluster.each(job)) > (4_000_000 - MIB) / 10e6 - 0.02


# ---- deaths ----


@contextmanager
def holders(
    address: str, number: int, peers: int, mib: int
) -> Iterator[list[subprocess.Popen[str]]]:
    program = [
        sys.executable,
        str(SUPPORT / "programs" / "holder.py"),
        address,
        str(peers),
        str(mib),
    ]
    running = [
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        yield running
    finally:
        for peer in running:
            peer.kill()
            peer.communicate()


@pytest.mark.parametrize(
    "backend", ["libzmq", pytest.param("pyzmq", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("how", "victims"), [("SIGKILL", 1), ("SIGKILL", 2), ("SIGSTOP", 1)], ids=str
)
def test_holders_are_lost_in_the_middle(
    backend: str, how: str, victims: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If one of two holders is lost, the other serves the rest; if both are, content is torn."""
    mib = 64
    if how == "SIGSTOP":
        monkeypatch.setenv("PCCL_HEARTBEAT_MS", "200")
        monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", "2000")
    with pccl.MasterNode("127.0.0.1:0") as master, holders(master.address, 2, 3, mib) as running:
        array = np.zeros(mib * MIB, np.uint8)
        verify, verified = Staging.verify, 0

        def strike(self: Staging, piece: int, leaf: int) -> list[LeafResult]:
            nonlocal verified
            verified += 1
            for peer in running[: victims if verified == 5 else 0]:
                peer.send_signal(getattr(signal, how))
            return verify(self, piece, leaf)

        monkeypatch.setattr(Staging, "verify", strike)
        shared, saved = state(array), tmp_path / "saved"
        shared.save(saved)
        with pccl.Communicator(master.address) as comm:
            grow(comm, 3)
            if victims == 1:
                info = comm.sync_shared_state(shared)
                assert (array == 1).all() and shared.revision == 1 and not shared.torn
                assert info.rx_bytes == array.nbytes  # what is asked for again comes once
                out, _ = running[1].communicate(timeout=PATIENCE_S)
                assert 0 < int(out)
            else:
                for _ in range(2):  # no holder is left to mend it
                    with pytest.raises(
                        pccl.PCCLError, match=r"no peer is left .* load\(\)"
                    ) as error:
                        comm.sync_shared_state(shared)
                    assert error.value.result is pccl.Result.NO_SHARED_STATE_AVAILABLE
                    listed(f"{type(error.value).__name__}: {error.value}")
                    assert shared.torn and shared.revision == 0
                with pytest.raises(ValueError, match="torn"):
                    shared.save(tmp_path / "torn")
                with pytest.raises(pccl.PCCLError, match=r"SEND_ONLY, but .* torn"):
                    comm.sync_shared_state(shared, pccl.SharedStateSyncStrategy.SEND_ONLY)
                shared.load(saved)
                assert not shared.torn and (array == 0).all()
                comm.sync_shared_state(shared)
            assert verified >= 5


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_receiver_is_killed_in_the_middle(backend: str) -> None:
    mib = 64
    with pccl.MasterNode("127.0.0.1:0") as master, holders(master.address, 2, 3, mib) as running:
        program = [sys.executable, "-c", RECEIVER, master.address, str(mib)]
        receiver = subprocess.run(
            program, cwd=SUPPORT, timeout=PATIENCE_S, capture_output=True, text=True
        )
        assert receiver.returncode == -signal.SIGKILL, receiver.stderr
        for peer in running:  # it ends for them as if it had not been there
            out, error = peer.communicate(timeout=PATIENCE_S)
            assert out.strip().isdecimal(), error


RECEIVER = """
import os, signal, sys
import numpy as np
import pccl
from peers.cluster import gather
from pccl.runtime.client.sync import Staging

verified = []

def die(self, piece, leaf):
    verified.append(leaf)
    if len(verified) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return verify(self, piece, leaf)

verify, Staging.verify = Staging.verify, die
comm = pccl.Communicator(sys.argv[1])
gather(comm, 3)
shared = pccl.SharedState.from_tensors({"x": np.zeros(int(sys.argv[2]) << 20, np.uint8)})
comm.sync_shared_state(shared)
"""


# ---- lies ----


def spoil(monkeypatch: pytest.MonkeyPatch, liar: pccl.Communicator, array: np.ndarray) -> None:
    """The memory of a holder changes between its digest and its transfer."""
    sync, client = PeerClient.sync, client_of(liar)

    def wrapper(self: PeerClient, *arguments: object) -> Call:
        if self is client:
            array[7 * MIB :: 4 * MIB] ^= 1
        return sync(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerClient, "sync", wrapper)


def test_a_holder_of_wrong_data_is_not_asked_again(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20 * MIB
    with Cluster(3) as cluster:
        arrays = [np.full(count, 5 * (index < 2), np.uint8) for index in range(3)]
        spoil(monkeypatch, cluster.comms[0], arrays[0])

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            return comm.sync_shared_state(state(arrays[index], revision=int(index < 2)))

        infos = cluster.each(job)
        assert (arrays[2] == 5).all()
        assert count <= infos[2].rx_bytes <= 2 * count
        assert cluster.comms[2].world_size == 3


def test_a_receiver_of_wrong_data_alone_knows_that_its_state_is_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three attempts the master drops one of the two: it cannot know which one is wrong."""
    count = 20 * MIB
    with Cluster(2) as cluster:
        arrays = [np.full(count, 5 * (index < 1), np.uint8) for index in range(2)]
        spoil(monkeypatch, cluster.comms[0], arrays[0])

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = state(arrays[index], revision=int(index < 1))
            if index == 0:
                comm.sync_shared_state(shared)
                return
            why = "failed transfers of shared state.* is torn"
            with pytest.raises(pccl.KickedError, match=why):
                comm.sync_shared_state(shared)
            assert shared.torn

        cluster.each(job)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak of a process's memory")
def test_a_newcomer_needs_no_second_copy() -> None:
    """64 MiB at most, whatever the size; both peers are in this process."""

    def status(name: str) -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return int(text.split(f"{name}:")[1].split()[0]) << 10

    count = 128 * MIB
    with Cluster(2) as cluster:
        arrays = [np.full(count, index + 1, np.uint8) for index in range(2)]
        before: list[int] = []

        def job(index: int, comm: pccl.Communicator) -> None:
            if index == 0:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                before.append(status("VmRSS"))
            comm.sync_shared_state(state(arrays[index], revision=1 - index))

        cluster.each(job)
        extra = status("VmHWM") - before[0]
        assert (arrays[1] == 1).all()
    assert extra < 64 * MIB, f"{extra / MIB:.0f} MiB more at the peak"


# ---- divergence ----


def diverged(index: int) -> dict[str, np.ndarray]:
    weights = np.linspace(1, 2, 1000, dtype=np.float32)
    counter = np.zeros(3, np.int64)
    if index == 1:
        weights[10] = np.nextafter(weights[10], np.float32(3))
        weights[20:22] = np.nan
        counter[0] = -4
    return {"same": np.ones(5), "weights": weights, "counter": counter}


def test_divergence_is_logged_on_all_peers(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(3) as cluster:
        logging.getLogger("pccl").addHandler(caplog.handler)
        try:

            def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
                shared = pccl.SharedState.from_tensors(diverged(index))
                shared.revision = 100  # a run that resumes
                return comm.sync_shared_state(shared)

            infos = cluster.each(job)
        finally:
            logging.getLogger("pccl").removeHandler(caplog.handler)
    assert infos[0].divergence == infos[1].divergence == infos[2].divergence
    weights, counter = infos[0].divergence
    assert weights.peer == counter.peer and weights.peer.startswith(("peer 2 (", "peer 3 ("))
    assert (weights.name, weights.nbytes, weights.max_ulp) == ("weights", 4000, 1)
    assert (weights.nans, weights.nans_elected) == (2, 0)
    assert 3 <= weights.differing_bytes <= 12
    assert weights.share == weights.differing_bytes / 4000
    assert (counter.name, counter.max_ulp, counter.nans) == ("counter", 4, 0)
    assert counter.share == 8 / 24
    assert "2 NaNs" in caplog.text and "'counter'" in caplog.text


def test_a_newcomer_and_a_fresh_run_have_not_diverged() -> None:
    with Cluster(2) as cluster:
        shareds = [state(np.full(5, float(index))) for index in range(2)]
        infos = cluster.each(
            lambda i, comm: comm.sync_shared_state(shareds[i], raise_on_divergence=True)
        )
        assert [info.divergence for info in infos] == [(), ()]
        cluster.join()
        shareds.append(state(np.full(5, 9.0)))
        infos = cluster.each(
            lambda i, comm: comm.sync_shared_state(shareds[i], raise_on_divergence=True)
        )
        assert [info.rx_bytes for info in infos] == [0, 0, 40]
        assert [info.divergence for info in infos] == [(), (), ()]


def test_divergence_can_be_an_error(backend: str) -> None:
    """One peer that wants it is enough. Nothing has changed, and the next call repairs it."""
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = np.full(1000, float(index == 2))
            shared = state(array, revision=7)
            with pytest.raises(pccl.DivergenceError, match=r"peer [23] .* in 1 entries \('x'\)"):
                comm.sync_shared_state(shared, raise_on_divergence=index == 1)
            assert (array == (index == 2)).all() and shared.revision == 7
            info = comm.sync_shared_state(shared)
            assert (array == 0).all()
            assert [one.name for one in info.divergence] == ["x"]

        cluster.each(job)


# ---- progress ----


def test_progress_is_reported_to_the_receiver(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = 9 * MIB
    monkeypatch.setattr("pccl.runtime.limits.PROGRESS_LOG_S", 0.0)
    caplog.set_level(logging.INFO, logger="pccl")
    monkeypatch.setattr(logging.getLogger("pccl"), "handlers", [caplog.handler])
    with Cluster(2) as cluster:
        told: list[list[pccl.SharedStateProgress]] = [[], []]

        def job(index: int, comm: pccl.Communicator) -> None:
            arrays = {
                "a": np.full(count, 1 - index, np.uint8),
                "b": np.full(3, 1 - index, np.uint8),
            }
            shared = pccl.SharedState.from_tensors(arrays)
            shared.revision = 1 - index
            comm.sync_shared_state(shared, progress=told[index].append)

        cluster.each(job)
    assert told[0] == []
    done = [progress.nbytes for progress in told[1]]
    assert done == sorted(done) and done[-1] == count + 3
    last = told[1][-1]
    assert (last.entries, last.entries_total, last.nbytes_total) == (2, 2, count + 3)
    assert last.bytes_per_second > 0 and last.seconds_left == 0
    assert "2 of 2 entries" in str(last)
    lines = [line for line in caplog.messages if line.startswith("shared state: ")]
    assert len(lines) > 1
    assert re.fullmatch(
        r"shared state: 2 of 2 entries, 9 of 9 MB, \d+ MB/s, 0 s left", lines[-1]
    ), lines


@pytest.mark.parametrize("behind", [False, True])
def test_a_callback_that_fails_leaves_nothing_that_is_taken_for_whole(behind: bool) -> None:
    """A peer that was behind knows that its content is torn; a drifted peer keeps its content."""
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = np.full(9 * MIB, 1 - index, np.uint8)
            shared = state(array, revision=1 - index if behind else 1)

            def fail(progress: pccl.SharedStateProgress) -> None:
                raise LookupError("a bug of the user's")

            if index == 0:
                with pytest.raises(pccl.PCCLTimeoutError, match="peer 2"):
                    comm.sync_shared_state(shared)
            else:
                with pytest.raises(LookupError, match="a bug") as error:
                    comm.sync_shared_state(shared, progress=fail)
                assert shared.torn == behind
                assert ["torn" in note for note in getattr(error.value, "__notes__", [])] == (
                    [True] if behind else []
                )
                assert behind or (array == 0).all()
            comm.sync_shared_state(shared)
            assert (array == 1).all() and shared.revision == 1 and not shared.torn

        cluster.each(job)


def test_the_error_of_a_late_callback_is_raised_after_the_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others have gone on with the elected content: so does this peer."""
    monkeypatch.setattr(PeerClient, "time_out", lambda *arguments: None)
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = np.full(9 * MIB, 1 - index, np.uint8)
            shared = state(array, revision=1 - index)

            def fail(progress: pccl.SharedStateProgress) -> None:
                raise LookupError("a bug of the user's")

            if index == 0:
                comm.sync_shared_state(shared)
            else:
                with pytest.raises(LookupError, match="a bug"):
                    comm.sync_shared_state(shared, progress=fail)
            assert (array == 1).all() and shared.revision == comm.revision == 1

        cluster.each(job)
