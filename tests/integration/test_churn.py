"""The harness of random kills, freezes, restarts, resets and forks finds nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHURN = Path(__file__).resolve().parents[2] / "stress" / "churn.py"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mischief", [[], ["--mischief"], ["--mischief", "--tcp"]], ids=" ".join)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_survives_churn(seed: int, mischief: list[str]) -> None:
    command = [sys.executable, str(CHURN), "--seconds", "30", "--seed", str(seed), *mischief]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "steps; longest stand-still" in ended.stdout
