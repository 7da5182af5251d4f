"""The master's journal: what it refuses to use, and what happens when it cannot be written."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from peers.processes import Master
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.protocol import messages as m
from pccl.protocol.master.effects import Adopt, Forget, Refusal, Remember
from pccl.protocol.master.history import REFUSED_MAX
from pccl.runtime import limits
from pccl.runtime.filelock import FileLock, Taken
from pccl.runtime.server.journal import JournalError, JournalFile, OnError, Scribe, State
from pccl.types import Result

RUN = 7
Log: TypeAlias = pytest.LogCaptureFixture
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


def peer(number: int) -> m.PeerInfo:
    return m.PeerInfo(number, 0, "127.0.0.1", 1000 + number, "", "", "")


@contextlib.contextmanager
def opened(path: Path, on_error: OnError = OnError.CONTINUE) -> Iterator[Scribe]:
    scribe = Scribe(path, RUN, on_error)
    try:
        yield scribe
    finally:
        scribe.close()


def held(path: Path) -> tuple[set[int], bool]:
    """The peers in a journal, and whether it is complete."""
    with opened(path) as scribe:
        return set(scribe.remembered.accepted), scribe.remembered.complete


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "master.db"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(limits, "JOURNAL_RETRY_S", 0.02)
    return caplog


# ---- what is there ----


def test_a_journal_is_read_back(path: Path) -> None:
    with opened(path) as scribe:
        assert scribe.remembered.run == RUN and scribe.remembered.incarnation == 0
        scribe.record(Remember(peer(1)))
        scribe.record(Remember(peer(2)))
        scribe.settle()
        scribe.record(Forget(1))
        scribe.record(Adopt(9, 4))
    with opened(path) as scribe:
        found = scribe.remembered
        assert (found.run, found.incarnation, found.next_peer) == (9, 5, 3)
        assert found.accepted == {2} and found.complete


def test_why_peers_were_dropped_is_read_again(path: Path) -> None:
    why = Refusal("it stood alone", Result.INVALID_ARGUMENT, m.Cause.MISMATCH)
    with opened(path) as scribe:
        for number in range(1, REFUSED_MAX + 4):
            scribe.record(Remember(peer(number)))
            scribe.record(Forget(number, why if number > 1 else None))
        scribe.settle()
        scribe.record(Remember(peer(1000)))
    with opened(path) as scribe:
        found = scribe.remembered.refused
        assert found == dict.fromkeys(range(4, REFUSED_MAX + 4), why), "the latest ones"
        scribe.record(Adopt(RUN, 3))
        scribe.record(Adopt(RUN + 1, 0))
        scribe.record(Forget(1000))
    with opened(path) as scribe:
        assert not scribe.remembered.refused, "of another run"


def test_a_journal_of_before_there_were_reasons_is_read(path: Path) -> None:
    with opened(path) as scribe:
        scribe.record(Remember(peer(1)))
    db = sqlite3.connect(path)
    db.execute("DROP TABLE refused")
    db.close()
    assert held(path) == ({1}, True)


def refused(path: Path, why: str) -> None:
    """By the program too: one line, and status 1."""
    with pytest.raises(JournalError, match=why):
        Scribe(path, RUN)
    with pytest.raises(pccl.PCCLError, match=why) as raised:
        pccl.MasterNode("127.0.0.1:0", state=path).run()
    assert "another port" not in str(raised.value)


def test_two_masters_are_not_given_the_same_one(path: Path) -> None:
    master = Master("--state", str(path))
    try:
        refused(path, rf"another master \(process {master.process.pid}\) uses it")
        command = [sys.executable, "-m", "pccl.master", "--listen-address", "127.0.0.1:0"]
        second = subprocess.run([*command, "--state", path], capture_output=True, text=True)
        assert second.returncode == 2
        assert "another master" in second.stderr
        assert len(second.stderr.splitlines()) == 1
    finally:
        master.kill()
    assert held(path) == (set(), True)  # kill -9 has let go of it


def test_two_masters_of_one_process_are_not_given_the_same_one(path: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0", state=path):
        refused(path, "another master")
    refused_no_more = pccl.MasterNode("127.0.0.1:0", state=path)
    refused_no_more.run()
    refused_no_more.interrupt()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_hold_the_lock_for_its_parent(path: Path) -> None:
    program = f"""
