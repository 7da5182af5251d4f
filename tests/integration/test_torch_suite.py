"""A part of torch's own tests of a backend; `stress/torch_suite.py` has all."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[2] / "stress" / "torch_suite.py"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="torch's tests need expecttest"
)
def test_tests_that_pass_with_gloo_pass_with_pccl(tmp_path: Path) -> None:
    words = [sys.executable, str(SUITE), "--out", str(tmp_path), "--sizes", "4", "--only"]
    some = ["test_all_to_all_single_unequal", "test_send_recv_any_source", "test_gather_object"]
    ended = subprocess.run(
        [*words, *some], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"\| 4 \| ([1-9]\d*) \| \1 \|", ended.stdout), ended.stdout
