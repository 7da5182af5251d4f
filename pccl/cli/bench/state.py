"""Measures the synchronization of shared state over processes of this machine, and verifies it.

In each iteration a peer joins the run (untimed) and receives everything from the holders
(`newcomer`). Then all synchronize the same content once more (`equal`). For comparison, the same
iteration also measures

lanes   a broadcast of the same bytes from one holder to all;
hash    the hashing of the newcomer's state;
copy    a copy of that state in memory;
memory  the first touch of as much memory, before the newcomer receives. The operating system does
        this work, which is slow on a virtual machine whose host has reclaimed the memory. Without
        the memory from this touch, a newcomer would wait for the sum of the two.

Times are medians: those of the newcomer, and for `equal` those of the slowest peer. GB/s count the
bytes of the state.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench import options
from pccl.cli.bench.options import PEERS_MAX
from pccl.cli.processes import WorkerError, collect, workers
from pccl.cli.terminal import complain
from pccl.ext import ffi, lib
from pccl.runtime.client.sync import reserve
from pccl.runtime.digest import digests

_WAYS = ("newcomer", "equal", "lanes", "hash", "copy", "memory")
_RATIOS = {"new/lanes": ("lanes", "newcomer"), "hash/copy": ("copy", "hash")}


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes do; sizes are in bytes."""

    sizes: tuple[int, ...]
    entries: int
    holders: int
    iterations: int
    warmups: int


