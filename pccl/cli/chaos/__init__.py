"""`pccl chaos`: runs copies of a program under faults, and says what did not hold.

A `Harness` makes a run of any `Program`, from its options to its verdict; the command's own program
is the words after `--`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pccl.cli import arguments
from pccl.cli.arguments import add_program, option, output, positive, whole_number
from pccl.cli.chaos import kinds
from pccl.cli.chaos.director import Crew, Director, Strangers
from pccl.cli.chaos.kinds import Fault, Kind, Schedule, shrink
from pccl.cli.chaos.network import Network, NetworkError
from pccl.cli.chaos.report import Metrics, Outcome, View, master_violations, measure, page
from pccl.cli.chaos.stage import Stage
from pccl.cli.chaos.watch import MOMENTS
from pccl.cli.terminal import complain, painted

FINISH_S = 20.0  # from the order to end until a copy that has not is killed
SHOWN = 20  # violations
HEARTBEATS = {"PCCL_HEARTBEAT_MS": "500", "PCCL_HEARTBEAT_TIMEOUT_MS": "2000"}


class Program(NamedTuple):
    title: str
    copies: int  # the most that run at once
    # the words of the command line before the options of a run, and after them
    command: tuple[list[str], list[str]]
    crew: Callable[[Path], Crew]  # of a run, given the directory of its files
    # of a run that is over: the violations, and how fast it was
    judge: Callable[[Path, Director], tuple[list[str], Metrics]]
    environment: Mapping[str, str] = MappingProxyType({})  # of all processes, besides this one's
    settings: Mapping[str, str] = MappingProxyType({})  # of the program, saved in the schedule
    steered: bool = False  # whether copies read orders from their stdin
    more: Mapping[str, Kind] = MappingProxyType({})  # faults that copies inflict on themselves
    grace_s: float | None = None  # for copies to end by themselves after the faults
    curve_dir: str = ""  # keys, for an encrypted run


def add_options(parser: argparse.ArgumentParser, copies: str) -> None:
    """Adds the options of a run under faults. `copies` is what the help calls a copy."""
    option(parser, "--minutes", "MINUTES", positive, "how long faults come", 2)
    option(parser, "--seed", "SEED", whole_number(0), "decides all faults", 0)
    option(parser, "--calm", "SECONDS", positive, "from one fault to the next, on average", 1)
    parser.add_argument(
        "--faults", type=_faults, default=(), metavar="KIND,...", help="only these kinds"
    )
    option(parser, "--bound", "SECONDS", positive, "the run must not stand still for longer", 40)
    option(
        parser,
        "--restart",
        "SECONDS",
        positive,
        f"start another {copies} this long after one has ended (default: when a fault says so)",
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help=f"run each {copies} in its own network namespace, and disturb the network too; Linux, "
        "as root",
    )
    parser.add_argument(
        "--replay",
        metavar="SEED|FILE",
        help="repeat the faults of a failed run, from chaos-SEED.json, or those drawn from SEED",
    )
    option(
        parser,
        "--shrink",
        "MINUTES",
        positive,
        "if the run fails, search this long for fewer faults with which it still fails",
    )
    option(parser, "--report", "FILE", output, "write a report, as one HTML file")
    option(parser, "--keep", "DIR", Path, "keep all that the processes write, in this directory")
    parser.add_argument("--plain", action="store_true", help="print lines, even on a terminal")


class Harness:
    """Runs a program under faults, with the options of `add_options`."""

    def __init__(self, args: argparse.Namespace, program: Program) -> None:
        self._args = args
        self._program = program
        self._network: Network | None = None

    def run(self) -> int:
        """Makes the run and prints its outcome; the exit code."""
        args = self._args
        with ExitStack() as stack:
            if args.network:
                self._network = Network(self._program.copies)
                stack.callback(self._network.close)
            table = self._table()
            plan = self._schedule(table)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pccl-chaos-")))
            if args.keep is not None:
                args.keep.mkdir(parents=True, exist_ok=True)
                if any(args.keep.iterdir()):
                    raise OSError(f"{args.keep} is not empty")
                directory = args.keep
            outcome = self._play(plan, table, directory)
            print(outcome.figures.words())
            for text in outcome.violations[:SHOWN]:
                print(f"{painted('VIOLATION:', 'red')} {text}")
            if len(outcome.violations) > SHOWN:
                print(f"and {len(outcome.violations) - SHOWN} more violations")
            before, after = self._program.command
            options = self._options(plan.seed, saved=bool(outcome.violations))
            again = shlex.join([*before, *options, *after])
            if args.report is not None:
                text = page(self._program.title, again, outcome)
                args.report.write_text(text, encoding="utf-8")
            if not outcome.violations:
                print(painted(f"everything held (seed {plan.seed})", "green"))
                return 0
            path = Path(f"chaos-{plan.seed}.json")
            plan.save(path)
            print(f"something did not hold; its faults are in {path}; once more: {again}")
            if args.shrink is not None:
                self._shrink(plan, table, path)
            return 1

    def _options(self, seed: int, *, saved: bool) -> list[str]:
        """The options that repeat the same faults: from the file, if they were saved."""
        args = self._args
        more = ["--network"] * args.network
        if args.restart is not None:
            more += ["--restart", f"{args.restart:g}"]
        if saved:
            return ["--replay", str(seed), *more]
        faults = ["--faults", ",".join(args.faults)] if args.faults else []
        drawn = ["--seed", str(seed), "--minutes", f"{args.minutes:g}", "--calm", f"{args.calm:g}"]
        return [*drawn, *faults, *more]

    # ---- before ----

    def _table(self) -> dict[str, Kind]:
        table, why = kinds.possible()
        if self._network is not None:
            more, lacking = self._network.kinds()
            table |= more
            why = {n: text for n, text in why.items() if not kinds.KINDS[n].network} | lacking
        table |= self._program.more
        asked = self._args.faults
        for name in asked:
            if name not in table and name not in why:
                raise OSError(f"there is no fault {name!r}; there are {', '.join(sorted(table))}")
        for name, text in why.items():
            if name in asked or (not asked and text != "without --network"):
                print(f"left out: {name}: {text}")
        return {name: kind for name, kind in table.items() if not asked or name in asked}

    def _schedule(self, table: dict[str, Kind]) -> Schedule:
        args = self._args
        seed = args.seed
        if args.replay is not None:
            saved = Path(f"chaos-{args.replay}.json")
            path = saved if saved.exists() else Path(args.replay)
            if path.exists() or not args.replay.isdecimal():
                return self._possible(kinds.load(path), table)
            seed = int(args.replay)
        seconds = args.minutes * 60
        moments = sorted(MOMENTS)
        faults = kinds.draw(seed, seconds, args.calm, table, moments)
        program = self._program
        return Schedule(seed, program.copies, seconds, faults, dict(program.settings))

    @staticmethod
    def _possible(plan: Schedule, table: dict[str, Kind]) -> Schedule:
        lacking = {fault.what for fault in plan.faults} - table.keys()
        if lacking:
            print(f"left out, as they are not possible here: {', '.join(sorted(lacking))}")
        return plan.only([fault for fault in plan.faults if fault.what in table])

    # ---- a run ----

    def _play(self, plan: Schedule, table: dict[str, Kind], directory: Path) -> Outcome:
        program = self._program
        crew = program.crew(directory)
        stage = Stage(
            crew.command,
            directory,
            {**HEARTBEATS, **os.environ, **program.environment},
            steered=program.steered,
            network=self._network,
            curve_dir=program.curve_dir,
        )
        view = View(self._args.plain)
        args = self._args
        director = Director(stage, plan, table, crew, args.bound, args.restart, view.told)
        try:
            director.run()
            if program.grace_s is not None:
                director.wait(program.grace_s)
            director.finish(FINISH_S)
        finally:
            view.close()
            director.close()
        violations, figures = program.judge(directory, director)
        mine = [*director.chronicle.violations, *master_violations(stage.event_log, director)]
        return Outcome(director.chronicle, stage.copies, figures, [*mine, *violations])

    def _shrink(self, plan: Schedule, table: dict[str, Kind], path: Path) -> None:
        """Writes the smallest schedule that still fails, and says so."""
        assert self._args.shrink is not None
        until_s = time.monotonic() + self._args.shrink * 60
        happened = list(plan.faults)

        def fails(faults: list[Fault]) -> bool:
            with tempfile.TemporaryDirectory(prefix="pccl-chaos-") as directory:
                smaller = plan.only(faults, faults[-1].at_s if faults else 0.0)
                failed = bool(self._play(smaller, table, Path(directory)).violations)
            if failed:
                smaller.save(path)
            print(f"{len(faults)} faults: {'fails' if failed else 'holds'}", flush=True)
            return failed

        found = shrink(happened, fails, until_s)
        print(f"{len(found)} of {len(happened)} faults are in {path} now, and fail")


def _faults(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    epilog = "kinds of faults:\n" + "\n".join(
        f"  {name:22}{kind.text}{', with --network' if kind.network else ''}"
        for name, kind in kinds.KINDS.items()
    )
    add_program(parser, "pccl chaos", epilog)
    option(parser, "-n", "COPIES", whole_number(2, 200), "the most copies that run at once", 4)
    add_options(parser, "copy")
    option(
        parser,
        "--finish",
        "SECONDS",
        whole_number(1),
        "after the faults, wait this long for the copies to end by themselves (default: they are "
        "asked to end, by SIGTERM)",
    )


def run(args: argparse.Namespace) -> int:
    """`pccl chaos`: the exit code is 0 if everything held."""
    command = arguments.program(args, "pccl chaos")
    if not command:
        return 2
    what = Program(
        f"pccl chaos: {command[0]}, {args.n} copies",
        args.n,
        (["pccl", "chaos", "-n", str(args.n)], ["--", *command]),
        lambda _: Strangers(command),
        judge,
        grace_s=args.finish,
    )
    try:
        return Harness(args, what).run()
    except NetworkError as error:
        complain("chaos", f"--network is not possible here: {error}")
        return 1


def judge(directory: Path, director: Director) -> tuple[list[str], Metrics]:
    """Counts each collective that the master has seen as a step."""
    faults = [
        done.at_s
        for done in director.chronicle.done
        if not done.skipped and done.fault.what in (kinds.KILL, kinds.KILL_MOST, kinds.RESTART)
    ]
    return [], measure(director.watch.collectives_s, faults)
