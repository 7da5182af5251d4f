"""The files of a master's event log. protocol/master/eventlog.py describes the lines.

The current file is FILE, the one before it is FILE.1, and so on. Each master's part of a file
begins with a head, which says whether lines of this part are missing. The head has a fixed width,
so that it can be overwritten in place, even on a full disk.

The service thread makes the lines, and a separate thread writes them, so a hanging disk does not
stop the service. If writing fails, the thread logs this once and retries. If more than
`EVENT_LOG_WAITING_BYTES` of lines wait, further lines are lost, and a later line says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pccl.protocol.master import Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.eventlog import Gap, Line, Recorder, exception_text
from pccl.runtime import limits
from pccl.runtime.filelock import FileLock, Taken, identity
from pccl.version import __version__

log = logging.getLogger("pccl")

VERSION = 2
HEAD_BYTES = 256
HEAD_START = b'{"type":"pccl event log",'


class Head(Struct, frozen=True, tag="pccl event log"):
    """The first line of one master's part of a file."""

    version: int  # the version of this format
    pccl: str  # the master's version of pccl
    process: int  # the master's process id
    unix_s: float  # the time when the part was begun
    monotonic_s: float  # the same time by the clock of the lines
    line: int  # the number of the next line among all lines of this master, from 0
    missing: int  # the number of lines missing before the next head; -1: some, not counted yet


class EventLogError(Exception):
    """An event log cannot be used. The text names it and says why."""


class Damaged(NamedTuple):
    """An unreadable line. `torn`: its master ended while it wrote the line."""

    why: str
    torn: bool


