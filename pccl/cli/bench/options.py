"""Options that measurements share, as in nccl-tests."""

from __future__ import annotations

import argparse
import json

from pccl import __version__
from pccl.cli.arguments import master, option, output, size, whole_number

PEERS_MAX = 64


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str, factor: int) -> None:
    option(parser, "-b --minbytes", "SIZE", size, "smallest size", begin)
    option(parser, "-e --maxbytes", "SIZE", size, "largest size", end)
    option(
        parser, "-f --stepfactor", "N", whole_number(2), "factor from one size to the next", factor
    )


def add_iterations(parser: argparse.ArgumentParser, iterations: int, warmups: int) -> None:
    option(
        parser,
        "-n --iters",
        "N",
        whole_number(1),
        "timed iterations of each size; the table shows their median",
        iterations,
    )
    option(
        parser,
        "-w --warmup_iters",
        "N",
        whole_number(0),
        "iterations before those that are timed",
        warmups,
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds --peers and --master: which processes measure together."""
    option(parser, "--peers", "N", whole_number(2, PEERS_MAX), "processes", 2)
    option(
        parser,
        "--master",
        "HOST[:PORT]",
        master,
        "run as one peer of a run on several machines, with the master at this address",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    option(parser, "-J --json", "FILE", output, "write the results to this file, too")


def write_json(args: argparse.Namespace, found: dict[str, object]) -> None:
    if args.json:
        text = json.dumps({"version": __version__, **found}, indent=2) + "\n"
        args.json.write_text(text, encoding="utf-8")


def sizes(args: argparse.Namespace) -> list[int]:
    found = []
    nbytes = args.minbytes
    while nbytes <= args.maxbytes:
        found.append(nbytes)
        nbytes *= args.stepfactor
    return found
