"""Conditions, votes and gates that tests wait for.

A gate is a file that a test has locked. A program of the test waits there until the test opens it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pccl
from pccl.protocol.master.status import Phase

PATIENCE_S = 30.0
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
