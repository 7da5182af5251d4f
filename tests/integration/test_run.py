"""`pccl run`: copies of a program, which are restarted, told to end, and reported on."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S, wait_until

from pccl.cli import main as cli
from pccl.cli import run
from pccl.cli.processes import Output

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
def test_children_of_a_copy_end_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    status, _, err = copies(capfd, "--restarts", "1", program=[*PYTHON, ORPHANED])
    assert status == 3
    assert "ended with status 3; it is not started again" in err


def test_a_copy_that_keeps_failing_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    program = [*PYTHON, "import os, sys; print('!'); sys.exit(3 + int(os.environ['LOCAL_RANK']))"]
    status, out, err = copies(capfd, "-n", "2", "--restarts", "2", program=program)
    assert status == 3
    assert sorted(out.splitlines()) == [*["[0] !"] * 3, *["[1] !"] * 3]
    assert "[1] pccl run: ended with status 4; it is not started again" in err


def test_a_program_that_is_not_there_is_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = copies(capfd, program=["/nonexistent/program"])
    assert status == 127 and out == ""
    assert "/nonexistent/program cannot be started: No such file or directory" in err
    assert "again in" not in err


def test_a_missing_program_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
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
        assert launcher.wait(PATIENCE_S) == 128 + signal.SIGTERM


# What a child can do, and how `pccl run` prints it or ends.


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs there")
def test_a_copy_that_fails_at_the_end_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others have finished: it would train alone."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    last = "import os, sys\nif os.environ['LOCAL_RANK'] == '1': "
    last += "open(sys.argv[1]).read(); print('!'); sys.exit(3)"
    group = run.Copies([*PYTHON, last, str(gate)], os.environ, 2, 3)
    group.start()
    wait_until(lambda: group.succeeded)
    gate.write_text("")
    assert group.wait() == 3
    out, err = capfd.readouterr()
    assert out == "[1] !\n"
    assert "ended with status 3; it is not started again, because another copy has ended" in err


TOO_LATE = """
import os, pathlib, sys, time
import pccl
started, again = (pathlib.Path(sys.argv[1], name) for name in ("started", "again"))
if os.environ["LOCAL_RANK"] == "0":
    while not again.exists():
        time.sleep(0.01)
    sys.exit()
if not started.exists():
    started.touch()
    sys.exit(3)
with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
    again.touch()
    comm.wait_for_peers(2)
"""


def test_a_copy_that_is_restarted_too_late_does_not_wait_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = [sys.executable, "-c", TOO_LATE, str(tmp_path)]
    status, _, err = copies(capfd, "-n", "2", program=program)
    assert status == 1
    assert "[1] pccl run: the run is over, so its master ends" in err
    assert "MasterLostError" in err


def test_copies_that_fail_alike_at_once_are_not_started_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PAUSE_S", 2.0)
    status, out, err = copies(capfd, "-n", "3", program=[*PYTHON, "print('!'); 1 / 0"])
    assert status == 1
    assert out.count("!") == 3 and err.count("ZeroDivisionError") == 3
    assert err.count("all copies have failed alike at once: it is not started again") == 3


def test_copies_that_are_killed_one_after_the_other_are_started_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kill does not mean that the program is wrong."""
    monkeypatch.setattr(run, "PAUSE_S", 0.1)
    once = (
        "import os, pathlib, signal, time\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / os.environ['LOCAL_RANK']\n"
        "if not mark.exists(): mark.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "mark.with_suffix('.again').touch()\n"
        "while len([*mark.parent.glob('*.again')]) < 3: time.sleep(0.01)\n"
    )
    status, _, err = copies(capfd, "-n", "3", program=[*PYTHON, once])
    assert status == 0, err
    assert err.count("ended with signal 9; it is started again") == 3


WRITES = {
    "no utf-8": r"b'\xff\xfe \xe9\n'",
    "what ascii has not": r"'\u2603 \xe9\n'.encode()",
    "progress": r"b'\r 44%\r 45%\r100%\n'",
    "windows": r"b'one\r\ntwo\r\n'",
    "empty lines": r"b'\n\n'",
    "zeros": r"bytes(3) + b'\n'",
}
PRINTED = {
    "no utf-8": b"[0] \xff\xfe \xe9\n",
    "what ascii has not": "[0] \u2603 \xe9\n".encode(),
    "progress": b"[0] \r[0]  44%\r[0]  45%\r[0] 100%\n",
    "windows": b"[0] one\r\n[0] two\r\n",
    "empty lines": b"[0] \n[0] \n",
    "zeros": b"[0] \0\0\0\n",
}


