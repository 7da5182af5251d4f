"""The master's event log: what it has of a real run, its files, and what happens to a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from pages import listed
from peers.cluster import grow, in_threads
from peers.processes import Puppet
from peers.waiting import a_line_more, wait_until

import pccl
from pccl.protocol.master import Master, inputs
from pccl.protocol.master.eventlog import Gap, Line, Replay
from pccl.runtime import limits
from pccl.runtime.server import eventlog
from pccl.runtime.server.eventlog import Damaged, EventLog, Head, files, read

Log: TypeAlias = pytest.LogCaptureFixture
Item: TypeAlias = Head | Line | Gap | Damaged
BEGAN = inputs.Began(7, None, None)
EVENT = inputs.Rejected(b"conn", "x" * 100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events"


@pytest.fixture
def log(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(limits, "JOURNAL_RETRY_S", 0.01)
    return caplog


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[EventLog, Master]]:
    """A log, and a master that has begun in it."""
    log = EventLog(path)
    try:
        log.note(0.0, BEGAN, [])
        yield log, Master.began(BEGAN, lambda work, parts: parts[0], b"secret")
    finally:
        log.close()


def items(path: Path) -> list[Item]:
    return [item for file in files(path) for _, item in read(file)]


def kinds(path: Path) -> list[str]:
    return [type(item).__name__ for item in items(path)]


# ---- a real run ----


def test_the_log_of_a_run_with_a_killed_peer_replays(path: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0", event_log=path) as master:
        victim = Puppet(master.address)
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        try:
            victim.call("connect")

            def belong(comm: pccl.Communicator) -> None:
                comm.connect()
                grow(comm, 3)

            victim.begin("gather", size=3)
            in_threads([lambda c=c: belong(c) for c in comms])  # type: ignore[misc]
            victim.value()
            shared = [
                pccl.SharedState.from_tensors({"weights": np.full(9, i, np.float32)})
                for i in range(2)
            ]

            def sync(index: int) -> None:
                comms[index].sync_shared_state(shared[index])

            thread = threading.Thread(target=victim.kill)
            lost: list[pccl.PCCLError] = []

            def reduce(comm: pccl.Communicator) -> None:
                data = np.full(7, 123.25)
                while True:
                    try:
                        comm.all_reduce(data)
                        return
                    except pccl.PeerLostError as error:
                        lost.append(error)

            thread.start()
            in_threads([lambda c=c: reduce(c) for c in comms])  # type: ignore[misc]
            thread.join()
            in_threads([lambda i=i: sync(i) for i in range(2)])  # type: ignore[misc]
        finally:
            for comm in comms:
                comm.close()
    found = items(path)
    lines = [item for item in found if isinstance(item, Line)]
    assert isinstance(found[0], Head) and found[0].missing == found[0].line == 0
    assert len(found) == len(lines) + 1
    again = Replay()
    assert all(again.feed(line) for line in lines)
    assert lines == sorted(lines, key=lambda line: line.at_s)
    told = {(told.say, number) for line in lines for told in line.told for number in told.to}
    assert {("Admitted", 1), ("Admitted", 2), ("Admitted", 3), ("Started", 2)} <= told
    assert any(
        "lost: peer 1 (" in note and "broke" in note for line in lines for note in line.notes
    )
    assert any(told.fetches for line in lines for told in line.told), "a transfer"
    text = path.read_text(encoding="utf-8")
    assert "AAAAAADAXkA" not in text, "a contribution, 123.25, is in the log"


def test_a_message_that_makes_the_master_fail_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("never")

    with opened(path) as (log, master):
        monkeypatch.setattr(Master, "feed", fail)
        with pytest.raises(ZeroDivisionError):
            log.feed(master, EVENT)
    line = items(path)[-1]
    assert isinstance(line, Line) and line.failed == "ZeroDivisionError: never"
    again = Replay()
    assert all(again.feed(item) for item in items(path) if isinstance(item, Line))


# ---- the files ----


def test_a_log_is_continued_behind_a_torn_line(path: Path) -> None:
    for _ in range(2):
        with opened(path) as (log, master):
            log.feed(master, EVENT)
    with path.open("ab") as file:
        file.write(b'{"type":"ev')
    with opened(path):
        pass
    assert kinds(path) == ["Head", "Line", "Line"] * 2 + ["Damaged", "Head", "Line"]
    (torn,) = (item for item in items(path) if isinstance(item, Damaged))
    assert torn.torn
    os.truncate(path, path.stat().st_size - 5)
    last = items(path)[-1]
    assert isinstance(last, Damaged) and last.torn
    data = path.read_bytes().replace(b'"rejected"', b'"rejec', 1)
    path.write_bytes(data)
    first = next(item for item in items(path) if isinstance(item, Damaged))
    assert not first.torn and "rejec" in first.why


@pytest.mark.parametrize("torn", [b"{", b"{\n", b'{"type":"pccl ev\n'])
def test_a_log_is_continued_behind_a_torn_head(path: Path, torn: bytes) -> None:
    path.write_bytes(torn)
    for _ in range(2):
        with opened(path) as (log, master):
            log.feed(master, EVENT)
    assert kinds(path) == ["Damaged"] + ["Head", "Line", "Line"] * 2
    damaged = items(path)[0]
    assert isinstance(damaged, Damaged) and damaged.torn


def test_files_are_rotated_and_the_oldest_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_LOG_BYTES", 2000)
    monkeypatch.setattr(limits, "EVENT_LOG_FILES", 3)
    monkeypatch.setattr(limits, "EVENT_LOG_PAUSE_S", 0.0)
    with opened(path) as (log, master):
        for _ in range(60):
            with a_line_more(path):
                log.feed(master, EVENT)
    assert [file.name for file in files(path)] == ["events.2", "events.1", "events"]
    assert all(file.stat().st_size <= 2000 for file in files(path))
    found = items(path)
    heads = [(i, item) for i, item in enumerate(found) if isinstance(item, Head)]
    assert heads[0][1].line > 0, "the oldest one says that lines before it are missing"
    for (at, head), (at_next, following) in itertools.pairwise(heads):
        assert following.line == head.line + at_next - at - 1
    assert heads[-1][1].line + len(found) - heads[-1][0] - 1 == 61


class Disk(FileIO):
    """A file on a disk that is full, but for a few bytes of each write."""

    full = False

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if not Disk.full or self.tell() < os.fstat(self.fileno()).st_size:  # it overwrites
            return super().write(view)
        if len(view) > 10:
            return super().write(view[:10])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Disk]]:
    monkeypatch.setattr(eventlog, "FileIO", Disk)
    yield Disk
    Disk.full = False


def test_a_full_disk_is_said_once_and_short_of_memory_lines_are_lost(
    path: Path, log: Log, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_LOG_WAITING_BYTES", 2000)
    with opened(path) as (events, master):
        wait_until(lambda: kinds(path) == ["Head", "Line"])
        disk.full = True
        events.feed(master, EVENT)
        wait_until(lambda: log.messages)  # not just a short write
        wait_until(lambda: kinds(path) == ["Head", "Line"])  # no half line stays
        wait_until(lambda: items(path)[0].missing == -1)  # type: ignore[union-attr]  # if killed
        for _ in range(50):
            events.feed(master, EVENT)
        disk.full = False
        wait_until(lambda: "Gap" in kinds(path))
        events.feed(master, EVENT)
    found = items(path)
    (gap,) = (item for item in found if isinstance(item, Gap))
    missing = gap.lost
    assert missing > 10 and gap.why == "No space left on device"
    head = found[0]
    assert isinstance(head, Head) and head.missing == missing
    assert len(found) == 1 + 53 - missing + 1
    assert isinstance(found[-1], Line)
    texts = [text for text in log.messages if "event log" in text]
    assert len(texts) == 2
    assert "cannot be written: No space left on device; the run goes on" in texts[0]
    assert re.search(rf"is written again, after [\d.]+ s; it lacks {missing} events$", texts[1])


def test_a_disk_that_is_full_for_a_moment_costs_no_line(
    path: Path, log: Log, disk: type[Disk]
) -> None:
    with opened(path) as (events, master):
        disk.full = True
        for _ in range(5):
            events.feed(master, EVENT)
        wait_until(lambda: log.messages)  # not just a short write
        disk.full = False
        wait_until(lambda: kinds(path) == ["Head"] + ["Line"] * 6)
    head = items(path)[0]
    assert isinstance(head, Head) and head.missing == 0
    assert log.messages[-1].endswith("it lacks nothing")


def test_a_disk_that_is_full_when_a_file_begins_leaves_no_half_head(
    path: Path, log: Log, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as (events, master):
        wait_until(lambda: kinds(path) == ["Head", "Line"])
        monkeypatch.setattr(limits, "EVENT_LOG_BYTES", 10)  # the next line begins another file
        disk.full = True
        events.feed(master, EVENT)
        wait_until(lambda: log.messages)  # not just a short write
        wait_until(lambda: path.read_bytes() == b"")
    disk.full = False
    with opened(path):  # by the next master
        pass
    assert kinds(path) == ["Head", "Line"] * 2


@pytest.mark.skipif(os.name == "nt", reason="no file in use can be removed there")
def test_a_removed_log_is_started_again(path: Path) -> None:
    with opened(path) as (events, master):
        wait_until(lambda: kinds(path) == ["Head", "Line"])
        path.unlink()
        events.feed(master, EVENT)
    head, line = items(path)
    assert isinstance(head, Head) and head.line == 1, "it says that a line before it is missing"
    assert isinstance(line, Line)


def test_impossible_log_paths_are_refused(path: Path) -> None:
    def refused(why: str) -> None:
        master = pccl.MasterNode("127.0.0.1:0", event_log=path)
        with pytest.raises(pccl.PCCLError, match=why) as raised:
            master.run()
        listed(f"PCCLError: {raised.value}")

    with opened(path):
        refused(f"another master .process {os.getpid()}. uses it")
    for text in ("something else", "{\nsomething else", '{"other": "JSON"}\n', "\n"):
        path.write_text(text, encoding="utf-8")
        refused("it is not an event log of a master, but some other file")
    path.unlink()
    path.mkdir()
    refused("cannot be used: ")
