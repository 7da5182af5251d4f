"""Breaks a run in every way that it knows, and has an independent checker judge what came of it.

    python -m stress --minutes 10 --peers 8 --seed 7

A master and peers train (churn.py) while peers and master are killed, frozen, restarted and
replaced, connections are reset, and programs fork (mischief.py), all drawn by one seed. All write
down what they do. Afterwards checker.py reads that and knows nothing else, and `pccl replay` has
another master do what the master's event log says. The exit code is 0 only if everything held.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for all scripts of this directory

import checker
import churn
import diary
import numpy as np

from pccl.cli.main import main as pccl_main
from pccl.runtime.signals import ended_by, interrupt


class States:
    """The shared state after each step, as one process computes it.

    Args:
        elements: of the state.
    """

    def __init__(self, elements: int) -> None:
        self._weights = np.zeros(elements, np.float32)
        self._digests: list[str] = []

    def digest(self, revision: int) -> str:
        """The digest of the state of a revision."""
        while len(self._digests) <= revision:
            self._digests.append(diary.digest_of(self._weights))
            self._weights += churn.gradient_of(len(self._digests) - 1, self._weights.size)
        return self._digests[revision]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--peers", type=int, default=4, help="at most so many at once")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--elements", type=int, default=50_000, help="float32 of the state")
    parser.add_argument("--calm", type=float, default=0.5, help="seconds between faults, at most")
    parser.add_argument("--bound", type=float, default=40.0, help="seconds for any call")
    parser.add_argument("--goodput", type=float, default=0.0, help="the least that is enough")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the diaries there")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if args.keep is None else args.keep
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            parser.error(f"{directory} is not empty")
        return judge(args, directory)


def judge(args: argparse.Namespace, directory: Path) -> int:
    """Makes the run and judges it; the exit code."""
    options = {
        "--seconds": args.minutes * 60,
        "--peers": args.peers,
        "--seed": args.seed,
        "--elements": args.elements,
        "--calm": args.calm,
        "--patience": args.bound,
        "--diary": directory,
    }
    words = [str(word) for option in options.items() for word in option]
    faults = churn.run(churn.parser().parse_args([*words, "--mischief"]))
    rules = checker.Rules(States(args.elements).digest, args.bound, args.goodput)
    report = checker.check(directory, rules)
    print("\n".join([*(f"FAULT: {fault}" for fault in faults), *checker.words(report)]))
    replayed = pccl_main(["replay", str(directory / churn.EVENT_LOG), "--check"])
    held = not (faults or report.violations or replayed)
    print("everything held" if held else f"something did not hold (seed {args.seed})")
    return 0 if held else 1


if __name__ == "__main__":
    with ended_by(interrupt):
        sys.exit(main())
