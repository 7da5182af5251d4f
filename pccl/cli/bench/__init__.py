"""`pccl bench`: measures collectives and kernels on this machine, in the manner of nccl-tests."""

from __future__ import annotations

import argparse

from pccl.cli.bench import all_reduce, kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured, each with its options."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name, module, text in (
        ("all_reduce", all_reduce, "all-reduce over processes of this machine"),
        ("kernels", kernels, "reduce kernels against numpy's add"),
    ):
        measurement = measurements.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(measurement)
        measurement.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    """Measures; the exit code is 1 if a result was wrong or a process failed."""
    return int(args.measure(args))
