"""Runs the C tests of c/test, plain and under sanitizers, in a directory of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

C = Path(__file__).resolve().parents[2] / "c"

needs_tools = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("cc")), reason="needs make and a C compiler (cc)"
)


def make(target: str, build: Path) -> str:
    """The output of `make target`, which must succeed."""
    done = subprocess.run(
        ["make", "-s", "-C", str(C), target, f"BUILD={build}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C"},
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_tools
@pytest.mark.slow  # .ci/run runs them in any case
@pytest.mark.parametrize("target", ["asan", "test"])
def test_c_tests(target: str, tmp_path: Path) -> None:
    output = make(target, tmp_path)
    programs = {path.stem.removeprefix("test_") for path in (C / "test").glob("test_*.c")}
    assert {line.partition(":")[0] for line in output.splitlines()} >= programs, output