@pytest.mark.parametrize("what", WRITES)
def test_output_is_passed_on_as_bytes(what: str) -> None:
    program = f"import os; os.write(1, {WRITES[what]}); os.write(2, {WRITES[what]})"
    found = subprocess.run(
        [sys.executable, "-m", "pccl", "run", "--master", "h", "--", *PYTHON, program],
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (found.stdout, found.stderr) == (PRINTED[what], PRINTED[what])


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs there")
def test_an_unfinished_line_is_shown(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    asks = "import os, sys\nos.write(1, b'sure? '); os.write(1, open(sys.argv[1], 'rb').read())"
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "--", *PYTHON, asks, str(gate)],
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as began:
        assert began.stdout is not None
        found = b""
        while b"sure? " not in found:
            found += began.stdout.read(100) or pytest.fail("nothing was shown")
        gate.write_bytes(b"yes\n")
        found += b"".join(iter(lambda: began.stdout.read(100), b""))  # type: ignore[union-attr]
    assert found == b"[0] sure? yes\n"


def test_lines_of_others_do_not_tear_a_line() -> None:
    written, printer = io.TextIOWrapper(io.BytesIO()), run.Printer()
    reading, writing = os.pipe()
    output = Output(open(reading, "rb", 0), lambda lines: printer.print(0, lines, written))
    for part in (b"a", b"b"):
        os.write(writing, part)
        wait_until(lambda: not select.select([reading], [], [], 0)[0])  # it has been read
    printer.print(1, [b"whole\n"], written)
    os.write(writing, b"c\n")
    os.close(writing)
    output.join(PATIENCE_S)
    assert written.buffer.getvalue() == b"[1] whole\n[0] abc\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_line_without_end_takes_no_memory() -> None:
    program = "import os\nfor _ in range(120): os.write(1, bytes(1 << 20))"
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "--", *PYTHON, program], stdout=subprocess.PIPE
    ) as began:
        assert began.stdout is not None
        length, most = 0, 0
        while data := began.stdout.read(1 << 20):
            length += len(data)
            status = Path(f"/proc/{began.pid}/status").read_text(encoding="ascii")
            if "VmHWM" in status:
                most = max(most, int(status.split("VmHWM:")[1].split()[0]))
    assert began.returncode == 0 and length >= 120 << 20
    assert most < 150_000, "kB, of which half is pccl itself"


def test_copies_survive_a_closed_output(tmp_path: Path) -> None:
    """The copies go on to their end."""
    done = tmp_path / "done"
    program = "import os, pathlib, sys\nfor _ in range(99): os.write(1, b'x' * 9999 + b'\\n')\n"
    program += "pathlib.Path(sys.argv[1]).touch()"
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "--", *PYTHON, program, str(done)],
        stdout=subprocess.PIPE,
    ) as began:
        assert began.stdout is not None
        began.stdout.close()
        assert began.wait(PATIENCE_S) == 0
    assert done.exists()


# of a program that leaves a process in another session, which holds its output
LEAVES = """
import os, pathlib, signal, sys
reading, writing = os.pipe()
left = os.fork()
if not left:
    os.setsid()
    os.write(writing, b"!")
    signal.pause()
os.read(reading, 1)
pathlib.Path(sys.argv[1]).write_text(str(left))
print("leaves", flush=True)
{end}
"""
ENDS = {
    "it dies": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "it fails": ("sys.exit(3)", 3),
    "it succeeds": ("", 0),
    "it is told to end": ("signal.pause()", 143),
    "it is told twice": (
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'asked\\n'))\n"
        "os.write(1, b'ready\\n')\nwhile True: signal.pause()",
        143,
    ),
}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes are known by /proc")
@pytest.mark.parametrize("how", ENDS)
def test_a_process_in_another_session_that_holds_the_output(how: str, tmp_path: Path) -> None:
    end, wanted = ENDS[how]
    left = tmp_path / "left"
    program = [*PYTHON, LEAVES.replace("{end}", end), str(left)]
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "--restarts", "0", "--", *program],
        stdout=subprocess.PIPE,
    ) as began:
        assert began.stdout is not None and began.stdout.readline() == b"[0] leaves\n"
        if "twice" in how:
            assert began.stdout.readline() == b"[0] ready\n"
        if "told" in how:
            began.terminate()
        if "twice" in how:
            assert began.stdout.readline() == b"[0] asked\n"
            began.terminate()
        began.stdout.close()
        assert began.wait(8) == wanted
    pid = int(left.read_text(encoding="ascii"))
    if how == "it succeeds":
        assert not gone(pid), "what a program leaves on purpose stays"
        os.kill(pid, signal.SIGKILL)
    else:
        wait_until(lambda: gone(pid))


CATCHES = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])
print("ready", flush=True)
signal.sigwait([signal.{name}])
print("caught", flush=True)
"""


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and children would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGHUP", "SIGINT"])
def test_signals_reach_the_copies(name: str) -> None:
    number = getattr(signal, name)
    program = [*PYTHON, CATCHES.format(name=name)]
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "-n", "2", "--", *program], stdout=subprocess.PIPE
    ) as began:
        assert began.stdout is not None
        ready = {began.stdout.readline(), began.stdout.readline()}
        assert ready == {b"[0] ready\n", b"[1] ready\n"}
        began.send_signal(number)
        rest = sorted(began.stdout.read().splitlines())
    assert rest == [b"[0] caught", b"[1] caught"]
    assert began.returncode == (0 if "USR" in name else 128 + number)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid on this platform")
def test_a_number_that_may_be_another_groups_gets_no_signal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While a copy waits to be started again, its old group is gone."""
    monkeypatch.setattr(run, "PAUSE_S", 30.0)
    signalled: list[int] = []
    group = run.Copies([*PYTHON, "raise SystemExit(3)"], dict(os.environ), 1, 3)
    group.start()
    told: list[str] = []
    wait_until(
        lambda: told.append(capfd.readouterr().err) or "started again in 30 s" in "".join(told)
    )
    monkeypatch.setattr(os, "killpg", lambda pid, _: signalled.append(pid))
    group.signal(signal.SIGTERM)
    group.stop(signal.SIGTERM)
    group.stop(signal.SIGTERM)
    assert group.wait() == 143
    assert signalled == []


def test_the_masters_port_may_be_left_out_in_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [*PYTHON, "import os; print(os.environ['PCCL_MASTER'])"]
    monkeypatch.setenv("PCCL_MASTER", "127.0.0.1")
    assert copies(capfd, program=program)[:2] == (0, "[0] 127.0.0.1:48148\n")
    monkeypatch.setenv("PCCL_MASTER", "127.0.0.1:nothing")
    status, out, err = copies(capfd, program=program)
    assert (status, out) == (2, "") and "'nothing' is not a port number" in err
