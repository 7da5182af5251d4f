"""Measures a collective over processes of this machine, and verifies every result.

Prints the table of nccl-tests: time is the median over the iterations of the mean over the peers,
algbw is the size over the time, and busbw = algbw * 2 (n-1) / n for all-reduce, (n-1) / n for
all-gather and reduce-scatter, whose size is that of the larger buffer, and algbw for broadcast,
which is in place only. `--against gloo` lets torch.distributed take turns with pccl, iteration by
iteration, in the same processes on the same memory; the last columns say how many times as fast
pccl is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pccl
from pccl.cli.bench import options, table
from pccl.cli.bench.data import PEERS_MAX
from pccl.cli.bench.peer import Job, serve
from pccl.cli.bench.processes import BenchError, collect, processes
from pccl.cli.bench.table import FACTORS, blocks
from pccl.cli.bench.ways import REDUCING
from pccl.types import DataType, ReduceOp

_DTYPES = {  # by nccl-tests' names
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "half": DataType.FLOAT16,
    "float": DataType.FLOAT,
    "double": DataType.DOUBLE,
    "bfloat16": DataType.BFLOAT16,
}
_OPS = {op.name.lower(): op for op in ReduceOp}
NAMES = tuple(FACTORS)
_FLOATS = ("half", "float", "double", "bfloat16")
_NOT_IN_GLOO = {"uint32", "uint64", "avg"}


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of `pccl bench all_reduce` and so on."""
    options.add_sizes(parser, "4K", "256M", 2)
    options.add_iterations(parser, 20, 5)
    parser.add_argument(
        "-d", "--datatype", choices=_DTYPES, default="float", help="element type (%(default)s)"
    )
    if what in REDUCING:
        parser.add_argument(
            "-o", "--op", choices=_OPS, default="sum", help="operation (%(default)s)"
        )
        parser.add_argument(
            "--quantize",
            choices=["int8", "int4", "uint8"],
            help="quantise: elements are verified to be as near as they must",
        )
    else:
        parser.set_defaults(op="none", quantize=None)
    parser.add_argument(
        "-c",
        "--check",
        type=options.whole_number(0, 1),
        default=1,
        metavar="0|1",
        help="verify every element of one more call of each size (%(default)s)",
    )
    parser.add_argument(
        "--peers",
        type=options.whole_number(2, PEERS_MAX),
        default=2,
        metavar="N",
        help="processes (%(default)s)",
    )
    parser.add_argument(
        "--against", choices=["gloo"], help="measure this library in turns with pccl"
    )
    parser.add_argument(
        "-J", "--json", type=Path, metavar="FILE", help="write the results here too"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if an element was wrong or a process failed, 2 if it cannot start."""
    problem = _problem(args)
    if problem:
        print(f"pccl bench: {problem}", file=sys.stderr)
        return 2
    dtype = _DTYPES[args.datatype]
    job = Job(
        what=args.measurement,
        peers=args.peers,
        counts=tuple(
            nbytes // dtype.itemsize // blocks(args.measurement, args.peers)
            for nbytes in options.sizes(args)
        ),
        dtype=dtype,
        op=_OPS.get(args.op, ReduceOp.MAX),
        iterations=args.iters,
        warmups=args.warmup_iters,
        check=bool(args.check),
        gloo=args.against == "gloo",
        quantization=args.quantize,
    )
    print(
        f"# pccl {pccl.__version__} bench {job.what}: {job.peers} processes on "
        f"{os.cpu_count()} cores, transport {os.environ.get('PCCL_TRANSPORT', 'auto')}\n"
        f"# medians of {job.iterations} iterations after {job.warmups} warm-ups"
        + (", pccl and gloo in turns" if job.gloo else "")
        + (f", pccl quantised to {job.quantization}" if job.quantization else "")
        + f"\n{table.head(job.gloo)}",
        flush=True,
    )
    try:
        rows = _rows(job, args.datatype, args.op)
    except BenchError as error:
        print(f"pccl bench: {error}", file=sys.stderr)
        return 1
    print(table.foot(rows))
    if args.json:
        args.json.write_text(_json(rows), encoding="utf-8")
    return 1 if table.out_of_bounds(rows) else 0


def _problem(args: argparse.Namespace) -> str:
    dtype = _DTYPES[args.datatype]
    needs_torch = args.against == "gloo" or dtype is DataType.BFLOAT16
    if needs_torch and importlib.util.find_spec("torch") is None:
        return "torch not found; pip install torch brings what bfloat16 and --against gloo need"
    for asked in (args.datatype, args.op):
        if args.against == "gloo" and asked in _NOT_IN_GLOO:
            return f"gloo has no {asked}"
    if args.quantize and (args.datatype not in _FLOATS or args.op not in ("sum", "avg")):
        return f"--quantize is for sums and means of {', '.join(_FLOATS)}"
    least = dtype.itemsize * blocks(args.measurement, args.peers)
    if not least <= args.minbytes <= args.maxbytes:
        return f"sizes must be at least {least} bytes, and -b no more than -e"
    return ""


def _rows(job: Job, dtype: str, op: str) -> list[table.Row]:
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="pccl-bench-") as scratch,
        pccl.MasterNode("127.0.0.1:0") as master,
        processes(job.peers, serve, job, master.address, Path(scratch, "gloo").as_uri()) as results,
    ):
        for count in job.counts:
            measured = collect(results)
            row = table.Row.of(job.what, count, job.dtype.itemsize, dtype, op, measured)
            print(row.text(), flush=True)
            rows.append(row)
    return rows


def _json(rows: Sequence[table.Row]) -> str:
    wrong = table.out_of_bounds(rows)
    results = {
        "version": pccl.__version__,
        "results": [row.json() for row in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {"bandwidth": table.average_busbw(rows)},
    }
    return json.dumps(results, indent=2) + "\n"