class EventFile:
    """An open event log and its lock, for one thread at a time.

    Args:
        path: the file; created if it does not exist, else continued.

    Raises:
        EventLogError: another master uses the file, it cannot be opened, or it is no event log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._identity = (0, 0)
        self._head_at = self._size = 0
        self._missing = 0  # since the head
        self._head = Head(VERSION, __version__, os.getpid(), 0.0, 0.0, 0, 0)
        try:
            with contextlib.ExitStack() as opened:
                self._lock = FileLock(path.with_name(path.name + ".lock"))
                opened.callback(self._lock.close)
                with contextlib.suppress(OSError):  # informs people only
                    self._lock.leave(f"process {os.getpid()}")
                if not _is_log(path):
                    raise self._error("it is not an event log of a master, but some other file")
                self._open(0)
                opened.pop_all()
        except Taken as error:
            holder = f" ({error})" if str(error) else ""
            raise self._error(
                f"another master{holder} uses it: stop that one, or give each a file of its own"
            ) from None
        except OSError as error:
            raise self._error(error.strerror or str(error)) from None

    def write(self, data: bytes, number: int, missing: int) -> None:
        """Appends lines: all of them, or none.

        Args:
            data: whole lines.
            number: the number of the first one, among all lines of this master.
            missing: how many lines are lost after these; the last of these says the same.

        Raises:
            OSError: they could not be written. The caller may retry.
        """
        if self._file is not None and identity(self.path) != self._identity:
            self._shut()  # the file was removed or replaced, with its earlier lines
        if self._file is None:
            self._open(number)
        elif self._size + len(data) > limits.EVENT_LOG_BYTES and self._size > HEAD_BYTES:
            self._shut()
            self._rotate()
            self._open(number)
        try:
            self._append(data)
        except BaseException:
            self._cut()
            raise
        self._missing += missing
        with contextlib.suppress(OSError):  # the lines say so, too
            self.mark(self._missing)

    def mark(self, missing: int) -> None:
        """Writes into the head how many lines are missing. Raises OSError."""
        if missing != self._head.missing and self._file is not None:
            head = msgspec.structs.replace(self._head, missing=missing)
            self._file.seek(self._head_at)
            self._file.write(_head_line(head))
            self._head = head

    def close(self) -> None:
        self._shut()
        self._lock.close()

    def _open(self, number: int) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        self._file = FileIO(descriptor, "r+")
        try:
            self._identity = identity(self.path)
            self._size = self._file.seek(0, os.SEEK_END)
            if self._size:
                self._file.seek(self._size - 1)
                if self._file.read(1) != b"\n":
                    self._append(b"\n")  # ends the torn line of an earlier master
            self._head_at = self._size
            now = time.time(), time.monotonic()
            self._head = Head(VERSION, __version__, os.getpid(), *now, number, 0)
            self._missing = 0
            self._append(_head_line(self._head))
        except BaseException:
            self._cut()
            self._shut()
            raise

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        self._file.seek(self._size)
        rest = memoryview(data)
        while rest:  # an almost full disk takes less
            rest = rest[self._file.write(rest) :]
        self._size += len(data)

    def _cut(self) -> None:
        """Removes partly written lines."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)

    def _rotate(self) -> None:
        for number in range(limits.EVENT_LOG_FILES - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(numbered(self.path, number - 1), numbered(self.path, number))

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _error(self, why: str) -> EventLogError:
        return EventLogError(f"the event log {self.path} cannot be used: {why}")


def numbered(path: Path, number: int) -> Path:
    """The file `number` files before the current one."""
    return path.with_name(f"{path.name}.{number}") if number else path


def files(path: Path) -> list[Path]:
    """The existing files of a log, the oldest first."""
    found = [numbered(path, number) for number in range(limits.EVENT_LOG_FILES)]
    return [file for file in reversed(found) if file.exists()]


def read(file: Path) -> Iterator[tuple[int, Head | Line | Gap | Damaged]]:
    """The lines of one file, with their line numbers.

    Raises OSError: it cannot be read, or has a line that is too long for an event log.
    """
    decoder: msgspec.json.Decoder[Head | Line | Gap] = msgspec.json.Decoder(Head | Line | Gap)
    with file.open("rb") as lines:
        number, pending, most = 0, None, limits.EVENT_LOG_LINE_BYTES
        for number, line in enumerate(iter(partial(lines.readline, most + 1), b""), 1):
            if len(line) > most:
                raise OSError(f"{file}:{number} has more than {most} bytes: it is not an event log")
            if pending is not None:
                torn = pending.torn and line.startswith(HEAD_START)
                yield number - 1, Damaged(pending.why, torn)
            pending = None
            try:
                item: Head | Line | Gap = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                pending = Damaged(str(error), not line.rstrip().endswith(b"}"))
                continue
            yield number, item
        if pending is not None:
            yield number, pending


def _head_line(head: Head) -> bytes:
    return msgspec.json.encode(head).ljust(HEAD_BYTES - 1) + b"\n"


def _is_log(path: Path) -> bool:
    """True if the file is an event log, empty, or missing. Raises OSError."""
    try:
        with path.open("rb") as file:
            first, second = file.readline(HEAD_BYTES), file.readline(HEAD_BYTES)
    except FileNotFoundError:
        return True
    if not first or first.startswith(HEAD_START):
        return True
    head = first.rstrip(b"\n")  # its master may have ended while it wrote this
    begun = second[: len(HEAD_START)]
    return bool(head) and HEAD_START.startswith(head) and HEAD_START.startswith(begun)


BATCH_BYTES = 1 << 20  # written at once
UNKNOWN = -1  # an unknown number of lines is missing


class EventLog:
    """An event log and the thread that writes it, for use by one thread.

    Raises EventLogError: it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._file = EventFile(path)
        self._recorder = Recorder(secrets.token_bytes(32))
        self._encoder = msgspec.json.Encoder()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._missing = 0  # lines lost after those that wait
        self._written = 0  # lines of this master, including lost ones
        self._lost = 0  # lines lost since `_failed`
        self._failed: tuple[float, str] | None = None  # since when writing fails, and why
        self._broken = False  # whether making a line has failed, which is logged once
        self._news = threading.Condition()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pccl-events", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._file.close()
            raise

    # ---- the service ----

    def feed(self, master: Master, event: inputs.Event) -> list[Effect]:
        """Feeds an event to the master, and records it. Raises what the master raises."""
        recovering = master.recovering
        try:
            effects = master.feed(event)
        except BaseException as error:
            self.note(master.now_s, event, [], exception_text(error))
            raise
        if self._recorder.matters(event, recovering, effects):
            self.note(master.now_s, event, effects)
        return effects

    def close(self) -> None:
        """Writes waiting lines, if possible, and closes the file."""
        with self._news:
            self._ending.set()
            self._news.notify_all()
        self._thread.join(limits.JOURNAL_CLOSE_S)

    def note(
        self, at_s: float, event: inputs.Input, effects: list[Effect], failed: str = ""
    ) -> None:
        """Hands a line to the thread. An error here must not stop the master."""
        line: bytes | None = None
        try:
            made = self._recorder.line(at_s, event, effects, failed)
            line = self._encoder.encode(made) + b"\n"
        except Exception:
            if not self._broken:
                self._broken = True
                log.exception("master: an event cannot be recorded")
        with self._news:
            full = self._waiting_bytes > limits.EVENT_LOG_WAITING_BYTES
            if line is None or full or self._missing:
                self._missing += 1
                if full and self._failed is None:
                    self._fail("the disk is slower than the events come")
            else:
                self._waiting.append(line)
                self._waiting_bytes += len(line)
            self._news.notify_all()

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._news:
                while not (self._waiting or self._missing or self._ending.is_set()):
                    self._news.wait()
                batch, ending = self._take(), self._ending.is_set()
                lost = self._missing if len(batch) == len(self._waiting) else 0
            written = self._write(batch, lost) if batch or lost else True
            if ending and not (written and (self._waiting or self._missing)):
                self._file.close()
                return
            pause_s = limits.EVENT_LOG_PAUSE_S if written else limits.JOURNAL_RETRY_S
            self._ending.wait(pause_s)

    def _take(self) -> list[bytes]:
        batch: list[bytes] = []
        nbytes = 0
        for line in self._waiting:
            nbytes += len(line)
            if batch and nbytes > BATCH_BYTES:
                break
            batch.append(line)
        return batch

    def _write(self, batch: list[bytes], lost: int) -> bool:
        """Writes lines, and how many are lost after them. Returns whether this worked."""
        why = self._failed[1] if self._failed is not None else "an error of the master"
        gap = [self._encoder.encode(Gap(lost, why)) + b"\n"] if lost else []
        try:
            self._file.write(b"".join(batch + gap), self._written, lost)
        except Exception as error:  # a system error, or a bug: the service continues
            with self._news:
                self._fail(getattr(error, "strerror", None) or str(error) or repr(error))
            self._mark()
            return False
        with self._news:
            for line in batch:
                self._waiting.popleft()
                self._waiting_bytes -= len(line)
            self._written += len(batch) + lost
            self._missing -= lost
            self._lost += lost
            if self._failed is not None and not (self._waiting or self._missing):
                self._mend()
        return True

    def _mark(self) -> None:
        """Notes in the head that lines are missing: they would be if this master ended now."""
        try:
            self._file.mark(UNKNOWN)
        except OSError as error:
            log.debug("master: the head of %s cannot be written either: %s", self._file.path, error)

    # ---- both, with the lock ----

    def _fail(self, why: str) -> None:
        if self._failed is None:
            log.error(
                "master: the event log %s cannot be written: %s; the run goes on, and writing is "
                "retried",
                self._file.path,
                why,
            )
            self._failed = time.monotonic(), why

    def _mend(self) -> None:
        assert self._failed is not None
        log.warning(
            "master: the event log %s is written again, after %.1f s; it lacks %s",
            self._file.path,
            time.monotonic() - self._failed[0],
            f"{self._lost} events" if self._lost else "nothing",
        )
        self._failed, self._lost = None, 0
