"""Measures torch's DistributedDataParallel: a small GPT over pccl, and over gloo, in turns.

The program is the same for both but for the group that it is given. A step is timed as a whole:
forward, backward with the all-reduce of the gradients, optimizer. Times are those of the slowest
peer in each step; the table has medians over the steps (and minima), and steps a second as a ratio
to gloo's. Afterwards all peers must have the same weights, to the bit.

Between machines: start `pccl master` on one, and this command with the same arguments and
`--master HOST` once for each of the `--peers`, anywhere. All of them print the table. gloo
chooses its network by GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from statistics import median
from typing import TYPE_CHECKING, Any

import pccl
from pccl.cli.arguments import whole_number
from pccl.cli.bench import options
from pccl.cli.bench.processes import BenchError, collect, processes

if TYPE_CHECKING:
    from pccl.cli.bench.training import Job, Measured

_WIRES = ("int8", "int4", "e3m0", "2bit", "sparse")
_NUMBERS = (  # name, default, meaning
    ("--layers", 4, "layers of the model"),
    ("--width", 256, "its width"),
    ("--length", 64, "tokens of a sequence"),
    ("--batch", 4, "sequences of each process in each step"),
    ("--bucket-mib", 25, "most MiB of gradients that are reduced together"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl bench ddp`."""
    options.add_iterations(parser, 20, 3)
    options.add_run(parser)
    parser.add_argument(
        "--wire",
        nargs="+",
        choices=_WIRES,
        default=[],
        help="measure pccl with gradients quantized so, too",
    )
    for name, default, meaning in _NUMBERS:
        parser.add_argument(
            name,
            type=whole_number(1),
            default=default,
            metavar="N",
            help=f"{meaning} (%(default)s)",
        )
    parser.add_argument(
        "--threads",
        type=whole_number(1),
        metavar="N",
        help="torch's, in each process (this machine's cores divided among its processes)",
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if weights differ or a process failed, 2 if it cannot start."""
    if importlib.util.find_spec("torch") is None:
        print("pccl bench: torch not found; pip install torch brings it", file=sys.stderr)
        return 2
    from pccl.cli.bench.training import Job

    here = 1 if args.master else args.peers
    job = Job(
        args.peers,
        tuple(args.wire),
        args.layers,
        args.width,
        args.length,
        args.batch,
        args.bucket_mib,
        args.iters,
        args.warmup_iters,
        args.threads or max(1, (os.cpu_count() or 1) // here),
    )
    try:
        rows = _rows(_measured(job, args.master))
    except (BenchError, pccl.PCCLError) as error:
        print(f"pccl bench: {error}", file=sys.stderr)
        return 1
    print(_title(job, args.master, rows), flush=True)
    for row in rows:
        print(_text(row))
    if args.json:
        found = {"version": pccl.__version__, "peers": job.peers, "results": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["equal"] for row in rows) else 1


def _measured(job: Job, address: str | None) -> list[Measured]:
    from pccl.cli.bench.training import serve, train

    if address is not None:
        return train(job, address)
    with (
        pccl.MasterNode("127.0.0.1:0") as node,
        processes(job.peers, serve, job, node.address) as results,
    ):
        found: list[Measured] = collect(results)[0]
        return found


def _rows(measured: list[Measured]) -> list[dict[str, Any]]:
    first = measured[0]
    rows: list[dict[str, Any]] = []
    for way in first.times_s:
        slowest = [max(times) for times in zip(*(m.times_s[way] for m in measured), strict=True)]
        time_s = median(slowest)
        rows.append(
            {
                "way": way,
                "parameters": first.parameters,
                "step_s": time_s,
                "step_min_s": min(slowest),
                "steps_per_s": 1 / time_s,
                "of_gloo": (rows[0]["step_s"] if rows else time_s) / time_s,
                "loss": first.losses[way],
                "equal": len({m.weights[way] for m in measured}) == 1,
            }
        )
    return rows


def _title(job: Job, address: str | None, rows: list[dict[str, Any]]) -> str:
    where = f"by the master {address}" if address else f"on {os.cpu_count()} cores"
    millions = rows[0]["parameters"] / 1e6
    return (
        f"# pccl {pccl.__version__} bench ddp: {job.peers} processes {where}, transport "
        f"{os.environ.get('PCCL_TRANSPORT', 'auto')}\n# a GPT of {millions:.1f} million parameters "
        f"({job.layers} layers, width {job.width}), {job.batch} x {job.length} tokens, "
        f"buckets of {job.bucket_mib} MiB\n"
        f"# medians (minima) of {job.iterations} steps after {job.warmups} warm-ups, in turns\n"
        f"#{'over':>12} {'ms a step':>20} {'steps/s':>9} {'of gloo':>8} {'loss':>8}  weights"
    )


def _text(row: dict[str, Any]) -> str:
    times = f"{row['step_s'] * 1e3:.1f} ({row['step_min_s'] * 1e3:.1f})"
    equal = "equal" if row["equal"] else "DIFFER"
    return (
        f"{row['way']:>13} {times:>20} {row['steps_per_s']:9.2f} {row['of_gloo']:8.2f} "
        f"{row['loss']:8.4f}  {equal}"
    )
