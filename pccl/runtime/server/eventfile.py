"""The files of an event log: one JSON object a line, rotated by size, the oldest removed.

FILE is written; FILE.1 is the one before it, and so on. Each part that one master has written into
a file begins with a head, which says whether lines are missing before it or in it. It has a fixed
width, so that it can be overwritten in place, which works on a full disk too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pccl.protocol.master.record import Gap, Line
from pccl.runtime import limits
from pccl.runtime.filelock import FileLock, Taken
from pccl.version import __version__

VERSION = 1
HEAD_BYTES = 256
HEAD_START = b'{"type":"pccl event log",'


class Head(Struct, frozen=True, tag="pccl event log"):
    """The first line of what one master has written into a file.

    Attributes:
        version: of this format.
        pccl: the master's version.
        process: its number.
        unix_s: when the file was begun.
        monotonic_s: the same moment by the clock of the lines.
        line: the number of the next line, of all that this master was to write, from 0.
        missing: lines before the next head that are missing; -1: some that are not counted yet.
    """

    version: int
    pccl: str
    process: int
    unix_s: float
    monotonic_s: float
    line: int
    missing: int


class EventLogError(Exception):
    """An event log cannot be used; the text says which one and why."""


class Damaged(NamedTuple):
    """A line that is none; `torn`: its master has ended while it wrote it."""

    why: str
    torn: bool


class EventFile:
    """An open event log, and its lock; to be used by one thread at a time.

    Args:
        path: of the file; created if it does not exist, else continued.

    Raises:
        EventLogError: another master uses it, it cannot be opened, or it is some other file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._identity = (0, 0)
        self._head_at = self._size = 0
        self._missing = 0  # since the head
        self._head = Head(VERSION, __version__, os.getpid(), 0.0, 0.0, 0, 0)
        try:
            self._lock = FileLock(path.with_name(path.name + ".lock"))
        except Taken as error:
            holder = f" ({error})" if str(error) else ""
            raise self._error(
                f"another master{holder} uses it: stop that one, or give each a file of its own"
            ) from None
        except OSError as error:
            raise self._error(error.strerror or str(error)) from None
        try:
            with contextlib.suppress(OSError):  # informs people only
                self._lock.leave(f"process {os.getpid()}")
            if not _is_log(path):
                raise self._error("it is no event log of a master, but some other file")
            self._open(0)
        except OSError as error:
            self._lock.close()
            raise self._error(error.strerror or str(error)) from None
        except EventLogError:
            self._lock.close()
            raise

    def write(self, data: bytes, number: int, missing: int) -> None:
        """Appends lines, or nothing of them.

        Args:
            data: whole lines.
            number: of the first one, among all lines of this master.
            missing: how many lines are lost after these, as the last of these says.

        Raises:
            OSError: they could not be written. They may be given again.
        """
        if self._file is not None and _identity(self.path) != self._identity:
            self._shut()  # it was removed or replaced: the lines of before are not there
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
        """Says at the head how many lines are missing. Raises OSError."""
        if missing != self._head.missing and self._file is not None:
            head = msgspec.structs.replace(self._head, missing=missing)
            self._file.seek(self._head_at)
            self._file.write(_head_line(head))
            self._head = head

    def close(self) -> None:
        """Closes the file, and releases the lock."""
        self._shut()
        self._lock.close()

    def forked(self) -> None:
        """Called in a forked child: the lock belongs to the parent."""
        self._lock.close()

    def _open(self, number: int) -> None:
        """Opens the file, and writes a head behind what an earlier master has written."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        self._file = FileIO(descriptor, "r+")
        try:
            self._identity = _identity(self.path)
            self._size = self._file.seek(0, os.SEEK_END)
            if self._size and self._last_byte() != b"\n":
                self._append(b"\n")  # after a line that its master could not end
            self._head_at = self._size
            now = time.time(), time.monotonic()
            self._head = Head(VERSION, __version__, os.getpid(), *now, number, 0)
            self._missing = 0
            self._append(_head_line(self._head))
        except BaseException:
            self._cut()
            self._shut()
            raise

    def _last_byte(self) -> bytes:
        assert self._file is not None
        self._file.seek(self._size - 1)
        return self._file.read(1)

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        self._file.seek(self._size)
        rest = memoryview(data)
        while rest:  # a disk that is about to be full takes less
            rest = rest[self._file.write(rest) :]
        self._size += len(data)

    def _cut(self) -> None:
        """Removes what was written of lines that did not fit."""
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
    """The file that is so many before the one that is written."""
    return path.with_name(f"{path.name}.{number}") if number else path


def files(path: Path) -> list[Path]:
    """The files of a log that are there, the oldest first."""
    found = [numbered(path, number) for number in range(limits.EVENT_LOG_FILES)]
    return [file for file in reversed(found) if file.exists()]


def read(file: Path) -> Iterator[tuple[int, Head | Line | Gap | Damaged]]:
    """The lines of one file, with their numbers in it.

    Raises:
        OSError: it cannot be read, or has a line that no event log has.
    """
    decoder: msgspec.json.Decoder[Head | Line | Gap] = msgspec.json.Decoder(Head | Line | Gap)
    with file.open("rb") as lines:
        number, pending, most = 0, None, limits.EVENT_LOG_LINE_BYTES
        for number, line in enumerate(iter(partial(lines.readline, most + 1), b""), 1):
            if len(line) > most:
                raise OSError(f"{file}:{number} has more than {most} bytes: it is no event log")
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
    """Whether the file is an event log, empty, or not there. Raises OSError."""
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


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return found.st_dev, found.st_ino