import os, threading, pccl
master = pccl.MasterNode("127.0.0.1:0", state={str(path)!r})
master.run()
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
    threading.Event().wait(60)  # until it is killed
threading.Event().wait(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        parent.kill()
        parent.wait()
        try:
            assert held(path) == (set(), True)
        finally:
            os.kill(child, 9)


def foreign(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        for statement in statements:
            other.execute(statement)
        other.commit()


def test_other_files_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"a list of things to do\n" * 10)
    refused(path, "is not a journal of a master, but some other file")
    refused(tmp_path, "it is a directory")
    refused(tmp_path / "nowhere" / "master.db", "No such file or directory")
    other = tmp_path / "other.db"
    foreign(other, "CREATE TABLE run (x)", "CREATE TABLE peers (x)")
    refused(other, "an SQLite database, but no journal")


def test_a_journal_of_another_version_is_refused(path: Path) -> None:
    held(path)
    foreign(path, "PRAGMA user_version = 99")
    refused(path, "of version 99, and this pccl writes version 1")


def test_a_damaged_journal_is_refused(path: Path) -> None:
    with opened(path) as scribe:
        for number in range(1, 200):
            scribe.record(Remember(peer(number)))
    content = bytearray(path.read_bytes())
    for at in range(4096, len(content), 512):
        content[at : at + 40] = b"?" * 40
    path.write_bytes(content)
    refused(path, "malformed|damaged|invalid|Tree|corrupt")
    path.write_bytes(content[:5000])
    refused(path, "malformed|damaged|invalid|Tree|corrupt|database")
    foreign_rows = path.with_name("rows.db")
    held(foreign_rows)
    foreign(foreign_rows, "DELETE FROM run", "INSERT INTO peers VALUES (1, x'00')")
    refused(foreign_rows, "does not say which run")


@POSIX
def test_without_permission(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may do anything")
    path.touch(0o000)
    refused(path, "Permission denied")


# ---- what cannot be written ----


class Full:
    """A disk that takes no more, for a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.write = JournalFile.write
        monkeypatch.setattr(JournalFile, "write", lambda *arguments: self._write(*arguments))

    def _write(self, file: JournalFile, state: State) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self.write(file, state)


def test_the_run_survives_a_full_disk_and_its_facts_are_written_later(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as scribe:
        scribe.record(Remember(peer(1)))
        scribe.settle()
        disk = Full(monkeypatch)
        monkeypatch.setattr(limits, "LOG_REPEAT_S", 0.1)
        scribe.record(Remember(peer(2)))
        scribe.settle()
        scribe.record(Forget(1))
        scribe.record(Remember(peer(3)))
        scribe.settle()
        wait_until(lambda: len(log.messages) >= 2)
        assert "cannot be written: database or disk is full; the run goes on" in log.messages[0]
        assert "behind" in path.with_name("master.db.lock").read_text()
        disk.full = False
        wait_until(lambda: "is written again" in log.messages[-1])
    assert held(path) == ({2, 3}, True)


def test_the_next_master_learns_that_the_journal_is_behind(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as scribe:
        scribe.record(Remember(peer(1)))
        scribe.settle()
        disk = Full(monkeypatch)
        scribe.record(Remember(peer(2)))
        scribe.settle()
    disk.full = False
    assert held(path) == ({1}, False)
    with opened(path) as scribe:  # until the peers have told what it lacks
        assert not scribe.remembered.complete
        scribe.record(Remember(peer(2)))
        scribe.recovered()
        scribe.settle()
    assert held(path) == ({1, 2}, True)


def test_an_operator_may_ask_for_an_end_instead(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, OnError.STOP) as scribe:
        Full(monkeypatch)
        scribe.record(Remember(peer(1)))
        with pytest.raises(JournalError, match="cannot be written: database or disk is full"):
            scribe.settle()


def test_a_disk_that_hangs_holds_the_service_up_once(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_PATIENCE_S", 0.2)
    goes_on = threading.Event()
    write = JournalFile.write

    def hang(file: JournalFile, state: State) -> None:
        goes_on.wait(60)
        write(file, state)

    with opened(path) as scribe:
        monkeypatch.setattr(JournalFile, "write", hang)
        began_s = time.monotonic()
        for number in range(1, 101):
            scribe.record(Remember(peer(number)))
            scribe.settle()
            assert "takes longer than 0.2 s" in log.messages[0]
        assert time.monotonic() - began_s < 10  # and not once for each
        goes_on.set()
        wait_until(lambda: any("is written again" in line for line in log.messages))
    assert held(path) == ({*range(1, 101)}, True)


def test_a_file_that_is_locked_or_taken_away(path: Path, log: Log) -> None:
    with opened(path) as scribe:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as backup:
            backup.execute("BEGIN EXCLUSIVE")
            scribe.record(Remember(peer(1)))
            scribe.settle()
            wait_until(lambda: bool(log.messages))
            backup.execute("ROLLBACK")
        wait_until(lambda: "is written again" in log.messages[-1])
        if sys.platform != "win32":
            path.unlink()
            scribe.record(Remember(peer(2)))
            scribe.settle()
            wait_until(lambda: any("removed or replaced" in line for line in log.messages))
            wait_until(lambda: "is written again" in log.messages[-1])
        else:
            scribe.record(Remember(peer(2)))
    assert held(path) == ({1, 2}, True)


def test_a_journal_that_cannot_be_written_at_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Full(monkeypatch)
    refused(path, "cannot be written: database or disk is full")
    monkeypatch.undo()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    refused(path, "no thread could be started")
    monkeypatch.undo()
    assert held(path)[1]


start = threading.Thread.start


def no_thread(thread: threading.Thread) -> None:
    if thread.name == "pccl-journal":
        raise RuntimeError("can't start new thread")
    start(thread)


def connect(comm: pccl.Communicator) -> None:
    with contextlib.suppress(pccl.PCCLError):
        comm.connect(timeout=10)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits another process")
@pytest.mark.parametrize("on_error", OnError)
def test_a_real_master_and_a_limit_on_the_size_of_files(
    path: Path, on_error: OnError, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setenv("PCCL_MASTER_PATIENCE_S", "2")
    master = Master("--state", str(path), "--on-journal-error", on_error.value)
    try:
        with pccl.Communicator(master.address) as comm:
            limits = resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
            second = pccl.Communicator(master.address)
            joining = threading.Thread(target=connect, args=(second,))
            joining.start()
            with contextlib.ExitStack() as stack:
                if on_error is OnError.STOP:
                    stack.enter_context(pytest.raises(pccl.PCCLError))
                while comm.world_size < 2:
                    if comm.are_peers_pending():
                        comm.update_topology()
            if on_error is OnError.STOP:
                assert master.process.wait(PATIENCE_S) == 1
            joining.join()
            if on_error is OnError.STOP:
                second.close()
                return
            lock = path.with_name("master.db.lock")
            wait_until(lambda: "behind" in lock.read_text())
            resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, limits)
            wait_until(lambda: "complete" in lock.read_text())
            second.close()
            assert comm.are_peers_pending() is False
    finally:
        master.kill()
    assert held(path)[1]


@pytest.mark.skipif(os.name == "nt", reason="locks otherwise")
def test_a_lock_file_that_cannot_be_locked_for_another_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FileLock(path)
    with pytest.raises(Taken):
        FileLock(path)
    lock.close()

    def unable(descriptor: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unable)
    with pytest.raises(OSError, match="not implemented"):
        FileLock(path)
