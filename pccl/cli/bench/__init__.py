"""`pccl bench`: measures collectives, shared state and kernels on this machine.

Collectives in the manner of nccl-tests.
"""

from __future__ import annotations

import argparse

from pccl.cli.bench import collectives, kernels, state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured, each with its options."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name in collectives.NAMES:
        text = f"{name} over processes of this machine"
        measurement = measurements.add_parser(name, help=text, description=collectives.__doc__)
        collectives.add_arguments(measurement, name)
        measurement.set_defaults(measure=collectives.run)
    text = "shared state to a newcomer, and already equal"
    measurement = measurements.add_parser("state", help=text, description=state.__doc__)
    state.add_arguments(measurement)
    measurement.set_defaults(measure=state.run)
    text = "reduce kernels against numpy's add"
    measurement = measurements.add_parser("kernels", help=text, description=kernels.__doc__)
    kernels.add_arguments(measurement)
    measurement.set_defaults(measure=kernels.run)


def run(args: argparse.Namespace) -> int:
    """Measures; the exit code is 1 if a result was wrong or a process failed."""
    return int(args.measure(args))