@dataclass(slots=True)
class Measured:
    """One size by one peer."""

    # seconds of each timed iteration, by way
    times_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0  # bytes that were not those of the holders, after all synchronizations

    def time(self, way: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.times_s.setdefault(way, []).append(time.perf_counter() - began)

    def without(self, warmups: int) -> Measured:
        """A copy without the first iterations."""
        timed = {way: times[warmups:] for way, times in self.times_s.items()}
        return Measured(timed, self.wrong)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_sizes(parser, "256M", "256M", 2)
    options.add_iterations(parser, 7, 2)
    option(parser, "--entries", "N", whole_number(1), "entries of the state", 16)
    holders = whole_number(1, PEERS_MAX)
    option(parser, "--holders", "N", holders, "peers that hold the state", 2)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a byte was wrong or a process failed, 2 if it cannot start."""
    if not args.entries <= args.minbytes <= args.maxbytes:
        complain("bench", "an entry has a byte at least, and -b is no more than -e")
        return 2
    job = Job(tuple(options.sizes(args)), args.entries, args.holders, args.iters, args.warmup_iters)
    print(
        f"# pccl {pccl.__version__} bench state: {job.holders} holders and a newcomer on "
        f"{os.cpu_count()} cores, {job.entries} entries, transport "
        f"{os.environ.get('PCCL_TRANSPORT', 'auto')}\n# medians (minima) of {job.iterations} "
        f"iterations after {job.warmups} warm-ups\n{_head()}",
        flush=True,
    )
    results = []
    try:
        with (
            pccl.MasterNode("127.0.0.1:0") as master,
            workers(job.holders + 1, take_part, job, master.address) as connections,
        ):
            for nbytes in job.sizes:
                results.append(_row(nbytes, collect(connections)))
                print(_text(results[-1]), flush=True)
    except WorkerError as error:
        complain("bench", error)
        return 1
    found = {"entries": job.entries, "holders": job.holders, "results": results}
    options.write_json(args, found)
    return 1 if any(row["nwrong"] for row in results) else 0


# ---- the peers ----


def take_part(number: int, job: Job, address: str) -> Iterator[Measured]:
    """The life of process `number`; the last one is the newcomer."""
    return (_hold if number < job.holders else _come)(job, address)


def _hold(job: Job, address: str) -> Iterator[Measured]:
    with pccl.Communicator(address) as comm:
        _gather(comm, job)
        revision = 1
        for nbytes in job.sizes:
            content = _content(nbytes)
            measured = Measured()
            for _ in range(job.warmups + job.iterations):
                _let_in(comm)
                shared = _state(content, job.entries, revision)
                _iterate(comm, shared, content, measured)
                _meet(comm)
                revision += 2
            yield measured.without(job.warmups)


def _come(job: Job, address: str) -> Iterator[Measured]:
    with pccl.Communicator(address) as comm:
        _gather(comm, job)
    for nbytes in job.sizes:
        expected = _content(nbytes)
        own, copied = np.empty_like(expected), np.empty_like(expected)
        measured = Measured()
        for _ in range(job.warmups + job.iterations):
            np.invert(expected, out=own)
            with pccl.Communicator(address) as comm:
                comm.wait_for_peers(job.holders + 1)
                measured.time("memory", partial(_touch, nbytes))
                _iterate(comm, _state(own, job.entries, 0), own, measured, expected)
                measured.time("hash", partial(digests, [(own.ctypes.data, nbytes)]))
                measured.time("copy", partial(_copy, copied, own))
                _meet(comm)
        yield measured.without(job.warmups)


def _iterate(
    comm: pccl.Communicator,
    shared: pccl.SharedState,
    content: np.ndarray,
    measured: Measured,
    expected: np.ndarray | None = None,
) -> None:
    """The calls that all peers make. A newcomer is given the `expected` content."""
    _meet(comm)
    measured.time("newcomer", lambda: comm.sync_shared_state(shared))
    if expected is not None:  # before the broadcast, which repairs it
        measured.wrong += count_wrong(content, expected)
    shared.push_revision()
    _meet(comm)
    measured.time("equal", lambda: comm.sync_shared_state(shared))
    comm.broadcast(content, tag=1)  # untimed: the first one on new lanes allocates memory
    _meet(comm)
    measured.time("lanes", lambda: comm.broadcast(content, tag=1))


def _gather(comm: pccl.Communicator, job: Job) -> None:
    """All join; then the newcomer leaves, so that it is always the last one accepted."""
    comm.wait_for_peers(job.holders + 1)
    _meet(comm)


def _let_in(comm: pccl.Communicator) -> None:
    """A holder admits the next newcomer, when the last one has left.

    Decides only by what all holders have agreed on, because one may hear earlier than another that
    a peer has left. The round waits for a peer that has not left yet, so it has left afterwards.
    """
    while not comm.are_peers_pending():
        pass
    comm.update_topology()


def _meet(comm: pccl.Communicator) -> None:
    """Lets all peers begin together."""
    comm.all_reduce(np.zeros(1, np.float32), op=pccl.ReduceOp.MAX)


def count_wrong(found: np.ndarray, expected: np.ndarray) -> int:
    difference = ffi.new("pccl_difference *")
    a, b = (ffi.from_buffer("char[]", array) for array in (found, expected))
    lib.pccl_compare(pccl.DataType.UINT8.value, a, b, expected.nbytes, difference)
    return int(difference.bytes)


def _content(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def _state(content: np.ndarray, entries: int, revision: int) -> pccl.SharedState:
    parts = np.array_split(content, entries)
    shared = pccl.SharedState.from_tensors({f"entry {i}": part for i, part in enumerate(parts)})
    shared.revision = revision
    return shared


def _touch(nbytes: int) -> None:
    """Takes as much memory from the operating system as a receiver does, and gives it back."""
    np.frombuffer(ffi.buffer(reserve(nbytes)), np.uint8)[:: mmap.PAGESIZE] = 1


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    target, origin = (ffi.from_buffer("char[]", array) for array in (to, source))
    lib.memcpy(target, origin, source.nbytes)


# ---- the table ----


def _row(nbytes: int, all_measured: list[Measured]) -> dict[str, Any]:
    """A size as the JSON has it: seconds, and GB/s of the state's bytes."""
    times_s = dict(all_measured[-1].times_s)
    times_s["equal"] = [
        max(each) for each in zip(*(m.times_s["equal"] for m in all_measured), strict=True)
    ]
    row: dict[str, Any] = {"size": nbytes, "nwrong": all_measured[-1].wrong}
    for way in _WAYS:
        row[way] = {
            "time": median(times_s[way]),
            "time_min": min(times_s[way]),
            "bw": nbytes / median(times_s[way]) / 1e9,
        }
    for name, (slow, fast) in _RATIOS.items():
        row[name] = row[slow]["time"] / row[fast]["time"]
    return row


def _head() -> str:
    names = f"# {'size':>10}" + "".join(f"  {way:^25}" for way in _WAYS)
    units = f"# {'(B)':>10}" + f"  {'(ms)':>15}  {'(GB/s)':>8}" * len(_WAYS)
    return f"{names}  {'  '.join(_RATIOS)}  #wrong\n{units}"


def _text(row: dict[str, Any]) -> str:
    cells = [f"{row['size']:12d}"]
    for way in _WAYS:
        times = f"{row[way]['time'] * 1e3:.1f} ({row[way]['time_min'] * 1e3:.1f})"
        cells.append(f"{times:>15}  {row[way]['bw']:8.2f}")
    cells += [f"{row[name]:9.2f}" for name in _RATIOS]
    return "  ".join([*cells, f"{row['nwrong']:6d}"])
