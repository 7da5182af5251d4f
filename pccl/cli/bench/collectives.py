"""Measures a collective over processes of one or several machines, and verifies every result.

Prints the table of nccl-tests. Each iteration's time is the mean over the peers, and `time` is the
median over the iterations. `size` is the bytes of the larger buffer. algbw is size / time. busbw is
algbw * 2 (n-1) / n for all-reduce, algbw * (n-1) / n for all-gather, reduce-scatter and all-to-all,
and algbw for broadcast. An all-to-all is never in place, a broadcast always. `wire` is the bytes
that a peer sends, and `switch` its voluntary context switches, in calls without pauses.

`--against` alternates with something else, iteration by iteration, in the same processes and the
same memory, and prints the ratio of the speeds: torch.distributed over `gloo` or `nccl`;
pccl without `--quantize` (`unquantized`); the same all-reduce as 16 smaller concurrent ones
(`pieces`), or as one `all_reduce_multiple_with_retry` of 148 tensors like those of a GPT
(`tensors`).

`--device cuda` measures tensors in GPU memory: process i has GPU i of its machine, or shares one.

Between machines: start `pccl master` on one, and this command with the same arguments and
`--master HOST` once for each of the `--peers`, anywhere. They exchange their measurements by a
collective, so all of them print the table. LOCAL_RANK says which GPU of its machine a process uses.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench import options, trials
from pccl.cli.bench.trials import GLOO, IN_PLACE, NCCL, OUT_OF_PLACE, Job, Measured, blocks
from pccl.cli.processes import collect, workers
from pccl.cli.terminal import Refused
from pccl.protocol.messages import Ring, Spec
from pccl.protocol.tuning import Conditions, Settings, Tuning, choose
from pccl.runtime.client.memory import fingerprint, wire_bytes
from pccl.runtime.config import Config
from pccl.types import CollectiveKind, DataType, QuantizationName, QuantizationOptions, ReduceOp

_FLOATS = {  # by nccl-tests' names
    "half": DataType.FLOAT16,
    "float": DataType.FLOAT,
    "double": DataType.DOUBLE,
    "bfloat16": DataType.BFLOAT16,
}
_INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_DTYPES = {name: DataType[name.upper()] for name in _INTEGERS} | _FLOATS
_OPS = {op.name.lower(): op for op in ReduceOp}
_WAYS = (OUT_OF_PLACE, IN_PLACE)
FACTORS: dict[str, Callable[[int], float]] = {  # busbw / algbw for n peers
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
_NOT_IN = {GLOO: {"uint32", "uint64", "avg"}, NCCL: {"uint32", "uint64"}}
_OF_GLOO_ON_GPUS = ("all_reduce", "broadcast")  # https://docs.pytorch.org/docs/stable/distributed


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    options.add_sizes(parser, "4K", "256M", 2)
    options.add_iterations(parser, 20, 5)
    option(parser, "-d --datatype", "element type", "float", choices=_DTYPES)
    if what in trials.REDUCING:
        option(parser, "-o --op", "operation", "sum", choices=_OPS)
        text = "quantize; results are verified within the error bound of the format"
        option(parser, "--quantize", text, choices=["int8", "int4", "uint8"])
    else:
        parser.set_defaults(op="none", quantize=None)
    text = "verify every element of one more call of each size"
    option(parser, "-c --check 0|1", text, 1, whole_number(0, 1))
    options.add_run(parser)
    text = "connections to the next peer (default: one on this machine, else by the round trip)"
    option(parser, "--lanes N", text, kind=whole_number(1, 256))
    text = "alternate with this, in processes on this machine"
    option(parser, "--against", text, choices=trials.OTHERS)
    text = "where the arrays are; cuda: torch tensors"
    option(parser, "--device", text, "cpu", choices=("cpu", "cuda"))
    options.add_json(parser)
    text = "say how each size travels, on one machine and on several; measure nothing"
    option(parser, "--explain", text)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if an element was wrong."""
    _check(args)
    dtype, sizes = _DTYPES[args.datatype], options.sizes(args)
    job = Job(
        what=args.measurement,
        peers=args.peers,
        counts=tuple(n // dtype.itemsize // blocks(args.measurement, args.peers) for n in sizes),
        dtype=dtype,
        op=_OPS.get(args.op, ReduceOp.MAX),
        iterations=args.iters,
        warmups=args.warmup_iters,
        check=bool(args.check),
        against=args.against,
        quantization=args.quantize,
        lanes=args.lanes or 0,
        device=args.device,
    )
    if args.explain:
        print(*explained(job, sizes), sep="\n")
        return 0
    print(f"{_title(job, args.master)}\n{head(job.against)}", flush=True)
    rows = []
    all_measured = _between_machines(args.master, job) if args.master else _here(job)
    for count, each in zip(job.counts, all_measured, strict=True):
        rows.append(Row(job.what, count, dtype.itemsize, args.datatype, args.op, each))
        print(rows[-1].text(), flush=True)
    print(foot(rows))
    wrong = out_of_bounds(rows)
    found: dict[str, object] = {"results": [row.json() for row in rows]}
    found["out_of_bounds"] = {"count": wrong, "okay": wrong == 0}
    found["average_bus_bandwidth"] = {"bandwidth": average_busbw(rows)}
    options.write_json(args, found)
    return 1 if wrong else 0


def chosen(
    what: str,
    nbytes: int,
    peers: int,
    *,
    together: bool,
    dtype: DataType = DataType.FLOAT,
    op: ReduceOp = ReduceOp.SUM,
    quantization: QuantizationName | None = None,
    settings: Settings | None = None,
) -> Tuning:
    """How a collective of `nbytes` travels between peers on one machine, or on several."""
    how = QuantizationOptions.of(quantization) if quantization else None
    count = nbytes // dtype.itemsize // blocks(what, peers)
    kind = CollectiveKind(what)
    spec = Spec(kind, op.value, dtype.value, count, *fingerprint(how, dtype, op))
    rings = (Ring(tuple(range(1, peers + 1)), 1),)
    known = Conditions(1, peers, rings, together, together, settings or Settings())
    return choose(spec, wire_bytes(spec, dtype, count * blocks(what, peers)), known)


def explained(job: Job, sizes: Sequence[int]) -> Iterator[str]:
    """The lines of `pccl bench WHAT --explain`: each size, with one machine and with several."""
    config = Config.from_env()
    how = partial(
        chosen,
        job.what,
        peers=job.peers,
        dtype=job.dtype,
        op=job.op,
        quantization=job.quantization,
        settings=Settings(config.inline_bytes, job.lanes, config.lanes),
    )
    wire = f" as {job.quantization}" if job.quantization else ""
    yield f"# {job.what}: {job.peers} peers, {job.dtype.common_name}{wire}"
    yield f"# {'size (B)':>10}  {'all on one machine':<48}on several machines"
    for nbytes in sizes:
        here, apart = (how(nbytes, together=together) for together in (True, False))
        yield f"{nbytes:>12}  {here!s:<48}{apart}"


def _check(args: argparse.Namespace) -> None:
    """Raises Refused: it cannot be measured."""
    what, dtype, against = args.measurement, _DTYPES[args.datatype], args.against
    if against in trials.TORCH:
        _check_torch(args)
    elif dtype is DataType.BFLOAT16 and importlib.util.find_spec("torch") is None:
        raise Refused("torch not found; pip install torch brings bfloat16")
    if why := trials.missing(args.device):
        raise Refused(why)
    if against in trials.TORCH and args.device == "cuda":
        _check_gpus(args)
    if against == "unquantized" and not args.quantize:
        raise Refused("--against unquantized needs --quantize")
    elements = trials.ELEMENTS_MIN.get(against, 0)
    if elements and (what != "all_reduce" or args.minbytes < dtype.itemsize * elements):
        raise Refused(f"--against {against} is for all_reduce, of {elements} elements or more")
    if args.quantize and (args.datatype not in _FLOATS or args.op not in ("sum", "avg")):
        raise Refused(f"--quantize is for sums and means of {', '.join(_FLOATS)}")
    least = dtype.itemsize * blocks(what, args.peers)
    if not least <= args.minbytes <= args.maxbytes:
        raise Refused(f"sizes must be at least {least} bytes, and -b no more than -e")


def _check_torch(args: argparse.Namespace) -> None:
    against = args.against
    if importlib.util.find_spec("torch") is None:
        raise Refused(f"torch not found; pip install torch brings what --against {against} needs")
    if args.master:
        raise Refused(f"--against {against} measures processes of this machine: leave out --master")
    for asked in (args.datatype, args.op):
        if asked in _NOT_IN[against]:
            raise Refused(f"{against} has no {asked}")
    if against == NCCL and args.device != "cuda":
        raise Refused("nccl moves GPU memory only: add --device cuda")


def _check_gpus(args: argparse.Namespace) -> None:
    import torch

    what, gpus = args.measurement, torch.cuda.device_count()
    if args.against == GLOO:
        if what not in _OF_GLOO_ON_GPUS:
            raise Refused(f"gloo has no {what} of GPU memory: only {', '.join(_OF_GLOO_ON_GPUS)}")
    elif not torch.distributed.is_nccl_available():
        raise Refused(f"torch {torch.__version__} is built without nccl")
    elif gpus < args.peers:
        peers = args.peers
        raise Refused(f"nccl needs a GPU for each process: there are {gpus}, for --peers {peers}")


def _title(job: Job, master: str | None) -> str:
    who = f"{job.peers} processes"
    return (
        f"{options.title(job.what, who, master, trials.described(job.device))}, "
        f"lanes {job.lanes or 'auto'}\n"
        f"# medians of {job.iterations} iterations after {job.warmups} warm-ups"
        + (f", quantized to {job.quantization}" if job.quantization else "")
        + (f", in turns with {job.against}" if job.against else "")
    )


def _here(job: Job) -> Iterator[list[Measured]]:
    """Yields the measurements of processes on this machine, size by size."""
    with (
        tempfile.TemporaryDirectory(prefix="pccl-bench-") as scratch,
        pccl.MasterNode("127.0.0.1:0") as master,
        workers(
            job.peers, trials.serve, job, master.address, Path(scratch, "torch").as_uri()
        ) as results,
    ):
        for _ in job.counts:
            yield collect(results)


def _between_machines(master: str, job: Job) -> Iterator[list[Measured]]:
    place = trials.of_process(job.device, int(os.environ.get("LOCAL_RANK", "0")))
    with trials.join(master, job) as comm:
        for count in job.counts:
            yield _exchange(comm, trials.measure(comm, job, count, place))


def _exchange(comm: pccl.Communicator, own: Measured) -> list[Measured]:
    """The measurements of all peers."""
    text = np.frombuffer(msgspec.json.encode(own), np.uint8)
    sizes = comm.all_gather(np.array([text.size])).ravel().tolist()
    parts = np.split(comm.all_gather(text, rows=sizes), np.cumsum(sizes)[:-1])
    return [msgspec.json.decode(part.tobytes(), type=Measured) for part in parts]


# ---- the table and the JSON ----

# The columns of nccl-tests come first and unchanged, so that its parsers work; our own columns
# follow to the right. GB are 10**9 bytes.


@dataclass(frozen=True, slots=True)
class Timing:
    """The iterations of one variant, each the mean over the peers."""

    median_us: float
    min_us: float
    wrong: int | None  # wrong elements over all peers; None when not checked
    wire: int | None = None  # bytes that a peer sends in a call, at most; None when not known
    switches: float | None = None  # voluntary context switches of a peer in a call, at most

    @classmethod
    def of(cls, way: str, all_measured: Sequence[Measured]) -> Timing:
        each = zip(*(measured.times_s[way] for measured in all_measured), strict=True)
        means_us = [fmean(times) * 1e6 for times in each]
        wrong = [measured.wrong[way] for measured in all_measured if way in measured.wrong]
        sent = [measured.sent[way] for measured in all_measured if way in measured.sent]
        switches = [one.switches[way] for one in all_measured if way in one.switches]
        found, most = sum(wrong) if wrong else None, max(switches, default=None)
        return cls(median(means_us), min(means_us), found, max(sent, default=None), most)


class Row:
    """All peers' measurements of one size."""

    def __init__(
        self,
        what: str,
        count: int,  # elements of the smaller buffer; of an all-to-all, those for one peer
        itemsize: int,
        dtype: str,
        op: str,
        all_measured: Sequence[Measured],
    ) -> None:
        self.peers = len(all_measured)
        self.nbytes = count * itemsize * blocks(what, self.peers)  # bytes of the larger buffer
        self.what, self.count, self.dtype, self.op = what, count, dtype, op
        self.root = 0 if what == "broadcast" else -1
        self.timings = {way: Timing.of(way, all_measured) for way in all_measured[0].times_s}
        self.ways = [way for way in _WAYS if way in self.timings]  # those of our ways that it has
        self.other = next((way for way in trials.OTHERS if way in self.timings), None)

    def algbw(self, way: str) -> float:
        """Bytes of the buffer over the median time, in GB/s."""
        return self.nbytes / self.timings[way].median_us / 1e3

    def busbw(self, way: str) -> float:
        """The rate on each link of an ideal ring, in GB/s, as nccl-tests counts it."""
        return self.algbw(way) * FACTORS[self.what](self.peers)

    def text(self) -> str:
        ours = [self.timings.get(way) for way in _WAYS]
        cells = [str(self.nbytes), str(self.count), self.dtype, self.op, str(self.root)]
        for way, timing in zip(_WAYS, ours, strict=True):
            if timing is None:
                cells += ["N/A"] * 4
                continue
            cells += [_number(timing.median_us, 7), _number(self.algbw(way), 6)]
            cells.append(_number(self.busbw(way), 6))
            cells.append("N/A" if timing.wrong is None else str(timing.wrong))
        cells += ["N/A" if timing is None else _number(timing.min_us, 7) for timing in ours]
        if self.other:
            other = self.timings[self.other]
            cells += [_number(other.median_us, 7), _number(other.min_us, 7)]
            cells += ["N/A" if t is None else f"{other.median_us / t.median_us:.2f}" for t in ours]
        first = self.timings[self.ways[0]]
        cells.append(str(first.wire))
        cells.append("N/A" if first.switches is None else f"{first.switches:.1f}")
        widths = (width for _, _, width in _columns(self.other))
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    def json(self) -> dict[str, Any]:
        """The row in the form of nccl-tests' JSON; times in microseconds, rates in GB/s."""
        found: dict[str, Any] = {"size": self.nbytes, "count": self.count, "type": self.dtype}
        found |= {"redop": self.op, "root": self.root}
        for way, timing in self.timings.items():
            found[way] = {
                "time": timing.median_us,
                "time_min": timing.min_us,
                "alg_bw": self.algbw(way),
                "bus_bw": self.busbw(way),
                "nwrong": timing.wrong,
                "wire": timing.wire,
                "switches": timing.switches,
            }
        return found


def _columns(other: str | None) -> list[tuple[str, str, int]]:
    way = [("time", "(us)", 7), ("algbw", "(GB/s)", 6), ("busbw", "(GB/s)", 6), ("#wrong", "", 6)]
    size = [("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 8)]
    found = [*size, ("redop", "", 6), ("root", "", 6), *way, *way]
    found += [("out", "(us)", 7), ("in", "(us)", 7)]
    if other:
        found += [("time", "(us)", 7), ("min", "(us)", 7), ("out", "", 6), ("in", "", 6)]
    return [*found, ("wire", "(B)", 12), ("switch", "(/call)", 7)]


def head(other: str | None) -> str:
    groups = f"#{'':52}{'out-of-place':^33}{'in-place':^33}{'minimum':^18}"
    groups += f"{other:^18}{'times as fast':^16}" if other else ""
    columns = _columns(other)
    names = "  ".join(name.rjust(width) for name, _, width in columns)
    units = "  ".join(unit.rjust(width) for _, unit, width in columns)
    return "\n".join(line.rstrip() for line in ("#", groups, f"#{names[1:]}", f"#{units[1:]}"))


def foot(rows: Sequence[Row]) -> str:
    wrong = out_of_bounds(rows)
    return (
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}\n"
        f"# Avg bus bandwidth    : {average_busbw(rows):g}\n#"
    )


def out_of_bounds(rows: Sequence[Row]) -> int:
    return sum(timing.wrong or 0 for row in rows for timing in row.timings.values())


def average_busbw(rows: Sequence[Row]) -> float:
    """The mean over rows and ways, in GB/s."""
    return fmean(row.busbw(way) for row in rows for way in row.ways)


def _number(value: float, width: int) -> str:
    """Two decimals, or fewer where they would not fit."""
    texts = [f"{value:.{decimals}f}" for decimals in (2, 1, 0)]
    return next((text for text in texts if len(text) <= width), texts[-1])
