"""`pccl chaos`: runs copies of a program under faults, and says what did not hold."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pccl.cli import program
from pccl.cli.arguments import whole_number
from pccl.cli.chaos import kinds
from pccl.cli.chaos.director import Director
from pccl.cli.chaos.harness import Harness, Program, add_options
from pccl.cli.chaos.kinds import NetworkError
from pccl.cli.chaos.report import Metrics, measure
from pccl.cli.chaos.stage import Strangers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl chaos`."""
    epilog = "kinds of faults:\n" + "\n".join(
        f"  {name:22}{kind.text}{', with --network' if kind.network else ''}"
        for name, kind in kinds.KINDS.items()
    )
    program.add_arguments(parser, "pccl chaos", epilog)
    parser.add_argument(
        "-n",
        type=whole_number(2, 200),
        default=4,
        metavar="COPIES",
        help="at most so many copies at once (default: %(default)s)",
    )
    add_options(parser, "copy")
    parser.add_argument(
        "--finish",
        type=whole_number(1),
        metavar="SECONDS",
        help="after the faults, let the copies end by themselves, and at most for so long "
        "(default: they are asked to end, by SIGTERM)",
    )


def run(args: argparse.Namespace) -> int:
    """`pccl chaos`: the exit code is 0 if everything held."""
    command = program.words(args, "pccl chaos")
    if not command:
        return 2
    what = Program(
        f"pccl chaos: {command[0]}, {args.n} copies",
        lambda _: Strangers(command),
        judge,
        {},
        grace_s=args.finish,
    )

    def again(options: list[str]) -> list[str]:
        return ["pccl", "chaos", "-n", str(args.n), *options, "--", *command]

    try:
        return Harness(args, what, args.n, again, {}).run()
    except NetworkError as error:
        print(f"pccl chaos: no hosts of their own: {error}", file=sys.stderr)
        return 1


def judge(directory: Path, director: Director) -> tuple[list[str], Metrics]:
    """Nothing but what the master has seen: a step is a collective."""
    faults = [
        done.at_s
        for done in director.chronicle.done
        if not done.skipped and done.fault.what in (kinds.KILL, kinds.KILL_MOST, kinds.RESTART)
    ]
    return [], measure(director.watch.collectives_s, faults)
