"""Checkpoints that all peers of a DiLoCo run write together."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peers.processes import Reporter

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from peers.waiting import wait_until  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # noqa: E402
from training.small import PATIENCE_S, Model, random, refuse, together  # noqa: E402

import pccl  # noqa: E402
from pccl.data import Ledger  # noqa: E402
from pccl.diloco import Checkpoints, DiLoCo  # noqa: E402


class Peer:
    """A peer that trains with Adam, by numbers of its own, on samples of a ledger."""

    def __init__(self, comm: Any, number: int, **options: Any) -> None:
        self.number, self.model = number, Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.ledger = Ledger(10_000, share=3 + number, peers_max=8)
        usual = {"inner_steps": 2, "wire": "int8", "ledger": self.ledger, "alone": "step"}
        self.diloco = DiLoCo(comm, self.model, self.optimizer, **{**usual, **options})

    def step(self) -> Any:
        self.model.move(random(1000 * self.number + self.diloco.outer_step))
        return self.diloco.step(samples=1)

    def until(self, outer_step: int) -> None:
        while self.diloco.outer_step < outer_step:
            self.step()

    def state(self) -> dict[str, Any]:
        state = self.diloco.state_dict()
        consumed = torch.tensor(self.ledger.consumed)
        return {"consumed": consumed, **{k: state[k] for k in ("theta", "velocity", "clock")}}


def run(address: str, peers: int, body: Callable[[Peer], Any], **options: Any) -> list[Any]:
    def peer(number: int) -> Callable[[], Any]:
        def train() -> Any:
            with pccl.Communicator(address) as comm:
                each = Peer(comm, number, min_peers=peers, **options)
                return body(each)

        return train

    return together(*(peer(number) for number in range(peers)))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def fresh() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes background writes happen at the end of a round."""

    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "pccl-checkpoint":
            thread.join()

    monkeypatch.setattr(threading.Thread, "start", started)


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "delayed": {"mode": "delayed"},
    "streaming": {"mode": "streaming", "fragments": 2, "inner_steps": 4, "overlap": 1},
    "decoupled": {"mode": "decoupled", "fragments": 2, "ledger": None},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("at_once")
def test_any_number_of_peers_goes_on_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    options = {**MODES[mode], "checkpoints": Checkpoints(tmp_path, every=2)}

    def begin(peer: Peer) -> Any:
        peer.until(4 if mode == "sync" else 5)
        peer.diloco.finish()
        return peer.state()

    with fresh() as address:
        ends = run(address, 3, begin, **options)
    saved = options["checkpoints"].latest()
    assert saved is not None and int(saved.name) >= 4

    def resume(peer: Peer) -> Any:
        return peer.state(), peer.diloco.state_digest(), len(peer.optimizer.state)

    found = []
    for peers in (1, 2, 4):
        with fresh() as address:
            found += run(address, peers, resume, **options)
    assert len({digest for _, digest, _ in found}) == 1
    assert mode != "sync" or equal(ends[0], found[0][0])
    assert all(equal(found[0][0], state) for state, _, _ in found)
    assert all(moments == 2 for _, _, moments in found), "each has the state of an inner optimizer"


