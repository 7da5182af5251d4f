"""Runs random scenarios of the protocol, replays one with a trace, or shrinks a failing one.

    python stress/simulate.py --seeds 0:100000      # until one fails: its number is printed
    python stress/simulate.py --replay 4711         # the same run again, message by message
    python stress/simulate.py --shrink 4711         # the smallest scenario found that still fails

A scenario (tests/support/simulation/programs.py) is what all peers call, and what befalls them; a
seed always gives the same one. The exit code is 1 when a run fails.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from simulation import programs

PROGRESS_S = 5.0


def seeds(text: str) -> range:
    """A:B as a range of seeds."""
    begin, _, end = text.partition(":")
    return range(int(begin), int(end))


def search(numbers: range) -> int:
    """Runs scenarios until one fails."""
    told = begin = time.monotonic()
    for number in numbers:
        why = programs.failure(programs.draw(number))
        if why:
            print(f"seed {number}: {why}")
            return 1
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            done = number - numbers.start + 1
            print(
                f"{done} of {len(numbers)} runs, {done / (told - begin):.0f} a second", flush=True
            )
    print(f"{len(numbers)} runs in {time.monotonic() - begin:.1f} s: nothing found")
    return 0


def replay(scenario: programs.Scenario) -> int:
    """Runs one scenario and prints all its events."""
    print(programs.describe(scenario), end="\n\n")
    trace: list[str] = []
    try:
        programs.play(scenario, trace)
    except Exception as error:
        trace.append(f"{type(error).__name__}: {error}")
        return 1
    finally:
        print("\n".join(trace))
    return 0


def shrink(number: int, tries: int) -> int:
    """Shrinks the scenario of a seed, and prints the rest."""

    def told(scenario: programs.Scenario) -> None:
        calls = sum(len(calls) for script in scenario.peers for calls in script.threads)
        print(
            f"{len(scenario.peers)} peers, {calls} calls, {len(scenario.events)} events still fail",
            flush=True,
        )

    scenario = programs.draw(number)
    if not programs.failure(scenario):
        print(f"seed {number} does not fail")
        return 0
    return replay(programs.shrink(scenario, tries, told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=seeds, metavar="A:B", help="play the seeds from A to B - 1")
    what.add_argument("--replay", type=int, metavar="SEED", help="print all that happens")
    what.add_argument("--shrink", type=int, metavar="SEED", help="take away what is not needed")
    parser.add_argument("--tries", type=int, default=30, help="schedules for each smaller scenario")
    args = parser.parse_args()
    logging.getLogger("pccl").addHandler(logging.NullHandler())  # the trace has it, too
    if args.seeds is not None:
        return search(args.seeds)
    if args.replay is not None:
        return replay(programs.draw(args.replay))
    return shrink(args.shrink, args.tries)


if __name__ == "__main__":
    sys.exit(main())
