"""`pccl bench`: measures collectives, training, shared state and kernels on this machine.

Collectives in the manner of nccl-tests.
"""

from __future__ import annotations

import argparse

from pccl.cli.bench import collectives, ddp, digest, kernels, state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured, each with its options."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name in collectives.NAMES:
        text = f"{name} over processes of this machine, or of several"
        measurement = measurements.add_parser(name, help=text, description=collectives.__doc__)
        collectives.add_arguments(measurement, name)
        measurement.set_defaults(measure=collectives.run)
    for name, text, module in (
        ("ddp", "torch's DistributedDataParallel over pccl and over gloo", ddp),
        ("state", "shared state to a newcomer, and already equal", state),
        ("kernels", "kernels that reduce and quantize against numpy's add", kernels),
        ("digest", "the digest of shared state against a copy of memory", digest),
    ):
        measurement = measurements.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(measurement)
        measurement.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    """Measures; the exit code is 1 if a result was wrong or a process failed."""
    return int(args.measure(args))
