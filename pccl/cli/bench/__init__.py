"""`pccl bench`: measures collectives, training, shared state and kernels.

The options and the table of collectives are those of nccl-tests.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from pccl.cli.bench import collectives, ddp, idle, kernels, master, recovery, state

OTHERS: dict[str, tuple[str, Any]] = {  # the other measurements: their help and module
    "ddp": ("torch's DistributedDataParallel over pccl and over gloo", ddp),
    "state": ("synchronizing shared state, with a newcomer and without", state),
    "recovery": (
        "how long a run stands still when a peer dies, freezes or joins, or the master dies",
        recovery,
    ),
    "master": ("the master's work for each message, in runs of up to some thousand peers", master),
    "idle": ("memory, threads, processor time and traffic while the peers call nothing", idle),
    "kernels": ("kernels that reduce and quantize against numpy's add", kernels),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")

    def add(name: str, text: str, description: str | None, options: Any, run: Any) -> None:
        measurement = measurements.add_parser(name, help=text, description=description)
        measurement.set_defaults(measure=run, parser=measurement)
        options(measurement)

    for name in collectives.FACTORS:
        text = f"{name} over processes of this machine, or of several"
        options = partial(collectives.add_arguments, what=name)
        add(name, text, collectives.__doc__, options, collectives.run)
    for name, (text, module) in OTHERS.items():
        add(name, text, module.__doc__, module.add_arguments, module.run)
    text = "the digest of shared state against a copy of memory"
    digest = kernels.run_digest
    add("digest", text, digest.__doc__, kernels.add_digest_arguments, digest)


def run(args: argparse.Namespace) -> int:
    measure = args.measure
    del args.run, args.measure, args.parser  # the rest can be sent to processes
    return int(measure(args))
