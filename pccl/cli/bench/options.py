"""Options that measurements share, as in nccl-tests."""

from __future__ import annotations

import argparse

from pccl.cli.arguments import master, output, size, whole_number

PEERS_MAX = 64


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str, factor: int) -> None:
    parser.add_argument(
        "-b", "--minbytes", type=size, default=begin, metavar="SIZE", help="smallest (%(default)s)"
    )
    parser.add_argument(
        "-e", "--maxbytes", type=size, default=end, metavar="SIZE", help="largest (%(default)s)"
    )
    parser.add_argument(
        "-f",
        "--stepfactor",
        type=whole_number(2),
        default=factor,
        metavar="N",
        help="from one size to the next (%(default)s)",
    )


def add_iterations(parser: argparse.ArgumentParser, iterations: int, warmups: int) -> None:
    parser.add_argument(
        "-n",
        "--iters",
        type=whole_number(1),
        default=iterations,
        metavar="N",
        help="timed iterations of each size; the table shows their median (%(default)s)",
    )
    parser.add_argument(
        "-w",
        "--warmup_iters",
        type=whole_number(0),
        default=warmups,
        metavar="N",
        help="iterations before those that are timed (%(default)s)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds --peers and --master: which processes measure together."""
    parser.add_argument(
        "--peers",
        type=whole_number(2, PEERS_MAX),
        default=2,
        metavar="N",
        help="processes (%(default)s)",
    )
    parser.add_argument(
        "--master",
        type=master,
        metavar="HOST[:PORT]",
        help="be one of the peers of a run on several machines, whose master is there",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-J", "--json", type=output, metavar="FILE", help="write the results here too"
    )


def sizes(args: argparse.Namespace) -> list[int]:
    """The sizes in bytes that -b, -e and -f ask for."""
    found = []
    nbytes = args.minbytes
    while nbytes <= args.maxbytes:
        found.append(nbytes)
        nbytes *= args.stepfactor
    return found
