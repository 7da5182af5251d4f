"""`pccl bench`: measures collectives, training, shared state and kernels.

Collectives in the manner of nccl-tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pccl.cli.bench import collectives, ddp, kernels, master, recovery, state


class Measurement(NamedTuple):
    """What can be measured: its help, a description, how options are added, how it is run."""

    text: str
    description: str | None
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]


MEASUREMENTS = {
    **{
        name: Measurement(
            f"{name} over processes of this machine, or of several",
            collectives.__doc__,
            partial(collectives.add_arguments, what=name),
            collectives.run,
        )
        for name in collectives.NAMES
    },
    "ddp": Measurement(
        "torch's DistributedDataParallel over pccl and over gloo",
        ddp.__doc__,
        ddp.add_arguments,
        ddp.run,
    ),
    "state": Measurement(
        "shared state to a newcomer, and already equal",
        state.__doc__,
        state.add_arguments,
        state.run,
    ),
    "recovery": Measurement(
        "how long a run stands still when a peer dies, freezes or joins, or the master dies",
        recovery.__doc__,
        recovery.add_arguments,
        recovery.run,
    ),
    "master": Measurement(
        "the master's work for each message, in runs of up to some thousand peers",
        master.__doc__,
        master.add_arguments,
        master.run,
    ),
    "kernels": Measurement(
        "kernels that reduce and quantize against numpy's add",
        kernels.__doc__,
        kernels.add_arguments,
        kernels.run,
    ),
    "digest": Measurement(
        "the digest of shared state against a copy of memory",
        kernels.run_digest.__doc__,
        kernels.add_digest_arguments,
        kernels.run_digest,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured, each with its options."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name, (text, description, add, measure) in MEASUREMENTS.items():
        measurement = measurements.add_parser(name, help=text, description=description)
        measurement.set_defaults(measure=measure, parser=measurement)
        add(measurement)


def run(args: argparse.Namespace) -> int:
    return int(args.measure(args))