@pytest.mark.usefixtures("at_once")
def test_torch_itself_reads_it_and_each_peer_has_written_a_part(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=2)

    def train(peer: Peer) -> Any:
        peer.until(2)
        peer.diloco.finish()
        return peer.state(), peer.diloco.state_dict()["averager"]["residual"]

    with fresh() as address:
        ends = run(address, 3, train, checkpoints=checkpoints)
    path = checkpoints.latest()
    assert path == tmp_path / "2"
    read: dict[str, Any] = {
        "theta": {name: torch.empty_like(p) for name, p in Model().named_parameters()},
        "clock": torch.empty(2, dtype=torch.int64),
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, checkpoint_id=path)
    flat = torch.cat([each.detach().flatten() for each in read["theta"].values()])
    assert torch.equal(flat, ends[0][0]["theta"])
    assert torch.equal(read["clock"], ends[0][0]["clock"])
    metadata = FileSystemReader(path).read_metadata()
    parts: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        of = metadata.state_dict_metadata[index.fqn]
        if not index.fqn.startswith("peers.") and hasattr(of, "chunks"):
            (chunk,) = (each for each in of.chunks if each.offsets == index.offset)
            size = chunk.sizes.numel() * of.properties.dtype.itemsize
            parts[info.relative_path] = parts.get(info.relative_path, 0) + size
    assert len(parts) == 3 and max(parts.values()) < 1.2 * min(parts.values())

    def resume(peer: Peer) -> Any:
        return peer.diloco.state_dict()["averager"]["residual"]

    with fresh() as address:
        found = run(address, 2, resume, checkpoints=checkpoints)
    mean = sum(residual for _, residual in ends) / 3
    assert all(torch.allclose(each, mean, atol=1e-7) for each in found)


@pytest.mark.usefixtures("at_once")
def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1, keep=2)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "left.by.another").touch()

    def train(peer: Peer) -> None:
        peer.until(9)
        peer.diloco.finish()

    with fresh() as address:
        run(address, 2, train, checkpoints=checkpoints)
    assert checkpoints.latest() == tmp_path / "9"
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2 and all((each / ".metadata").exists() for each in left)
    assert len([*(tmp_path / "9").iterdir()]) == 4, "two parts, their digests, and the metadata"


@pytest.mark.parametrize("last", [4, 5])
def test_no_peer_ends_before_the_checkpoint_is_complete(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer completes it, while the other one waits, whether it was written in the last round
    or in the one before."""
    ended, complete = threading.Event(), FileSystemWriter.finish

    def slowly(writer: Any, *results: Any) -> None:
        assert not ended.wait(0.3)
        complete(writer, *results)

    monkeypatch.setattr(FileSystemWriter, "finish", slowly)
    checkpoints = Checkpoints(tmp_path, every=4)

    def train(peer: Peer) -> Any:
        peer.until(last)
        peer.diloco.finish()
        ended.set()
        return checkpoints.latest()

    with fresh() as address:
        assert run(address, 2, train, checkpoints=checkpoints) == [tmp_path / "4"] * 2


def fill(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The disk of the second peer is full while it writes this checkpoint."""
    write = FileSystemWriter.write_data

    def write_data(writer: Any, plan: Any, planner: Any) -> Any:
        written = write(writer, plan, planner)
        if Path(writer.path).name == str(step) and ".0.1." in plan.storage_data.prefix:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)


@pytest.mark.usefixtures("at_once")
def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, every=2, keep=9)
    fill(monkeypatch, 4)

    def train(peer: Peer) -> Any:
        peer.until(6)
        peer.diloco.finish()
        return peer.diloco.state_digest()

    with fresh() as address:
        ends = run(address, 2, train, checkpoints=checkpoints)
    assert len({*ends}) == 1
    names = {each.name for each in tmp_path.iterdir() if (each / ".metadata").exists()}
    assert names == {"2", "6"}
    assert not [*(tmp_path / "4").glob("*.1.*")], "what was written of it is removed"
    assert "No space left on device" in caplog.text
    assert "checkpoint 4 is abandoned: not all peers have written their parts" in caplog.text


def test_directories_that_are_not_the_same_are_refused_in_the_first_round(tmp_path: Path) -> None:
    with fresh() as address:
        first = threading.Event()

        def oldest() -> Any:
            with pccl.Communicator(address) as comm:
                first.set()
                peer = Peer(comm, 0, min_peers=2, checkpoints=Checkpoints(tmp_path / "0"))
                peer.until(3)
                return peer.diloco.outer_step

        def other() -> None:
            assert first.wait(PATIENCE_S)
            with pccl.Communicator(address) as comm:
                peer = Peer(comm, 1, min_peers=2, checkpoints=Checkpoints(tmp_path / "1"))
                with pytest.raises(ValueError, match="whole=True"):
                    peer.until(3)

        together(oldest, other)


