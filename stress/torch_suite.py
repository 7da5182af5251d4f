"""Runs torch's own tests of a backend of torch.distributed with pccl, beside gloo.

    python stress/torch_suite.py [--backends gloo pccl] [--only SUBSTRING ...] [--part I/N]
    python stress/torch_suite.py --table FILE.json ...

torch ships them: torch.testing._internal.distributed.distributed_test. Each test runs in processes
that are forked for it. Results go to a file of JSON for each backend, and a table of all to stdout.
The exit code is 1 if a test that gloo passes fails with pccl, and is not one of KNOWN.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType

WORLD_SIZE = 4
TEST_S = 90  # the longest that one test may take

# tests that pass with gloo and not with pccl, and why
KNOWN: dict[str, str] = {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["gloo", "pccl"])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of tests")
    parser.add_argument("--part", default="1/1", help="the I-th of N parts of the tests")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--table", type=Path, nargs="+", help="only show these results")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in a process of its own: one backend
    return parser.parse_args()


class Alike(str):
    """The name of the backend, where torch's tests ask whether it is gloo."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other in {"gloo", self.__str__()}

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def tests_of_torch() -> ModuleType:
    """The module of torch's tests, which skips nothing because a backend is not gloo."""
    name = "torch.testing._internal.distributed.distributed_test"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    line = 'BACKEND = os.environ["BACKEND"]\n'
    assert line in source
    module = importlib.util.module_from_spec(spec)
    module.__dict__["Alike"] = Alike
    changed = source.replace(line, 'BACKEND = Alike(os.environ["BACKEND"])\n')
    sys.modules[name] = module  # where pickle looks
    exec(compile(changed, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def suite(backend: str, only: list[str], part: str) -> unittest.TestSuite:
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1")
    import torch
    from torch.testing._internal import common_distributed as common

    import pccl.torch  # noqa: F401 - registers the backend

    common.DistTestCases.backend_feature["plugin"].add("pccl")
    common.TIMEOUT_DEFAULT = TEST_S
    common.TIMEOUT_OVERRIDE.clear()
    common.skip_if_small_worldsize = lambda test: test  # their groups are of the ranks 1 and 2
    theirs = tests_of_torch()

    class TestBackend(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    globals()["TestBackend"] = TestBackend
    names = unittest.defaultTestLoader.getTestCaseNames(TestBackend)
    names = [name for name in names if any(each in name for each in only)]
    index, count = map(int, part.split("/"))
    return unittest.TestSuite(TestBackend(name) for name in names[index - 1 :: count])


class Results(unittest.TestResult):
    """The outcome of each test, written down at once."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.found: dict[str, tuple[str, str, float]] = {}
        if file.exists():
            self.found = json.loads(file.read_text())

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began_s = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test._testMethodName
        seconds = round(time.monotonic() - self._began_s, 1)
        self.found[name] = (outcome, why, seconds)
        self._file.write_text(json.dumps(self.found, indent=1))
        print(f"{outcome:7} {seconds:6.1f} s {name} {why.strip()[-200:]!r}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: object) -> None:
        self._note(test, "failed", str(error[1]))  # type: ignore[index]

    addError = addFailure


def compare(files: list[Path]) -> int:
    """Prints the table; the number of unexplained failures."""
    by_backend = {file.stem.removeprefix("torch_"): json.loads(file.read_text()) for file in files}
    print("| backend | passed | skipped | failed |\n| --- | --- | --- | --- |")
    for backend, found in by_backend.items():
        counts = Counter(outcome for outcome, _, _ in found.values())
        print(f"| {backend} | {counts['passed']} | {counts['skipped']} | {counts['failed']} |")
    gloo, ours = by_backend.get("gloo", {}), by_backend.get("pccl", {})
    unexplained = 0
    for name in sorted(gloo.keys() & ours.keys()):
        before, now = gloo[name][0], ours[name][0]
        if before != now:
            reason = KNOWN.get(name, ours[name][1].strip()[-300:])
            print(f"{name}: {before} with gloo, {now} with pccl: {reason!r}")
            unexplained += before == "passed" and now == "failed" and name not in KNOWN
    return unexplained


def main() -> int:
    args = arguments()
    if args.table:
        return min(1, compare(args.table))
    if args.run:
        results = Results(args.out / f"torch_{args.run}.json")
        suite(args.run, args.only, args.part).run(results)
        return 0
    for backend in args.backends:  # torch reads the name of the backend when it is imported
        words = ["--run", backend, "--part", args.part, "--out", str(args.out)]
        words += ["--only", *args.only]
        subprocess.run([sys.executable, __file__, *words], check=True)
    files = [args.out / f"torch_{backend}.json" for backend in args.backends]
    return min(1, compare(files))


if __name__ == "__main__":
    sys.exit(main())
