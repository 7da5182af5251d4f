"""Conditions, votes and gates that tests wait for.

A gate is a file that a test has locked. A program of the test waits there until the test opens it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pccl
from pccl.protocol.master.status import Phase
from pccl.runtime.server.eventlog import HEAD_START

PATIENCE_S = 120.0  # until a hang is certain, on a busy machine too
PAUSE_S, PAUSE_MAX_S = 0.001, 0.02  # between two looks; longer each time, up to this


def wait_until(true: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Polls the condition until it holds; for conditions without an event."""
    deadline, pause_s = time.monotonic() + patience_s, PAUSE_S
    while not true():
        assert time.monotonic() < deadline, f"it did not happen within {patience_s:g} s"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, PAUSE_MAX_S)


def entered(master: pccl.MasterNode, votes: int = 1) -> None:
    """Waits until so many peers stand in a round."""

    def found() -> int:
        waits = master.status().waits
        return sum(wait.entered for wait in waits if wait.phase is Phase.ENTERING)

    wait_until(lambda: found() == votes)


def reached(master: pccl.MasterNode, phase: Phase) -> None:
    """Waits until a call is in this phase."""
    wait_until(lambda: any(wait.phase is phase for wait in master.status().waits))


@contextlib.contextmanager
def a_line_more(event_log: Path) -> Iterator[None]:
    """Waits, after the block, until another line is the last one of the log's current file."""

    def last() -> tuple[int, int] | None:
        """The file and its length; None: it has no whole line after its head."""
        with contextlib.suppress(FileNotFoundError), event_log.open("rb") as file:
            data = file.read()
            *_, line, rest = b"", *data.split(b"\n")
            if line and not rest and not line.startswith(HEAD_START):
                return os.fstat(file.fileno()).st_ino, len(data)
        return None

    before = last()
    yield
    wait_until(lambda: last() not in (before, None))


class Gate:
    """Closed until `open`; the test's side."""

    def __init__(self, path: Path) -> None:
        import fcntl  # not on Windows

        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """All go on that wait there, and all that come later. Idempotent."""
        self._file.close()


def pass_gate(path: str | Path) -> None:
    """Returns when the gate is open; the program's side."""
    import fcntl

    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
