"""`pccl bench`: measures collectives, training, shared state and kernels on this machine.

Collectives in the manner of nccl-tests.
"""

from __future__ import annotations

import argparse

from pccl.cli.bench import collectives, ddp, kernels, state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured, each with its options."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name in collectives.NAMES:
        text = f"{name} over processes of this machine, or of several"
        measurement = measurements.add_parser(name, help=text, description=collectives.__doc__)
        collectives.add_arguments(measurement, name)
        measurement.set_defaults(measure=collectives.run)
    for name, text, description, add, measure in (
        (
            "ddp",
            "torch's DistributedDataParallel over pccl and over gloo",
            ddp.__doc__,
            ddp.add_arguments,
            ddp.run,
        ),
        (
            "state",
            "shared state to a newcomer, and already equal",
            state.__doc__,
            state.add_arguments,
            state.run,
        ),
        (
            "kernels",
            "kernels that reduce and quantize against numpy's add",
            kernels.__doc__,
            kernels.add_arguments,
            kernels.run,
        ),
        (
            "digest",
            "the digest of shared state against a copy of memory",
            kernels.run_digest.__doc__,
            kernels.add_digest_arguments,
            kernels.run_digest,
        ),
    ):
        measurement = measurements.add_parser(name, help=text, description=description)
        add(measurement)
        measurement.set_defaults(measure=measure)


def run(args: argparse.Namespace) -> int:
    """Measures; the exit code is 1 if a result was wrong or a process failed."""
    return int(args.measure(args))
