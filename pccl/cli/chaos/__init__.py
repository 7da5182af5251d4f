"""`pccl chaos`: runs copies of a program under faults, and reports what failed.

A `Harness` runs any `Program`, from its options to its verdict. The command runs the words after
`--`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from pccl.cli.arguments import add_program, option, output, positive, program, whole_number
from pccl.cli.chaos import kinds
from pccl.cli.chaos.director import Director, Done, Program
from pccl.cli.chaos.kinds import Fault, Kind, Schedule, shrink
from pccl.cli.chaos.network import Network, NetworkError
from pccl.cli.chaos.report import line_of, master_violations, page, picture
from pccl.cli.chaos.stage import Stage
from pccl.cli.chaos.watch import MOMENTS, Metrics
from pccl.cli.terminal import Progress, painted

BOUND_S = 40  # by default, the run must not stand still for longer
FINISH_S = 20.0  # a copy that has not ended this long after the order to end is killed
VIOLATIONS_SHOWN, FAULTS_SHOWN = 20, 8
HEARTBEATS = {"PCCL_HEARTBEAT_MS": "500", "PCCL_HEARTBEAT_TIMEOUT_MS": "2000"}


def add_options(parser: argparse.ArgumentParser, copies: str) -> None:
    """Adds the options of a run under faults. `copies` is the help's word for copies."""
    option(parser, "--minutes MINUTES", "how long faults come", 2, positive)
    option(parser, "--seed SEED", "decides all faults", 0, whole_number(0))
    option(parser, "--calm SECONDS", "average time between two faults", 1, positive)
    option(parser, "--faults KIND,...", "only these kinds", kind=lambda text: text.split(","))
    text = "the run must not stand still for longer"
    option(parser, "--bound SECONDS", text, BOUND_S, positive)
    text = f"start another {copies} this long after one has ended (default: when a fault says so)"
    option(parser, "--restart SECONDS", text, kind=positive)
    text = f"run each {copies} in its own network namespace, and disturb the network too; Linux, "
    option(parser, "--network", f"{text}as root")
    text = "repeat the faults of a failed run, from chaos-SEED.json, or those drawn from SEED"
    option(parser, "--replay SEED|FILE", text)
    text = "if the run fails, search this long for fewer faults with which it still fails"
    option(parser, "--shrink MINUTES", text, kind=positive)
    option(parser, "--report FILE", "write a report, as one HTML file", kind=output)
    option(parser, "--keep DIR", "keep all files of the processes in this directory", kind=Path)
    option(parser, "--plain", "print lines, even on a terminal")


