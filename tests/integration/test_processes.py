"""Processes of commands: they and their groups end, are heard, and get no signal too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S, wait_until

from pccl.cli.processes import Fleet, Output, Process, held, tail

PYTHON = [sys.executable, "-S", "-c"]
FORKS = "import os, signal, sys\nif not os.fork(): os.write(1, b'child\\n'); signal.pause()\n"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("how", ["poll", "wait", "timed wait"])
def test_a_group_ends_with_its_leader_and_gets_no_signal_afterwards(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = FORKS + "sys.stdin.readline(); sys.exit(3)"
    process = Process([*PYTHON, program], os.environ, stdin=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"child\n"
    assert process.poll() is None
    process.say("go")
    if how == "poll":
        wait_until(lambda: process.poll() is not None)
    else:
        process.wait(None if how == "wait" else 30.0)
    assert process.status == 3
    with process.stdout as pipe:
        assert pipe.read() == b"", "the child has ended, too, which held the pipe"
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append(number))
    process.signal(signal.SIGTERM)
    process.close()
    assert not signalled and process.poll() == 3


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_process_that_is_closed_was_killed() -> None:
    with Process([*PYTHON, "import signal; signal.pause()"], os.environ) as process:
        assert process.wait(0.0) is None
    assert process.status == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_left_the_group_is_found() -> None:
    program = FORKS.replace("signal.pause()", "os.setsid(); signal.pause()") + "signal.pause()"
    process = Process([*PYTHON, program], os.environ, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"child\n"
    process.close()
    process.kill_strays()
    with process.stdout as pipe:
        assert pipe.read() == b""
    assert held(process.pid) is None and held(os.getpid()) is not None


def test_output_comes_in_lines_and_a_long_one_in_parts() -> None:
    reading, writing = os.pipe()
    heard: list[bytes] = []
    output = Output(open(reading, "rb", 0), heard.extend)
    with open(writing, "wb") as pipe:
        pipe.write(b"one\ntwo\rthree" + b"x" * 200_000)
    output.join(PATIENCE_S)
    assert heard[:2] == [b"one\n", b"two\r"]
    assert len(heard) > 3 and b"".join(heard[2:]) == b"three" + b"x" * 200_000


SPEAKS = """
import sys
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
    if line == "end\\n":
        print("woe", file=sys.stderr)
        sys.exit(4)
"""


def test_a_fleet_reads_and_writes_lines(tmp_path: Path) -> None:
    (tmp_path / "speaks_of_a_fleet.py").write_text(SPEAKS, encoding="utf-8")
    with Fleet("speaks_of_a_fleet", str(tmp_path)) as fleet:
        for number in range(3):
            fleet.start(number)
        fleet.say(1, "this")
        assert fleet.heard.get(timeout=PATIENCE_S) == (1, "heard this\n")
        fleet.say(0, "end")
        assert fleet.heard.get(timeout=PATIENCE_S) == (0, "heard end\n")
        assert fleet.heard.get(timeout=PATIENCE_S) == (0, 4)
        assert fleet.errors(0) == "woe"
        fleet.say(0, "nobody hears this")
        fleet.kill(2)
        number, status = fleet.heard.get(timeout=PATIENCE_S)
        assert number == 2 and status != 0


def test_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(9999)))
    assert tail(path, 2) == "line 9997\nline 9998"
