"""Breaks one rule at a time, and demands that simulated runs or tests of single rules fail.

    python stress/mutants.py [--seeds 1000] [--only WORD]

Each mutant is a copy of the package with one line changed. The exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import mutations_of_associates
import mutations_of_deadlines
import mutations_of_early_data
import mutations_of_meetings
import mutations_of_pairs
import mutations_of_runs
from mutations import MUTANTS as MUTANTS_OF_CALLS
from mutations import Mutant
from verdicts import MISSED, report

MUTANTS = [
    *MUTANTS_OF_CALLS,
    *mutations_of_pairs.MUTANTS,
    *mutations_of_runs.MUTANTS,
    *mutations_of_deadlines.MUTANTS,
    *mutations_of_associates.MUTANTS,
    *mutations_of_early_data.MUTANTS,
    *mutations_of_meetings.MUTANTS,
]
ROOT = Path(__file__).resolve().parents[1]
FIRST_FAILURE = """
import random
import sys
import hostile
import programs
import test_associates
import test_blame
import test_deadlines
import test_early
import test_epochs
import test_failures
import test_ghosts
import test_hostile
import test_hosts
import test_master_rules
import test_meetings
import test_odd
import test_pairs
import test_recovery
import test_reenact
import test_rows
import test_small
import test_status
import test_survey
import test_sync_rules
import test_tally
import test_teams
import trainers
modules = (
    test_master_rules, test_sync_rules, test_blame, test_ghosts, test_recovery, test_hostile,
    test_status, test_epochs, test_rows, test_pairs,
    test_reenact, test_teams, test_deadlines, test_tally, test_survey,
    test_associates, test_odd, test_meetings, test_hosts, test_failures, test_early, test_small,
)
for name, test in [each for module in modules for each in vars(module).items()]:
    code = getattr(test, "__code__", None)
    rule = code is not None and not code.co_argcount and not hasattr(test, "hypothesis")
    if name.startswith("test_") and rule:
        try:
            test()
        except BaseException as error:
            print(f"{name}: {type(error).__name__}"[:90])
            sys.exit()
for seed in range(int(sys.argv[1])):
    try:
        programs.play(programs.draw(seed))
        trainers.simulate(seed)
        trainers.story_of_an_odd_one(seed)
        trainers.story_of_newcomers_alone(seed)
        test_associates.story(seed)
        test_early.story(seed)
        hostile.siege(hostile.draw_script(random.Random(seed)), seed)
    except BaseException as error:
        print(f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0][:90])
        break
else:
    print("MISSED")
"""


def sources(package: Path) -> dict[Path, str]:
    """The text of each file of the protocol."""
    files = package.glob("protocol/**/*.py")
    return {path: path.read_text(encoding="utf-8") for path in files}


def occurrences(mutant: Mutant, texts: dict[Path, str]) -> int:
    """How often what the mutant replaces stands there: it must be once."""
    return sum(text.count(mutant.old) for text in texts.values())


def verdict(mutant: Mutant, seeds: int) -> str:
    """What the simulation says of a mutant; it begins with MISSED if nothing fails."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory, "pccl")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pccl", package, ignore=ignore)
        texts = sources(package)
        if occurrences(mutant, texts) != 1:
            return f"{MISSED}: {mutant.old!r} does not stand in the protocol just once"
        for path, text in texts.items():
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        tests = [str(ROOT / "tests" / each) for each in ("support", "simulation")]
        search = os.pathsep.join([directory, *tests])
        done = subprocess.run(
            [sys.executable, "-P", "-c", FIRST_FAILURE, str(seeds)],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return done.stdout.strip() or f"{MISSED}: the tests do not start: {done.stderr[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000, help="simulated runs for each mutant")
    parser.add_argument("--only", default="", help="only mutants whose rule contains this")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.rule]
    return report({mutant.rule: partial(verdict, mutant, args.seeds) for mutant in chosen})


if __name__ == "__main__":
    sys.exit(main())