class Harness:
    """Runs a program under faults, with the options of `add_options`."""

    def __init__(self, args: argparse.Namespace, program: Program) -> None:
        self._args = args
        self._program = program
        self._network: Network | None = None

    def run(self) -> int:
        args, program = self._args, self._program
        with ExitStack() as stack:
            if args.network:
                try:
                    self._network = stack.enter_context(Network(program.copies))
                except NetworkError as error:
                    raise OSError(f"--network is not possible here: {error}") from None
            table = self._table()
            plan = self._schedule(table)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pccl-chaos-")))
            if args.keep is not None:
                args.keep.mkdir(parents=True, exist_ok=True)
                if any(args.keep.iterdir()):
                    raise OSError(f"{args.keep} is not empty")
                directory = args.keep
            director, metrics = self._play(plan, table, directory)
            violations = director.chronicle.violations
            print(metrics.words())
            for text in violations[:VIOLATIONS_SHOWN]:
                print(f"{painted('VIOLATION:', 'red')} {text}")
            if len(violations) > VIOLATIONS_SHOWN:
                print(f"and {len(violations) - VIOLATIONS_SHOWN} more violations")
            before, after = program.words
            again = shlex.join([*before, *self._options(plan.seed, saved=bool(violations)), *after])
            if args.report is not None:
                copies = director.stage.copies
                text = page(program.title, again, director.chronicle, copies, metrics)
                args.report.write_text(text, encoding="utf-8")
            if not violations:
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
        if args.bound != BOUND_S:
            more += ["--bound", f"{args.bound:g}"]
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
        table |= self._program.faults
        asked = self._args.faults or table.keys() | why.keys()
        for name in asked:
            if name not in table and name not in why:
                raise OSError(f"there is no fault {name!r}; there are {', '.join(sorted(table))}")
        for name, text in why.items():
            if name in asked and (self._args.faults or text != kinds.NO_NETWORK):
                print(f"left out: {name}: {text}")
        return {name: kind for name, kind in table.items() if name in asked}

    def _schedule(self, table: dict[str, Kind]) -> Schedule:
        args, program, seed = self._args, self._program, self._args.seed
        if args.replay is not None:
            saved = Path(f"chaos-{args.replay}.json")
            path = saved if saved.exists() else Path(args.replay)
            if path.exists() or not args.replay.isdecimal():
                return self._possible(kinds.load(path), table)
            seed = int(args.replay)
        seconds = args.minutes * 60
        faults = kinds.draw(seed, seconds, args.calm, table, sorted(MOMENTS))
        return Schedule(seed, program.copies, seconds, faults, dict(program.settings))

    @staticmethod
    def _possible(plan: Schedule, table: dict[str, Kind]) -> Schedule:
        lacking = {fault.what for fault in plan.faults} - table.keys()
        if lacking:
            print(f"left out, as they are not possible here: {', '.join(sorted(lacking))}")
        return plan.only([fault for fault in plan.faults if fault.what in table])

    # ---- a run ----

    def _play(
        self, plan: Schedule, table: dict[str, Kind], directory: Path
    ) -> tuple[Director, Metrics]:
        args, program = self._args, self._program
        stage = Stage(
            directory,
            {**HEARTBEATS, **os.environ, **program.environment},
            steered=program.steered,
            network=self._network,
            curve_dir=program.curve_dir,
        )

        def told(done: Done | None) -> None:
            if done is None:
                progress.refresh()
            else:
                progress.print(line_of(done, director))

        program.begin(directory)
        director = Director(stage, plan, table, program, args.bound, args.restart, told)
        with Progress(lambda: picture(director), FAULTS_SHOWN, plain=args.plain) as progress:
            try:
                director.run(FINISH_S)
            finally:
                director.close()
        violations, metrics = program.judge(directory, director)
        director.chronicle.violations += [*master_violations(director), *violations]
        return director, metrics

    def _shrink(self, plan: Schedule, table: dict[str, Kind], path: Path) -> None:
        """Writes the smallest schedule that still fails, and says so."""

        def fails(faults: list[Fault]) -> bool:
            with tempfile.TemporaryDirectory(prefix="pccl-chaos-") as directory:
                smaller = plan.only(faults, faults[-1].at_s if faults else 0.0)
                director, _ = self._play(smaller, table, Path(directory))
            failed = bool(director.chronicle.violations)
            if failed:
                smaller.save(path)
            print(f"{len(faults)} faults: {'fails' if failed else 'holds'}", flush=True)
            return failed

        found = shrink(plan.faults, fails, time.monotonic() + self._args.shrink * 60)
        print(f"{len(found)} of {len(plan.faults)} faults are in {path} now, and fail")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    epilog = "kinds of faults:\n" + "\n".join(
        f"  {name:22}{kind.text}{', with --network' if kind.network else ''}"
        for name, kind in kinds.KINDS.items()
    )
    add_program(parser, epilog)
    option(parser, "-n COPIES", "the most copies that run at once", 4, whole_number(2, 200))
    add_options(parser, "copy")
    text = (
        "after the faults, wait this long for the copies to end by themselves (default: they are "
        "asked to end, by SIGTERM)"
    )
    option(parser, "--finish SECONDS", text, kind=whole_number(1))


def run(args: argparse.Namespace) -> int:
    """`pccl chaos`: the exit code is 0 if everything held."""
    command, own = program(args), ["pccl", "chaos", "-n", str(args.n)]
    own += ["--finish", str(args.finish)] if args.finish is not None else []
    title = f"pccl chaos: {command[0]}, {args.n} copies"
    copies = Program(title, args.n, (own, ["--", *command]), command, args.finish)
    return Harness(args, copies).run()
