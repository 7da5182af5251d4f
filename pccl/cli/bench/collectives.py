"""Measures a collective over processes of one or several machines, and verifies every result.

Prints the table of nccl-tests: time is the median over the iterations of the mean over the peers,
algbw is the size over the time, and busbw = algbw * 2 (n-1) / n for all-reduce, (n-1) / n for
all-gather and reduce-scatter, whose size is that of the larger buffer, and all-to-all, which is
never in place, and algbw for broadcast, which always is; wire is the bytes that a peer sends.
`--against` alternates with torch.distributed over gloo or nccl, with pccl without `--quantize`, or
with the same all-reduce as 16 smaller ones that are under way at once (`pieces`), or as one list of
148 tensors like those of a GPT in `all_reduce_multiple_with_retry` (`tensors`), iteration by
iteration, in the same processes on the same memory, and prints the ratio of the speeds.

`--device cuda` measures tensors in GPU memory: process i has GPU i of its machine, or shares one.

Between machines: start `pccl master` on one, and this command with the same arguments and
`--master HOST` once for each of the `--peers`, anywhere. They exchange their measurements by a
collective, so all of them print the table. LOCAL_RANK says which GPU of its machine a process uses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import pccl
from pccl.cli.arguments import whole_number
from pccl.cli.bench import common, strategies, table, trials
from pccl.cli.bench.common import BenchError, collect, processes
from pccl.cli.bench.table import FACTORS, blocks
from pccl.cli.bench.trials import (
    ELEMENTS_MIN,
    GLOO,
    NCCL,
    OTHERS,
    REDUCING,
    TORCH,
    Job,
    Measured,
    join,
    measure,
    serve,
)
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
_NOT_IN = {GLOO: {"uint32", "uint64", "avg"}, NCCL: {"uint32", "uint64"}}
_OF_GLOO_ON_GPUS = ("all_reduce", "broadcast")  # https://docs.pytorch.org/docs/stable/distributed


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of `pccl bench all_reduce` and so on."""
    common.add_sizes(parser, "4K", "256M", 2)
    common.add_iterations(parser, 20, 5)
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
            help="quantize: elements are verified to be as near as they must",
        )
    else:
        parser.set_defaults(op="none", quantize=None)
    parser.add_argument(
        "-c",
        "--check",
        type=whole_number(0, 1),
        default=1,
        metavar="0|1",
        help="verify every element of one more call of each size (%(default)s)",
    )
    common.add_run(parser)
    parser.add_argument(
        "--lanes",
        type=whole_number(1, 256),
        default=0,
        metavar="N",
        help="connections to the next peer (one on this machine, else by the round trip)",
    )
    parser.add_argument(
        "--against", choices=OTHERS, help="measure this in turns with it, on this machine"
    )
    parser.add_argument(
        "--device",
        choices=trials.DEVICES,
        default="cpu",
        help="where the arrays lie; cuda: tensors of torch (%(default)s)",
    )
    common.add_json(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say how each size travels, on one machine and on several; measure nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if an element was wrong or a process failed, 2 if it cannot start."""
    problem = _problem(args)
    if problem:
        print(f"pccl bench: {problem}", file=sys.stderr)
        return 2
    dtype = _DTYPES[args.datatype]
    if args.explain:
        op, sizes = _OPS.get(args.op, ReduceOp.MAX), list(common.sizes(args))
        for line in strategies.explained(
            args.measurement, sizes, args.peers, dtype, op, args.quantize, args.lanes
        ):
            print(line)
        return 0
    job = Job(
        what=args.measurement,
        peers=args.peers,
        counts=tuple(
            nbytes // dtype.itemsize // blocks(args.measurement, args.peers)
            for nbytes in common.sizes(args)
        ),
        dtype=dtype,
        op=_OPS.get(args.op, ReduceOp.MAX),
        iterations=args.iters,
        warmups=args.warmup_iters,
        check=bool(args.check),
        against=args.against,
        quantization=args.quantize,
        lanes=args.lanes,
        device=args.device,
    )
    print(f"{_title(job, args.master)}\n{table.head(job.against)}", flush=True)
    rows = []
    try:
        all_measured = _between_machines(args.master, job) if args.master else _here(job)
        for count, each in zip(job.counts, all_measured, strict=True):
            rows.append(table.Row.of(job.what, count, dtype.itemsize, args.datatype, args.op, each))
            print(rows[-1].text(), flush=True)
    except BenchError as error:
        print(f"pccl bench: {error}", file=sys.stderr)
        return 1
    print(table.foot(rows))
    if args.json:
        args.json.write_text(_json(rows), encoding="utf-8")
    return 1 if table.out_of_bounds(rows) else 0


def _problem(args: argparse.Namespace) -> str:
    dtype = _DTYPES[args.datatype]
    if args.against in TORCH:
        problem = _problem_with_torch(args)
    elif dtype is DataType.BFLOAT16 and importlib.util.find_spec("torch") is None:
        problem = "torch not found; pip install torch brings bfloat16"
    else:
        problem = trials.missing(args.device)
    if problem:
        return problem
    if args.against == "unquantized" and not args.quantize:
        return "--against unquantized needs --quantize"
    elements = ELEMENTS_MIN.get(args.against, 0)
    small = args.minbytes < dtype.itemsize * elements
    if elements and (args.measurement != "all_reduce" or small):
        return f"--against {args.against} is for all_reduce, of {elements} elements or more"
    if args.quantize and (args.datatype not in _FLOATS or args.op not in ("sum", "avg")):
        return f"--quantize is for sums and means of {', '.join(_FLOATS)}"
    least = dtype.itemsize * blocks(args.measurement, args.peers)
    if not least <= args.minbytes <= args.maxbytes:
        return f"sizes must be at least {least} bytes, and -b no more than -e"
    return ""


def _problem_with_torch(args: argparse.Namespace) -> str:
    """Why torch.distributed cannot take its turns."""
    if importlib.util.find_spec("torch") is None:
        return f"torch not found; pip install torch brings what --against {args.against} needs"
    if args.master:
        return f"--against {args.against} measures processes of this machine: leave out --master"
    for asked in (args.datatype, args.op):
        if asked in _NOT_IN[args.against]:
            return f"{args.against} has no {asked}"
    if args.against == NCCL and args.device != "cuda":
        return "nccl moves GPU memory only: say --device cuda, too"
    missing = trials.missing(args.device)
    if missing or args.device == "cpu":
        return missing
    if args.against == NCCL:
        import torch

        if not torch.distributed.is_nccl_available():
            return f"torch {torch.__version__} is built without nccl"
        if torch.cuda.device_count() < args.peers:
            gpus = torch.cuda.device_count()
            return f"nccl needs a GPU for each process: there are {gpus}, for --peers {args.peers}"
    elif args.measurement not in _OF_GLOO_ON_GPUS:
        return f"gloo has no {args.measurement} of GPU memory: only {', '.join(_OF_GLOO_ON_GPUS)}"
    return ""


def _title(job: Job, master: str | None) -> str:
    where = f"by the master {master}" if master else f"on {os.cpu_count()} cores"
    return (
        f"# pccl {pccl.__version__} bench {job.what}: {job.peers} processes {where}"
        f"{trials.described(job.device)}, "
        f"transport {os.environ.get('PCCL_TRANSPORT', 'auto')}, lanes {job.lanes or 'auto'}\n"
        f"# medians of {job.iterations} iterations after {job.warmups} warm-ups"
        + (f", quantized to {job.quantization}" if job.quantization else "")
        + (f", in turns with {job.against}" if job.against else "")
    )


def _here(job: Job) -> Iterator[list[Measured]]:
    """What processes of this machine measure, for one size after the other."""
    with (
        tempfile.TemporaryDirectory(prefix="pccl-bench-") as scratch,
        pccl.MasterNode("127.0.0.1:0") as master,
        processes(
            job.peers, serve, job, master.address, Path(scratch, "torch").as_uri()
        ) as results,
    ):
        for _ in job.counts:
            yield collect(results)


def _json(rows: Sequence[table.Row]) -> str:
    wrong = table.out_of_bounds(rows)
    results = {
        "version": pccl.__version__,
        "results": [row.json() for row in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {"bandwidth": table.average_busbw(rows)},
    }
    return json.dumps(results, indent=2) + "\n"


def _between_machines(master: str, job: Job) -> Iterator[list[Measured]]:
    """What all peers have measured, for one size after the other.

    Args:
        master: HOST:PORT.

    Raises:
        PCCLError: the master cannot be reached, a peer was lost, or others measure something else.
    """
    place = trials.of_process(job.device, int(os.environ.get("LOCAL_RANK", "0")))
    with join(master, job) as comm:
        for count in job.counts:
            yield _exchange(comm, measure(comm, job, count, place))


def _exchange(comm: pccl.Communicator, own: Measured) -> list[Measured]:
    """The measurements of all peers; numbers below 2**53 survive as float64."""
    names = list(own.times_s)
    checked = bool(own.wrong)
    counts = [*own.sent.values(), *own.wrong.values()]
    times = [own.times_s[name] for name in names]
    row = np.array([*counts, *np.ravel(times)], np.float64)
    found = []
    for values in comm.all_gather(row):
        sent, rest = values[: len(names)], values[len(names) :]
        wrong, rest = (rest[: len(names)], rest[len(names) :]) if checked else ([], rest)
        found.append(
            Measured(
                dict(zip(names, rest.reshape(len(names), -1).tolist(), strict=True)),
                dict(zip(names, map(int, wrong), strict=checked)),
                dict(zip(names, map(int, sent), strict=True)),
            )
        )
    return found
