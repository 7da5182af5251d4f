"""Injects faults of all kinds into a run, and lets an independent checker judge the outcome.

    python -m stress --minutes 10 --peers 8 --seed 7 --programs loop,overlap,diloco-delayed

A master and workers train (worker.py) while workers and master are killed, frozen, starved,
restarted and replaced, disks are full, connections are reset, and programs fork; with --network,
hosts are cut off, too. One seed decides all faults. Each worker keeps a diary, and checker.py
judges the run only by these diaries. A second master must repeat all decisions in the master's
event log. The exit code is 0 only if all checks hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for all scripts of this directory

import checker
import diary
import mischief
import msgspec
import numpy as np
import worker

from pccl.cli.arguments import option, whole_number
from pccl.cli.chaos import Harness, Program, add_options, kinds
from pccl.cli.chaos.director import Director
from pccl.cli.chaos.kinds import Kind, Target, load
from pccl.cli.chaos.stage import Copy
from pccl.cli.chaos.watch import Metrics, Watch
from pccl.runtime.signals import ended_by, interrupt

HERE = Path(__file__).resolve().parent
SETTLE_S = 3.0  # a worker knows in less that its link was reset
MORE = {  # faults that workers inflict on themselves
    what: Kind(what, Target.COPY, 1, fatal=what == mischief.RESET_LINK) for what in mischief.KINDS
}


class States:
    """The shared state after each step, computed by one process."""

    def __init__(self, elements: int) -> None:
        self._weights = np.zeros(elements, np.float32)
        self._digests: list[str] = []

    def digest(self, revision: int) -> str:
        """The digest of the state of a revision."""
        while len(self._digests) <= revision:
            self._digests.append(diary.digest_of(self._weights))
            self._weights += worker.gradient_of(len(self._digests) - 1, self._weights.size)
        return self._digests[revision]


class Workers(Program):
    """The workers of a run; each group has its own program."""

    steered = True
    faults = MORE

    def __init__(self, args: argparse.Namespace, names: Sequence[str], rules: checker.Rules):
        words = ["--peers", str(args.peers), "--programs", args.programs]
        words += ["--elements", str(args.elements), *["--tcp"] * args.tcp]
        title = f"python -m stress: {args.programs}, {args.peers} workers"
        super().__init__(title, args.peers, (["python", "-m", "stress", *words], []), [])
        self.settings = {"programs": args.programs, "elements": str(args.elements)}
        self.environment = {"PCCL_TRANSPORT": "tcp"} if args.tcp else {}
        self.curve_dir = args.curve_dir or ""
        if args.curve_dir:
            self.environment["PCCL_CURVE_DIR"] = args.curve_dir
        self._names, self._elements, self._rules = names, args.elements, rules
        self._decoder: msgspec.json.Decoder[diary.Entry] = msgspec.json.Decoder(diary.Entry)

    def begin(self, directory: Path) -> None:
        self._directory = directory
        self._groups: dict[int, int] = {}
        self._read: dict[int, int] = {}  # bytes of each diary

    def command(self, number: int, alive: Sequence[Copy]) -> list[str]:
        """The new worker joins the smallest group."""
        sizes = Counter(self._groups[copy.number] for copy in alive)
        group = min(range(len(self._names)), key=lambda one: (sizes[one], one))
        self._groups[number] = group
        options = {
            "--program": self._names[group],
            "--number": number,
            "--group": group,
            "--elements": self._elements,
            "--diary": self._directory,
        }
        words = [str(word) for option in options.items() for word in option]
        optimize = ["--optimize"] * all(name in worker.KNOWN for name in self._names)
        return [sys.executable, str(HERE / "worker.py"), *words, *optimize]

    def group(self, copy: Copy) -> int:
        return self._groups[copy.number]

    def leave(self, copy: Copy) -> None:
        """Lets a worker end its step and leave."""
        copy.process.say("leave")

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Notes that a worker that synchronized some time after its last fault holds the state."""
        for copy in copies:
            for entry in self._entries(copy.number):
                if isinstance(entry, diary.Joined | diary.Out):
                    copy.settled = False
                elif isinstance(entry, diary.End) and entry.what == "sync":
                    late_s = max((at_s for at_s, _ in copy.befell), default=-SETTLE_S) + SETTLE_S
                    copy.settled |= entry.outcome == "done" and entry.at_s > late_s

    def _entries(self, number: int) -> list[diary.Entry]:
        path = diary.path_of(self._directory, number)
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(number, 0))
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read[number] = self._read.get(number, 0) + len(whole) + bool(whole)
        return [self._decoder.decode(line) for line in whole.split(b"\n") if line]

    def judge(self, directory: Path, director: Director) -> tuple[list[str], Metrics]:
        """Adds the faults to the diaries, and runs the checker on all of them."""
        faults = [
            diary.Fault(at_s, what, copy.number)
            for copy in director.stage.copies
            for at_s, what in copy.befell
        ]
        for done in director.chronicle.done:
            if done.copy < 0 and not done.skipped:
                faults.append(diary.Fault(done.at_s, done.fault.what))
        written = diary.Diary(directory / diary.DIRECTOR)
        for fault in sorted(faults, key=lambda one: one.at_s):
            written.write(fault)
        written.close()
        report = checker.check(directory, self._rules)
        return report.violations, report.metrics


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__.splitlines()[0])
    option(parser, "--peers N", "the most workers that run at once", 4, whole_number(2, 200))
    text = f"one for each group, of {', '.join(worker.PROGRAMS)}"
    option(parser, "--programs NAME,...", text, "loop")
    option(parser, "--elements N", "size of the state, in float32 elements", 50_000, int)
    add_options(parser, "worker")
    option(parser, "--goodput SHARE", "the least share of undisturbed speed", 0.0, float)
    option(parser, "--tcp", "no ipc between the workers")
    option(parser, "--curve-dir DIR", "keys made by pccl keys (default: no encryption)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.replay is not None and (path := Path(f"chaos-{args.replay}.json")).exists():
        settings = load(path).settings
        args.programs, args.elements = settings["programs"], int(settings["elements"])
    names = args.programs.split(",")
    if unknown := set(names) - worker.PROGRAMS.keys():
        parser().error(f"there is no program {', '.join(sorted(unknown))}")
    states = States(args.elements)

    def expected(group: int, revision: int) -> str | None:
        return states.digest(revision) if names[group] in worker.KNOWN else None

    # without TCP, libzmq aborts a process whose descriptors are exhausted when a neighbor connects
    aborts = frozenset() if args.tcp or args.network else frozenset({kinds.NO_FILES})
    rules = checker.Rules(expected, args.bound, args.goodput, aborts)
    try:
        return Harness(args, Workers(args, names, rules)).run()
    except OSError as error:
        print(f"python -m stress: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    os.environ.setdefault("PCCL_LOG_LEVEL", "WARN")
    with ended_by(interrupt):
        sys.exit(main())
