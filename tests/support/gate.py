"""Gates: where a program of a test stops until the test lets it go on.

A gate is a file that the test has locked. So the system wakes whoever waits there, and whoever
comes later goes on at once.
"""

from __future__ import annotations

from pathlib import Path


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
