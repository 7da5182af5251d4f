"""`pccl run`: copies of a program, which are restarted, told to end, and reported on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pccl.cli import main as cli
from pccl.cli import run

PYTHON = [sys.executable, "-S", "-c"]


def copies(
    capfd: pytest.CaptureFixture[str], *options: str, program: list[str]
) -> tuple[int, str, str]:
    """The exit status, and what is printed."""
    status = cli.main(["run", *options, "--", *program])
    return status, *capfd.readouterr()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSE_S", 0.05)
    monkeypatch.delenv("PCCL_MASTER", raising=False)


def test_each_copy_knows_its_number_and_the_master(capfd: pytest.CaptureFixture[str]) -> None:
    say = "import os; e = os.environ; print(e['LOCAL_RANK'], e['LOCAL_WORLD_SIZE'], "
    program = [*PYTHON, say + "e['PCCL_MASTER']); os.write(2, b'no line feed')"]
    status, out, err = copies(capfd, "-n", "2", "--master", "h", program=program)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0 2 h:48148", "[1] 1 2 h:48148"]
    assert sorted(err.splitlines()) == ["[0] no line feed", "[1] no line feed"]


PEER = """
import os, pathlib, signal, sys
import numpy as np
import pccl
first = pathlib.Path(sys.argv[1])
with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
    comm.wait_for_peers(2, timeout=30)
    if os.environ["LOCAL_RANK"] == "1" and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    x = np.ones(4)
    while True:
        try:
            comm.all_reduce(x, op="sum", timeout=30)
            break
        except (pccl.PeerLostError, pccl.TooFewPeersError):
            comm.wait_for_peers(2, timeout=30)
    print("sum", x[0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_copy_that_dies_joins_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", PEER, str(tmp_path / "first")]
    status, out, err = copies(capfd, "-n", "2", program=program)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] sum 2.0", "[1] sum 2.0"]
    assert "[1] pccl run: ended with signal 15; it is started again in 0 s" in err


ORPHANED = """
import os, signal, sys
if not os.fork():
    signal.pause()
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_what_a_copy_leaves_behind_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    status, _, err = copies(capfd, "--restarts", "1", program=[*PYTHON, ORPHANED])
    assert status == 3
    assert "ended with status 3; it is not started again" in err


def test_a_copy_that_keeps_failing_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    program = [*PYTHON, "import os, sys; print('!'); sys.exit(3 * int(os.environ['LOCAL_RANK']))"]
    status, out, err = copies(capfd, "-n", "2", "--restarts", "2", program=program)
    assert status == 3
    assert sorted(out.splitlines()) == ["[0] !", *["[1] !"] * 3]
    assert "[1] pccl run: ended with status 3; it is not started again" in err


def test_a_program_that_is_not_there_is_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = copies(capfd, program=["/nonexistent/program"])
    assert status == 127 and out == ""
    assert "/nonexistent/program cannot be started: No such file or directory" in err
    assert "again in" not in err


def test_without_a_program_it_says_what_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    assert copies(capfd, "-n", "2", program=[]) == (
        2,
        "",
        "pccl run: which program? pccl run [options] -- COMMAND ...\n",
    )


STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
OBEDIENT = "import os, signal; os.write(1, b'ready\\n'); signal.pause()"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("program", [STUBBORN, OBEDIENT], ids=["stubborn", "obedient"])
def test_a_signal_is_passed_on_and_a_second_one_kills(program: str) -> None:
    command = [sys.executable, "-m", "pccl.cli.main", "run", "--", *PYTHON, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "[0] ready\n"
        launcher.send_signal(signal.SIGTERM)
        if program is STUBBORN:
            assert launcher.stdout.readline() == "[0] asked\n"
            launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20) == 128 + signal.SIGTERM
