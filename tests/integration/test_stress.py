"""`python -m stress`: a run under faults holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stress(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stress", "--plain", "--elements", "20000", *options]
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
@pytest.mark.parametrize(
    "options",
    [
        "--peers 3 --seed 1",
        "--peers 3 --seed 2 --tcp",
        "--peers 4 --seed 3 --programs overlap",
        "--peers 4 --seed 4 --programs loop,overlap",
        "--peers 4 --seed 5 --programs diloco-sync,diloco-streaming",
        "--peers 4 --seed 6 --programs diloco-delayed",
        "--peers 3 --seed 7 --programs ddp",
    ],
)
def test_a_run_under_faults_holds(options: str, tmp_path: Path) -> None:
    ended = stress(tmp_path, "--minutes", "0.5", "--calm", "0.5", *options.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "everything held (seed " in ended.stdout
