"""Checkpoints of a training: content, checks, files of one peer, and checkpoints of all peers.

A checkpoint of all peers is a directory in the format of `torch.distributed.checkpoint`. It is
complete when it has its metadata, which one peer writes last. See docs/howto/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import shutil
import threading
import zipfile
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from pccl import Communicator, extension
from pccl.diloco.exchange import Exchange, LedgerHooks
from pccl.diloco.model import (
    Buffers,
    Frozen,
    InnerState,
    Replica,
    Saved,
    check_shapes,
    local,
)
from pccl.diloco.outer import Outer
from pccl.diloco.schedule import Schedule
from pccl.diloco.settings import decode
from pccl.diloco.stats import gather_row
from pccl.runtime.checkpoint import replacing, sync_directory
from pccl.support import whole
from pccl.tensors import is_sharded

_SAVED = {"config", "parameters", "clock", "theta", "velocity", "revision", "frozen", "buffers"}
_log = logging.getLogger("pccl.diloco")


@dataclass(eq=False)
class Checkpoint:
    """The state of a training, without the inner optimizer's."""

    _config: torch.Tensor
    _frozen: Frozen
    _buffers: Buffers
    _ledger: LedgerHooks
    _outer: Outer
    _exchanges: Sequence[Exchange]
    _schedule: Schedule

    def state_dict(self, sharded: bool) -> dict[str, Any]:
        """The state, not copied."""
        return {
            **self.shared(sharded),
            "averager": self.averagers(sharded),
            **self.local(),
        }

    def local(self) -> dict[str, Any]:
        """The buffers of a peer, if each peer keeps its own."""
        if self._buffers.mode != "local":
            return {}
        self._buffers.gather()
        return {"buffers": self._buffers.state_dict()}

    def shared(self, sharded: bool = True) -> dict[str, Any]:
        if self._schedule.group.shared.torn:
            raise ValueError(
                "this peer has received only a part of the shared state, because it has not "
                "rejoined the run: there is no state to save"
            )
        schedule = self._schedule.state_dict()
        if "means" in schedule:  # in modes without fragments; dcp.load fills in a sharded state
            means = schedule["means"] or (self._exchanges[0].means if sharded else [])
            schedule["means"] = [self._outer.join([mean], sharded) for mean in means[:1]]
            schedule["means"] += means[1:]
        return {
            "config": self._config,
            "parameters": json.dumps(self._outer.shapes()),
            **self._outer.state_dict(sharded),
            "schedule": schedule,
            **self._ledger.state_dict(),
            "revision": self._schedule.group.shared.revision,
            "frozen": self._frozen.state_dict(sharded),
            **({} if self._buffers.mode == "local" else {"buffers": self._buffers.state_dict()}),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless this training can load the state."""
        try:
            self._check(state)
        except (TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
            kind = type(error).__name__
            raise ValueError(
                f"the state was not made by DiLoCo.state_dict() ({kind}: {error})"
            ) from error

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = _SAVED - {*state}
        if missing:
            raise ValueError(
                f"the state was not made by DiLoCo.state_dict(): it has no {min(missing)!r}"
            )
        own, saved = decode(self._config), decode(state["config"])
        check_shapes("parameter", self._outer.shapes(), json.loads(state["parameters"]))
        if own["parameters"] != saved["parameters"]:
            raise ValueError(
                "the state belongs to another model: its parameters have another order"
            )
        if own["mode"] != saved["mode"]:
            _log.warning(
                "the state is of a run with mode=%r, and this one has mode=%r: what was under way "
                "between two rounds is lost",
                saved["mode"],
                own["mode"],
            )
        self._frozen.check(state["frozen"])
        self._buffers.check(state["buffers"])
        self._ledger.check(state)
        self._outer.check(state)
        schedule = state.get("schedule", {})
        counts = {**schedule, "revision": state["revision"]}
        means = counts.pop("means", [])
        for name, count in counts.items():
            if count is not None and not (isinstance(count, int) and 0 <= count < 1 << 62):
                raise ValueError(f"{name} is {count!r} in the state: it must be a count")
        for mean in means[:1]:
            self._outer.cut(mean)
        for mine, mean in zip(self._exchanges[0].means[1:], means[1:], strict=False):
            if mine.shape != mean.shape:
                raise ValueError(
                    f"a mean has shape {list(mean.shape)} in the state and {list(mine.shape)} here"
                )
        for kept in state.get("averager", {}).values():
            self._outer.cut(kept)

    def load(self, state: Mapping[str, Any]) -> None:
        self._frozen.load(state["frozen"])
        self._buffers.load(state["buffers"])
        self._outer.load(state)
        self._ledger.load(state)
        schedule = dict(state.get("schedule", {}))
        if means := schedule.get("means"):
            schedule["means"] = [*self._outer.cut(means[0]), *means[1:]]
        self._schedule.load(schedule)
        for key, saved in state.get("averager", {}).items():
            for exchange, piece in zip(self._exchanges, self._outer.cut(saved), strict=True):
                exchange.averager.load_state_dict({key: piece})
        self._schedule.group.shared.revision = state["revision"]

    def averagers(self, sharded: bool) -> dict[str, Saved]:
        states = [exchange.averager.state_dict() for exchange in self._exchanges]
        keys = states[0]
        return {key: self._outer.join([state[key] for state in states], sharded) for key in keys}

    def forget(self) -> None:
        """Forgets the residuals, because the run has continued since the loaded state."""
        for exchange in self._exchanges:
            for kept in exchange.averager.state_dict().values():
                kept.zero_()


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the state in a file, and checks the file's checksums, which torch ignores."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} in it has a wrong checksum")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (
        ValueError,
        RuntimeError,
        EOFError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{os.fspath(path)} is damaged, or was not written by DiLoCo.save(): {error}"
        ) from error
    return state


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints that all peers of a run write together in the background.

        DiLoCo(comm, model, optimizer, inner_steps=50, checkpoints=Checkpoints("/shared/run1"))

    Each peer writes its part of the shared state, and the state of its inner optimizer. A new run
    with any number of peers begins with the latest checkpoint in the directory.

    Attributes:
        directory: on a file system that all peers share. Checkpoint k is its directory `k`, in the
            format of `torch.distributed.checkpoint`.
        every: outer steps between two checkpoints; the same on all peers.
        keep: the number of checkpoints to keep.
        whole: True: each peer has its own directory, and writes everything that it needs, because
            the peers share no file system. The same on all peers.

    Raises:
        ValueError: a number is less than 1.
    """

    directory: str | os.PathLike[str]
    every: int = 10
    keep: int = 2
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1))

    def config(self) -> dict[str, Any]:
        return {"checkpoints_every": self.every, "checkpoints_whole": self.whole}

    def latest(self) -> Path | None:
        """The directory of the latest complete checkpoint, or None."""
        found = _complete(Path(self.directory))
        return found[-1] if found else None


