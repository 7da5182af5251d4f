"""Options that measurements share, as in nccl-tests; the title and the results that they write."""

from __future__ import annotations

import argparse
import json
import os

from pccl import __version__
from pccl.cli.arguments import master, option, output, size, whole_number

PEERS_MAX = 64


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str, factor: int) -> None:
    option(parser, "-b --minbytes SIZE", "smallest size", begin, size)
    option(parser, "-e --maxbytes SIZE", "largest size", end, size)
    text = "factor from one size to the next"
    option(parser, "-f --stepfactor N", text, factor, whole_number(2))


def add_iterations(parser: argparse.ArgumentParser, iterations: int, warmups: int) -> None:
    text = "timed iterations of each size; the table shows their median"
    option(parser, "-n --iters N", text, iterations, whole_number(1))
    text = "iterations before those that are timed"
    option(parser, "-w --warmup_iters N", text, warmups, whole_number(0))


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds --peers and --master: which processes measure together."""
    option(parser, "--peers N", "processes", 2, whole_number(2, PEERS_MAX))
    text = "run as one peer of a run on several machines, with the master at this address"
    option(parser, "--master HOST[:PORT]", text, kind=master)


def add_json(parser: argparse.ArgumentParser) -> None:
    option(parser, "-J --json FILE", "write the results to this file, too", kind=output)


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


def title(what: str, who: str, address: str | None = None, where: str = "") -> str:
    """The first line of a table. `address` is the address of a master elsewhere."""
    place = f"by the master {address}" if address else f"on {os.cpu_count()} cores"
    transport = os.environ.get("PCCL_TRANSPORT", "auto")
    return f"# pccl {__version__} bench {what}: {who} {place}{where}, transport {transport}"
