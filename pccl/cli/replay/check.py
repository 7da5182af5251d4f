"""Feeds a log to the master's state machine, and compares what it does."""

from __future__ import annotations

from pccl.cli.replay.source import Entry
from pccl.protocol.master.record import Differs, Reenactment


class Check:
    """What came true of a log.

    Attributes:
        failed: whether anything did not.
    """

    def __init__(self) -> None:
        self._again = Reenactment()
        self._fed = self._skipped = 0
        self._failures: list[str] = []
        self._differs = ""

    def feed(self, entry: Entry) -> None:
        """Feeds one line. After a difference, nothing is fed until a master begins again."""
        if not entry.whole:
            self._again.lose()
        try:
            fed = self._again.feed(entry.line)
        except Differs as error:
            self._differs = self._differs or f"{entry.where}: {error}"
            self._again.lose()
            return
        self._fed += fed
        self._skipped += not fed
        if fed and entry.line.failed:
            self._failures.append(f"{entry.where}: it fails again with {entry.line.failed}")

    @property
    def failed(self) -> bool:
        """Whether the master did something else this time, or nothing could be fed."""
        return bool(self._differs) or not self._fed

    def summary(self) -> str:
        """What was found, in words."""
        lines = [f"{self._fed} inputs have the same effects again", *self._failures]
        if self._skipped:
            lines.append(
                f"{self._skipped} could not be fed, because events before them are missing"
            )
        if self._differs:
            lines.append(f"the master does something else at {self._differs}")
        return "\n".join(lines)