def _complete(directory: Path) -> list[Path]:
    """The directories of all complete checkpoints in a directory, the latest last."""
    found = (each.parent for each in directory.glob("*/.metadata"))
    return sorted((each for each in found if each.name.isdigit()), key=lambda path: int(path.name))


class _Writer(threading.Thread):
    """Writes a file of data, and a file that describes it, in the background."""

    def __init__(self, step: int, directory: Path, prefix: str, writes: _Writes) -> None:
        super().__init__(name="pccl-checkpoint", daemon=True)
        self.step = step
        self.error: Exception | None = None
        self._directory, self._prefix, self._writes = directory, prefix, writes
        self._unwanted = threading.Event()

    def run(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.planner import SavePlan

        items = [item for item, _ in self._writes.items]
        data = {item.index: value for item, value in self._writes.items}
        planner: Any = SimpleNamespace(resolve_data=lambda item: data[item.index])
        plan = SavePlan(items, SimpleNamespace(prefix=self._prefix), self._writes.places)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            results = FileSystemWriter(self._directory).write_data(plan, planner).value()
            with replacing(self._directory / f"{self._prefix}part") as file:  # syncs all names
                infos = [each.storage_data for each in results]
                digests = {_key(info): _digest(self._directory, info) for info in infos}
                pickle.dump((replace(plan, storage_data=None), results, digests), file)
        except Exception as error:
            self.error = error
            self._unwanted.set()
            _log.error(
                "checkpoint %d is given up: this peer cannot write its part to %s: %s",
                *(self.step, self._directory, error),
            )
        self._writes = _Writes([], {})
        if self._unwanted.is_set():
            self._remove()

    def drop(self) -> None:
        """Removes the files, once they are no longer being written."""
        self._unwanted.set()
        if not self.is_alive():
            self._remove()

    def _remove(self) -> None:
        for path in self._directory.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Writes:
    items: list[tuple[Any, Any]]  # items of torch.distributed.checkpoint, and their content
    places: dict[str, Any]  # where the state has the items' names

    def plus(self, state: dict[str, Any], first: bool, part: int = 0, parts: int = 1) -> _Writes:
        """Adds a copy of part `part` of `parts` of a state: an equal share of each tensor's rows.

        `first`: this is the first process of a replica, which also writes what is not sharded.
        """
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        plan = planner.create_local_plan()
        wanted = [each for each in plan.items if first or each.type is WriteItemType.SHARD]
        tensors: list[tuple[WriteItem, torch.Tensor]] = []
        found = list(self.items)
        for item in wanted:
            content: Any = planner.resolve_data(item)
            if torch.is_tensor(content):
                tensors.append((item, content.detach()))
            elif part == 0:
                found.append((item, content))
        begin, total = 0, sum(tensor.nbytes for _, tensor in tensors)
        for item, tensor in tensors:
            shape = tensor.shape or torch.Size([1])
            row = tensor.nbytes // max(1, shape[0])
            if not row:
                found += [(item, tensor.cpu())] if part == 0 and tensor.numel() == 0 else []
                continue
            low, high = (
                min(shape[0], max(0, -((begin * parts - total * p) // (row * parts))))
                for p in (part, part + 1)
            )
            begin += tensor.nbytes
            if low == high:
                continue
            if tensor.ndim:
                about = item.tensor_data
                assert about is not None
                offsets = [about.chunk.offsets[0] + low, *about.chunk.offsets[1:]]
                sizes = torch.Size([high - low, *shape[1:]])
                chunk = ChunkStorageMetadata(torch.Size(offsets), sizes)
                item = WriteItem(
                    MetadataIndex(item.index.fqn, offsets),
                    WriteItemType.SHARD,
                    tensor_data=replace(about, chunk=chunk),
                )
                tensor = tensor[low:high]
            found.append((item, tensor.to("cpu", copy=True).contiguous()))
        return _Writes(found, {**self.places, **plan.planner_data})


def _key(info: Any) -> str:
    return f"{info.relative_path}:{info.offset}"


def _digest(directory: Path, info: Any) -> str:
    with (directory / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return xxhash.xxh3_128_hexdigest(file.read(info.length))


def _prefix(tag: int, shard: int, part: int) -> str:
    return f"{tag:012x}.{shard}.{part}."


_NOTHING, _WRITING, _DONE, _FAILED = range(4)
_GIVE_UP, _WAIT, _COMMIT = range(3)


@dataclass(eq=False)
class Saver:
    """Takes part in the checkpoints of all peers, on which their meetings agree."""

    _checkpoints: Checkpoints
    _comm: Communicator
    _replica: Replica
    _checkpoint: Checkpoint
    _inner: InnerState
    _beside: Callable[[Callable[[], object]], object]  # in the thread that the model belongs to
    # The outer step of the last checkpoint, or of its end; while it is written, its parts in this
    # group; and 1 while it is completed. It is an entry of the shared state.
    _turn: torch.Tensor
    _tag: int = 0
    _probed: Path | None = None
    _mine: int = -1  # the last checkpoint that has a part of this peer
    _place: int = 0  # the number of that part
    _writer: _Writer | None = None
    _committer: threading.Thread | None = None

    @property
    def _directory(self) -> Path:
        return Path(self._checkpoints.directory)

    def is_due(self, outer_step: int) -> bool:
        """True if all peers must call `meet`. In the first round, it finds wrong directories."""
        _, parts, completing = self._turn.tolist()
        return bool(parts or completing) or self._begins(outer_step)

    def _begins(self, outer_step: int) -> bool:
        every, last = self._checkpoints.every, int(self._turn[0])
        return last < 0 or outer_step // every > last // every

    def meet(self, outer_step: int) -> None:
        self._learn_of_completion()
        if self._turn[1]:
            self._vote(outer_step)
        if not self._turn[1] and self._begins(outer_step):
            self._begin(outer_step)

    def _begin(self, step: int) -> None:
        only_looks = step == 0 or (int(self._turn[0]) < 0 and step % self._checkpoints.every > 0)
        self._turn[0] = step
        token = self._replica.first(secrets.randbits(48))
        own = extension.member(self._comm).number
        rows = gather_row(self._comm, [own, token if self._probe(token) else -1])
        place = [int(number) for number, _ in rows].index(own)
        oldest = int(min(rows)[1])  # the token of the peer that joined first
        works = self._replica.all(all(state >= 0 for _, state in rows))
        seen = self._checkpoints.whole or not works or self._path(oldest).exists()
        if not self._replica.all(seen):
            self._path(token).unlink(missing_ok=True)
            raise ValueError(
                f"this peer's directory for checkpoints, {self._directory}, is not that of the "
                "other peers: it must be on a file system that all peers share; or give each peer "
                "a directory of its own, and Checkpoints(..., whole=True)"
            )
        if not works:
            _log.error("checkpoint %d is left out: a peer cannot write to its directory", step)
        self._forget_probe()
        self._probed = self._path(token)
        if only_looks or not works:
            return
        self._turn[1] = len(rows)
        self._tag = token if self._checkpoints.whole else self._replica.first(oldest)
        self._mine, self._place = step, place
        self._write(step, place, len(rows))

    def _probe(self, token: int) -> bool:
        """True if this process can write, and has finished the last part."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path(token).touch()
        except OSError as error:
            _log.error("this peer cannot write checkpoints to %s: %s", self._directory, error)
            return False
        return self._writer is None or not self._writer.is_alive()

    def _forget_probe(self) -> None:
        """Removes the probe: all peers are at a later step, so all have checked it."""
        if self._probed is not None:
            self._probed.unlink(missing_ok=True)
            self._probed = None

    def _path(self, token: int) -> Path:
        return self._directory / f".{int(self._turn[0])}.{token:012x}"

    def _write(self, step: int, place: int, parts: int) -> None:
        first = self._replica.index == 0
        part, of, number = (0, 1, 0) if self._checkpoints.whole else (place, parts, place)
        writes = _Writes([], {}).plus(self._checkpoint.shared(), first, part, of)
        writes = writes.plus(
            {"peers": {str(number): {"averager": self._checkpoint.averagers(True)}}}, first
        )
        directory = self._directory / str(step)
        prefix = _prefix(self._tag, self._replica.index, number)
        self._writer = None

        def begin() -> None:
            own = {"optimizer": self._inner.state_dict(True), **self._checkpoint.local()}
            state = {"peers": {str(number): own}}
            self._writer = _Writer(step, directory, prefix, writes.plus(state, first))
            self._writer.start()

        self._beside(begin)

    def _vote(self, outer_step: int) -> None:
        """Tells all peers the progress of each, and decides with them."""
        step, parts, _ = self._turn.tolist()
        rows = gather_row(self._comm, [self._state(step)])
        states = [int(state) for (state,) in rows]
        verdict = _WAIT
        if _FAILED in states or len(states) - states.count(_NOTHING) < parts:
            verdict = _GIVE_UP
        elif states.count(_DONE) == parts:
            verdict = _COMMIT
        each = self._replica.exchange([verdict, parts])
        verdict = min(one for one, _ in each)
        if verdict == _WAIT:
            return
        self._turn[:] = torch.tensor([max(step, outer_step - 1), 0, verdict == _COMMIT])
        self._forget_probe()
        if verdict == _GIVE_UP:
            _log.error("checkpoint %d is abandoned: not all peers have written their parts", step)
        if self._mine != step:
            return
        if verdict == _GIVE_UP:
            self._beside(lambda: self._writer.drop() if self._writer is not None else None)
        elif self._replica.index == 0 and (self._checkpoints.whole or self._place == 0):
            numbers = [1 if self._checkpoints.whole else count for _, count in each]
            before = self._committer
            self._committer = threading.Thread(
                target=self._commit,
                args=(step, numbers, self._tag, before),
                name="pccl-checkpoint",
                daemon=True,
            )
            self._committer.start()

    def _learn_of_completion(self) -> None:
        """Tells all peers whether the last checkpoint is still being completed."""
        if self._turn[2]:
            busy = self._committer is not None and self._committer.is_alive()
            rows = gather_row(self._comm, [busy])
            self._turn[2] = int(not self._replica.all(not any(row[0] for row in rows)))

    def _state(self, step: int) -> int:
        if self._mine != step:
            return _NOTHING
        writer = self._writer
        if writer is None or writer.is_alive():
            return _WRITING
        return _FAILED if writer.error else _DONE

    def _commit(
        self, step: int, parts: Sequence[int], tag: int, before: threading.Thread | None
    ) -> None:
        from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        directory = self._directory / str(step)
        names = [_prefix(tag, s, p) + "part" for s, count in enumerate(parts) for p in range(count)]
        if before is not None:
            before.join()
        try:
            found = [pickle.loads((directory / name).read_bytes()) for name in names]
            plans, results, digests = zip(*found, strict=True)
            with replacing(directory / f"{tag:012x}.digests") as file:
                file.write(json.dumps(dict(ChainMap(*digests))).encode())
            _, metadata = create_default_global_save_plan([*plans])
            metadata.planner_data = dict(ChainMap(*(plan.planner_data for plan in plans)))
            FileSystemWriter(directory).finish(metadata, [*results])
            sync_directory(directory)
            self._tidy(step, tag)
        except OSError as error:
            _log.error("checkpoint %d in %s, or removing old ones: %s", step, directory, error)
        else:
            _log.info("checkpoint %d is complete, in %s", step, directory)

    def _tidy(self, step: int, tag: int) -> None:
        """Removes old checkpoints, and the remains of incomplete ones."""
        for path in (self._directory / str(step)).iterdir():
            if path.suffix == ".part" or not path.name.startswith((f"{tag:012x}.", ".meta")):
                path.unlink(missing_ok=True)
        complete = [each for each in _complete(self._directory) if int(each.name) <= step]
        kept = complete[-self._checkpoints.keep :]
        for each in self._directory.iterdir():
            of = each.name.split(".")
            if len(of) == 3 and of[1].isdigit() and int(of[1]) < step:  # all have checked it
                each.unlink(missing_ok=True)
            if each.name.isdigit() and int(each.name) < step and each not in kept:
                (each / ".metadata").unlink(missing_ok=True)
                shutil.rmtree(each, ignore_errors=True)

    def finish(self, outer_step: int) -> None:
        """Waits for the checkpoint that is being written; all peers call it."""
        if self._turn[1]:
            if self._writer is not None:
                self._writer.join()
            self._vote(outer_step)
        if self._committer is not None:
            self._committer.join()
        self._learn_of_completion()


def read_parts(
    directory: Path, place: int, parameters: Mapping[str, torch.Tensor], inner: InnerState
) -> dict[str, Any]:
    """The state in a checkpoint of all peers.

    The inner state is that of the peer at this place, or, if fewer peers were saved, of another
    one. Residuals are averaged over all saved peers, so any number of peers brings them into the
    next mean.
    """
    try:
        return _read_parts(directory, place, parameters, inner)
    except (
        *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError),
        *(AssertionError, pickle.UnpicklingError),
    ) as error:
        raise ValueError(
            f"{directory} is damaged, or no checkpoint of DiLoCo: {type(error).__name__}: {error}"
        ) from error


def _read_parts(
    directory: Path, place: int, parameters: Mapping[str, torch.Tensor], inner: InnerState
) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(directory).read_metadata()
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data
    about = metadata.state_dict_metadata
    digests: dict[str, str] = {}
    for path in directory.glob("*.digests"):
        digests |= json.loads(path.read_bytes())

    def target(name: str) -> Any:
        of, path = about[name], paths[name]
        if not isinstance(of, TensorStorageMetadata):
            return None
        like = parameters.get(str(path[-1]))
        if path[2:5] == ("optimizer", "state", "state"):
            like = inner.parameters[int(path[5])]
        if like is None or not is_sharded(like) or like.shape != of.size:
            return torch.empty(of.size, dtype=of.properties.dtype)
        return inner.replica.joint(like, torch.empty_like(local(like), dtype=of.properties.dtype))

    def read(wanted: Callable[[tuple[Any, ...]], bool]) -> dict[str, Any]:
        flat = {name: target(name) for name in about if wanted(paths[name])}
        for index, info in metadata.storage_data.items():
            known = digests.get(_key(info)) if index.fqn in flat else None
            if known is not None and known != _digest(directory, info):
                raise ValueError(f"{index.fqn!r} in {info.relative_path} is not what was saved")
        planner, reader = DefaultLoadPlanner(), FileSystemReader(directory)
        planner.set_up_planner(flat, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        found: dict[str, Any] = unflatten_state_dict(flat, paths)
        return found

    peers = {int(path[1]) for path in paths.values() if path[0] == "peers"}
    mine = str(place % len(peers))
    state = {"frozen": {}, "buffers": {}, **read(lambda path: path[0] != "peers")}
    own = read(lambda path: path[:2] == ("peers", mine) and path[2] != "averager")
    state.update(own["peers"][mine])
    residuals: dict[str, Any] = {}
    for peer in map(str, sorted(peers)):
        kept = read(lambda path: path[:3] == ("peers", peer, "averager"))  # noqa: B023
        if kept:
            for name, value in kept["peers"][peer]["averager"]["residual"].items():
                part = value / len(peers)
                residuals[name] = residuals[name] + part if name in residuals else part
    state["averager"] = {"residual": residuals} if residuals else {}
    return state
