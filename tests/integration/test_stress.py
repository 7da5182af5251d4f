"""`python -m stress`: a run under faults holds, and a bug that is planted is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUGS = {  # file, what stands there, the bug, and what is said of it
    "a contribution is left out": (
        "runtime/inline.py",
        "enumerate(parts[1:], 2)",
        "enumerate(parts[1:-1], 2)",
        "own contribution is missing",
    ),
    "a contribution counts twice": (
        "runtime/inline.py",
        "enumerate(parts[1:], 2)",
        "enumerate([*parts[1:], parts[-1]], 2)",
        "count several times",
    ),
}


def stress(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stress", "--peers", "3", "--elements", "20000", *options]
    path = os.pathsep.join([str(directory), str(ROOT)])
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_under_faults_holds(seed: int, tmp_path: Path) -> None:
    ended = stress(tmp_path, "--minutes", "0.5", "--seed", str(seed))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("everything held\n")
    assert "inputs have the same effects again" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    name, old, new, said = BUGS[bug]
    shutil.copytree(ROOT / "pccl", tmp_path / "pccl")
    path = tmp_path / "pccl" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    ended = stress(tmp_path, "--minutes", "0.2")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert said in ended.stdout
