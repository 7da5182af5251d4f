"""The suite ends even if its tests hang or leave something behind, and reports which did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]

LEAVING = """
import pccl
from peers.cluster import Cluster

def test_fails():
    Cluster(1)
    raise AssertionError("on purpose")

def test_leaves():
    pccl.MasterNode("127.0.0.1:0").run()

def test_is_well():
    with pccl.MasterNode("127.0.0.1:0"):
        pass
"""

HANGING = """
import threading
import conftest, pytest
from pccl.runtime.signals import aside

conftest.GRACE_S = 0.2

@pytest.mark.timeout(0.2)
def test_hangs():
    aside(threading.Event().wait)
"""

HANGING_LATER = """
import threading
import conftest, pytest
from pccl.runtime.signals import aside

conftest.GRACE_S = 0.2

@pytest.fixture
def hangs_at_its_end():
    yield
    aside(threading.Event().wait)

@pytest.mark.timeout(0.2)
def test_fails_in_time(hangs_at_its_end):
    threading.Event().wait()
"""


def suite(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The outcomes of these tests."""
    path = directory / "test_made.py"
    path.write_text(program)
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-o", "addopts=", "-rA"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={directory}", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'support'}"},
        cwd=directory,
    )


def test_it_ends_when_tests_leave_masters_running(tmp_path: Path) -> None:
    ended = suite(LEAVING, tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 2 passed, 1 error" in ended.stdout, ended.stdout
    assert "FAILED test_made.py::test_fails - AssertionError: on purpose" in ended.stdout
    assert "ERROR test_made.py::test_leaves - AssertionError: it leaves a master" in ended.stdout


@pytest.mark.parametrize("program", [HANGING, pytest.param(HANGING_LATER, marks=pytest.mark.slow)])
def test_it_ends_when_a_test_hangs_where_no_exception_gets_in(program: str, tmp_path: Path) -> None:
    ended = suite(program, tmp_path)
    assert ended.returncode == 1
    assert "Timeout (0:00:00.4" in ended.stderr, ended.stderr
    assert "in aside" in ended.stderr