@pytest.mark.usefixtures("at_once")
def test_peers_without_a_common_file_system_write_all_that_they_need(tmp_path: Path) -> None:
    def body(address: str, number: int, outer_step: int) -> Callable[[], Any]:
        def train() -> Any:
            checkpoints = Checkpoints(tmp_path / str(number), every=2, whole=True)
            with pccl.Communicator(address) as comm:
                peer = Peer(comm, number, min_peers=2, checkpoints=checkpoints)
                peer.until(outer_step)
                peer.diloco.finish()
                return peer.diloco.state_digest()

        return train

    with fresh() as address:
        ends = together(*(body(address, number, 4) for number in range(2)))
    assert len({*ends}) == 1
    for begin in ((0, 7), (1, 8)):  # one of them, and one that has nothing
        with fresh() as address:
            assert together(*(body(address, number, 0) for number in begin)) == ends


def test_settings_of_checkpoints_must_be_those_of_the_run(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    own = {"checkpoints": Checkpoints(tmp_path, every=3)}
    refuse(address, "checkpoints_every is None in the run and 3 here", {}, own)


def test_a_directory_that_is_no_checkpoint_is_refused(address: str, tmp_path: Path) -> None:
    with pccl.Communicator(address) as comm:
        with pytest.raises(OSError, match=r"\.metadata"):
            Peer(comm, 0, state=tmp_path)
        (tmp_path / ".metadata").write_bytes(b"nothing")
        with pytest.raises(ValueError, match="damaged, or no checkpoint of DiLoCo"):
            Peer(comm, 0, state=tmp_path)


def test_a_part_that_is_damaged_is_named(address: str, tmp_path: Path) -> None:
    with pccl.Communicator(address) as comm:
        peer = Peer(comm, 0, checkpoints=Checkpoints(tmp_path, every=1))
        peer.until(1)
        peer.diloco.finish()
        path = latest(tmp_path)
        found = FileSystemReader(path).read_metadata().storage_data
        info = next(info for index, info in found.items() if index.fqn == "theta.weight")
        with (path / info.relative_path).open("r+b") as file:
            file.seek(info.offset + info.length // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(ValueError, match=r"'theta.weight' in .* is not what was saved"):
            Peer(comm, 0, state=path)


def latest(directory: Path) -> Path:
    found = Checkpoints(directory).latest()
    assert found is not None
    return found


SCRIPT = Path(__file__).resolve().parents[1] / "support" / "checkpointing.py"


@pytest.mark.slow
def test_a_peer_that_is_killed_while_it_writes_leaves_the_last_one_whole(
    address: str, tmp_path: Path
) -> None:
    """The others go on, and complete the next one; then a run of more peers begins with that."""
    begin = [Reporter(SCRIPT, address, tmp_path, 3, hangs, patience_s=50) for hangs in (0, 0, 4)]
    dying = begin[2]
    try:
        given_up = dying.wait_for(lambda report: "writing" in report)["writing"]
        assert int(latest(tmp_path).name) < given_up
        os.kill(dying.process.pid, signal.SIGKILL)
        for each in begin[:2]:
            each.wait_for(lambda report: report.get("peers") == 2)
        wait_until(lambda: int(latest(tmp_path).name) > given_up)
        assert not (tmp_path / str(given_up) / ".metadata").exists()
    finally:
        for each in begin:
            each.kill()
    step = int(latest(tmp_path).name)
    known = {
        report["digest"] for each in begin for report in each.reports if report.get("step") == step
    }
    with fresh() as other:
        again = [Reporter(SCRIPT, other, tmp_path, 4, 0, patience_s=50) for _ in range(4)]
        try:
            for each in again:
                resumed = each.wait_for(lambda report: "begins" in report)
                assert resumed["begins"] == step and {resumed["digest"]} == known
        finally:
            for each in again:
                each.kill()
