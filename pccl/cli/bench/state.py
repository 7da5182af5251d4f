"""Measures the synchronization of shared state over processes of this machine, and verifies it.

In each iteration a peer joins the run (untimed) and receives everything from the holders
(`newcomer`). Then all synchronize the same content once more (`equal`). For comparison, the same
iteration also measures

lanes   a broadcast of the same bytes from one holder to all;
hash    the hashing of the newcomer's state;
copy    a copy of that state in memory;
memory  the first touch of as much memory, before the newcomer receives. The operating system does
        this work, slowly if the host of a virtual machine has reclaimed the memory. Without this
        touch, the newcomer's time would include it.

Times are medians: the newcomer's, and for `equal` the slowest peer's. GB/s count the bytes of the
state.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench import options
from pccl.cli.processes import collect, workers
from pccl.cli.terminal import Refused
from pccl.ext import ffi, lib
from pccl.runtime.client.sync import reserve
from pccl.runtime.digest import digests

_WAYS = ("newcomer", "equal", "lanes", "hash", "copy", "memory")
_RATIOS = {"new/lanes": ("lanes", "newcomer"), "hash/copy": ("copy", "hash")}


class Measured:
    """One peer's measurement of one size."""

    def __init__(self) -> None:
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)  # by variant: seconds
        self.wrong = 0  # bytes that differed from the holders', after all synchronizations

    def time(self, way: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.times_s[way].append(time.perf_counter() - began)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_sizes(parser, "256M", "256M", 2)
    options.add_iterations(parser, 7, 2)
    option(parser, "--entries N", "entries of the state", 16, whole_number(1))
    holders = whole_number(1, options.PEERS_MAX)
    option(parser, "--holders N", "peers that hold the state", 2, holders)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a byte was wrong."""
    if not args.entries <= args.minbytes <= args.maxbytes:
        raise Refused("an entry has a byte at least, and -b is no more than -e")
    who, entries = f"{args.holders} holders and a newcomer", f", {args.entries} entries"
    print(
        f"{options.title('state', who, where=entries)}\n# medians (minima) of {args.iters} "
        f"iterations after {args.warmup_iters} warm-ups\n{_head()}",
        flush=True,
    )
    results = []
    with (
        pccl.MasterNode("127.0.0.1:0") as master,
        workers(args.holders + 1, take_part, args, master.address) as connections,
    ):
        for nbytes in options.sizes(args):
            results.append(_row(nbytes, args.warmup_iters, collect(connections)))
            print(_text(results[-1]), flush=True)
    found = {"entries": args.entries, "holders": args.holders, "results": results}
    options.write_json(args, found)
    return 1 if any(row["nwrong"] for row in results) else 0


# ---- the peers ----


def take_part(number: int, job: argparse.Namespace, address: str) -> Iterator[Measured]:
    """The life of process `number`; the newcomer is the last process."""
    return (_hold if number < job.holders else _come)(job, address)


def _hold(job: argparse.Namespace, address: str) -> Iterator[Measured]:
    with pccl.Communicator(address) as comm:
        comm.wait_for_peers(job.holders + 1)
        comm.barrier()
        revision = 1
        for nbytes in options.sizes(job):
            content = _content(nbytes)
            measured = Measured()
            for _ in range(job.warmup_iters + job.iters):
                _let_in(comm)
                shared = _state(content, job.entries, revision)
                _iterate(comm, shared, content, measured)
                comm.barrier()
                revision += 2
            yield measured


def _come(job: argparse.Namespace, address: str) -> Iterator[Measured]:
    with pccl.Communicator(address) as comm:  # it leaves again, so that it joins last
        comm.wait_for_peers(job.holders + 1)
        comm.barrier()
    for nbytes in options.sizes(job):
        expected = _content(nbytes)
        own, copied = np.empty_like(expected), np.empty_like(expected)
        measured = Measured()
        for _ in range(job.warmup_iters + job.iters):
            np.invert(expected, out=own)
            with pccl.Communicator(address) as comm:
                comm.wait_for_peers(job.holders + 1)
                measured.time("memory", partial(_touch, nbytes))
                _iterate(comm, _state(own, job.entries, 0), own, measured, expected)
                measured.time("hash", partial(digests, [(own.ctypes.data, nbytes)]))
                measured.time("copy", partial(np.copyto, copied, own))
                comm.barrier()
        yield measured


def _iterate(
    comm: pccl.Communicator,
    shared: pccl.SharedState,
    content: np.ndarray,
    measured: Measured,
    expected: np.ndarray | None = None,
) -> None:
    """The calls that all peers make. `expected`: the content, for a newcomer."""
    comm.barrier()
    measured.time("newcomer", lambda: comm.sync_shared_state(shared))
    if expected is not None:  # before the broadcast, which repairs it
        measured.wrong += count_wrong(content, expected)
    shared.push_revision()
    comm.barrier()
    measured.time("equal", lambda: comm.sync_shared_state(shared))
    comm.broadcast(content, tag=1)  # untimed: the first one on new lanes allocates memory
    comm.barrier()
    measured.time("lanes", lambda: comm.broadcast(content, tag=1))


def _let_in(comm: pccl.Communicator) -> None:
    """A holder admits the next newcomer, when the last one has left.

    It decides only by facts that all holders have agreed on, because one holder may learn earlier
    than another that a peer has left. The round waits for a peer that has not left yet, so after
    the round that peer has left.
    """
    while not comm.are_peers_pending():
        pass
    comm.update_topology()


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


# ---- the table ----


def _row(nbytes: int, warmups: int, all_measured: list[Measured]) -> dict[str, Any]:
    """A size as the JSON has it: seconds, and GB/s of the state's bytes."""
    newcomer = all_measured[-1]
    row: dict[str, Any] = {"size": nbytes, "nwrong": newcomer.wrong}
    for way in _WAYS:
        whose = all_measured if way == "equal" else [newcomer]
        times_s = [max(each) for each in zip(*(m.times_s[way] for m in whose), strict=True)]
        middle_s, best_s = median(times_s[warmups:]), min(times_s[warmups:])
        row[way] = {"time": middle_s, "time_min": best_s, "bw": nbytes / middle_s / 1e9}
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
