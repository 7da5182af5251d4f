"""Measures the loss that training with little communication costs, and the bytes that it saves.

A byte-level GPT learns the source code of Python's standard library: 20 bytes for each of its
parameters, in 160 rounds of 30 steps; a long run has twice as many of both. It does so with the
gradients of all peers averaged in each step, and in the ways of DiLoCo. All runs of a size and a
seed have the same initial weights, and the same samples in each step: with M peers, each takes one
M-th.

A sweep at the smallest size chooses the learning rates of each arm, with as many runs for each.
Every run adds a line to the file of results, and what is there is not made again.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from experiment import tables
from experiment.runs import (
    ARMS,
    BASELINE,
    SIZES,
    SWEEP_SEED,
    Arm,
    Results,
    Run,
    Size,
    arms_of,
)
from pccl.cli.arguments import whole_number
from pccl.cli.processes import follow_parent

_FOLDER = Path(__file__).parent
_REQUIRED = ("torch", "matplotlib")
_COMMANDS = {
    "sweep": "the table of the sweep, which chooses the learning rates",
    "sizes": "the figure of the gap against the number of parameters",
    "arms": "the table of all arms, and the figure of the gap against the bytes saved",
}
_BY_SIZE = (BASELINE, "sync-1", "sync-2", "sync-4", "sync-8", "sync-4-int4")
SMALLEST = next(iter(SIZES.values()))


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("examples/experiment", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"{name}: {text}" for name, text in _COMMANDS.items()]
    parser.add_argument("what", choices=_COMMANDS, help="; ".join(lines))
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=[*SIZES], metavar="N",
        help="of the model, in parameters (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=None, metavar="ARM",
        help=f"only these, of {', '.join(ARMS)}",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=whole_number(1), default=3, metavar="N", help="of each arm (default: 3)"
    )
    parser.add_argument(
        "--jobs", type=whole_number(1), default=os.cpu_count(), metavar="N",
        help="runs at a time, each of which keeps about one processor busy (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--draw", action="store_true", help="make no runs: use the results so far")
    parser.add_argument(
        "--results", type=Path, default=_FOLDER / "results.jsonl", metavar="FILE",
        help="(default: results.jsonl beside this script)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="for figures (default: here)"
    )
    return parser


def main(words: list[str] | None = None) -> int:
    """Makes the runs that have no result yet, then the table and the figure.

    Returns:
        The exit status: 0 if every run has a result; 1 if one failed; 2 if none could start.
    """
    options = parser().parse_args(words)
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"experiment: {' and '.join(missing)} not found: in the clone of pccl, "
            """pip install -e ".[experiment]" brings what is needed""",
            file=sys.stderr,
        )
        return 2
    results = Results(options.results)
    names = options.arms or (_BY_SIZE if options.what == "sizes" else ARMS)
    arms = [ARMS[name] for name in dict.fromkeys([BASELINE, *names])]
    sizes = [] if options.what == "sweep" else [SIZES[name] for name in options.sizes]
    if not options.draw:
        try:
            _make(results, _sweep(arms), options.jobs)
            _make(results, _runs(results, arms, sizes, options.seeds), options.jobs)
        except Failed as error:
            print(f"experiment: {error}", file=sys.stderr)
            return 1
    _show(options, results, arms, sizes)
    return 0


def _sweep(arms: Sequence[Arm]) -> list[Run]:
    sources = dict.fromkeys(arm.like or arm.name for arm in arms)
    return [
        Run(SMALLEST, ARMS[name], rates, SWEEP_SEED)
        for name in sources
        for rates in ARMS[name].grid
    ]


def _runs(results: Results, arms: Sequence[Arm], sizes: Sequence[Size], seeds: int) -> list[Run]:
    """All arms with the rates that the sweep has chosen."""
    return [
        Run(size, arm, rates, seed)
        for size in sizes
        for seed in range(1, seeds + 1)
        for arm in arms_of(size, arms)
        if (rates := results.rates(arm, SMALLEST)) is not None
    ]


def _show(
    options: argparse.Namespace, results: Results, arms: Sequence[Arm], sizes: Sequence[Size]
) -> None:
    if options.what == "sweep":
        print(tables.sweep(results, arms, SMALLEST))
        return
    places = [(size, arm) for size in sizes for arm in arms_of(size, arms)]
    found = [tables.row_of(results, arm, size, SMALLEST, options.seeds) for size, arm in places]
    rows = [row for row in found if row is not None]
    print(tables.arms(rows, [place for place, row in zip(places, found, strict=True) if not row]))
    from experiment import figures

    options.output.mkdir(parents=True, exist_ok=True)
    rows = [row for row in rows if row.arm.name != BASELINE]
    if options.what == "sizes":
        rows = [row for row in rows if not row.size.is_long]
        figures.sizes(rows, options.output / "experiment-sizes.svg")
    else:
        print(tables.bars(rows))
        if any(row.saving for row in rows):  # a single peer sends nothing
            figures.savings(rows, options.output / "experiment-bytes.svg")


# ---- the runs ----


class Failed(Exception):
    """A run has ended without a result."""


def _make(results: Results, wanted: Sequence[Run], jobs: int) -> None:
    """Makes the runs that have no result, each in a process, several at a time."""
    left = [run for run in wanted if results.get(run) is None]
    waiting, running = left[::-1], dict[Connection, tuple[BaseProcess, Run]]()
    began_s, made, done, work = time.monotonic(), 0, 0.0, sum(map(_work, left))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                process, connection = _start(waiting[-1])
                running[connection] = process, waiting.pop()
            for connection in wait(running):
                process, run = running.pop(connection)
                try:
                    result = connection.recv()
                except EOFError:
                    raise Failed(f"{run.label} has failed: see above") from None
                results.add(result)
                made, done = made + 1, done + _work(run)
                left_s = (time.monotonic() - began_s) * (work / done - 1)
                print(
                    f"[{made}/{len(left)}] {run.label}: {result.loss:.4f} nats per byte, "
                    f"{result.seconds:.0f} s; {left_s / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for process, _ in running.values():
            process.kill()


def _start(run: Run) -> tuple[BaseProcess, Connection]:
    # processes that are forked from one that has loaded torch start at once
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    multiprocessing.set_forkserver_preload(["pccl.diloco"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(run, sender))
    process.start()
    sender.close()
    return process, receiver


def _train(run: Run, sender: Connection) -> None:
    follow_parent()
    from experiment import churn, training

    sender.send(churn.train(run) if run.arm.kill_every else training.train(run))


def _work(run: Run) -> float:
    """An estimate of its time, in units of no matter: what grows with the model, and what not."""
    grows = run.size.parameters * run.size.tokens / 1e10
    return grows + 5 + run.arm.peers * (10 if run.arm.kill_every else 1)
