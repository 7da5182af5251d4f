"""The lines of an event log, over all its files, and what is missing of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pccl.protocol.master.record import Gap, Line
from pccl.runtime.server.eventlog import VERSION, Damaged, Head, files, read

_LAST_UNIX_S = 253402300800  # the year 10000


class Entry(NamedTuple):
    """One line of a log.

    Attributes:
        where: file and line.
        unix_s: when.
        line: what it says.
        whole: whether no line is missing since the one before.
    """

    where: str
    unix_s: float
    line: Line
    whole: bool


class Source:
    """An event log.

    Args:
        path: of the file that is, or was, written last.

    Attributes:
        problems: what is missing or damaged, in words; complete after `lines`.
        damaged: whether a line cannot be read that its master has completed.
        last_unix_s: the time of the last line.

    Raises:
        OSError: there is no such log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = files(path)
        self.problems: list[str] = []
        self.damaged = False
        self.last_unix_s = 0.0
        self._undated = False
        if not self._files:
            raise OSError(f"there is no event log {path}")

    def lines(self) -> Iterator[Entry]:
        """All lines, the oldest first. Raises OSError: a file is no event log."""
        head: Head | None = None
        number = 0  # of the next line, of its master's
        began_s = 0.0
        whole = True
        for file in self._files:
            for at, item in read(file):
                where = f"{file}:{at}"
                if head is None and not isinstance(item, Head):
                    raise OSError(f"{file} is no event log of a master: it begins with no head")
                if isinstance(item, Head):
                    whole &= self._continues(item, head, number, where)
                    head, number = item, item.line
                    began_s = self._dated(head.unix_s, head.monotonic_s, where)
                elif isinstance(item, Gap):
                    self.problems.append(f"{where}: {item.lost} events are missing: {item.why}")
                    number, whole = number + item.lost, False
                elif isinstance(item, Damaged):
                    number, whole = number + 1, False
                    self._damage(item, where)
                elif head is not None:
                    unix_s = began_s + item.at_s - head.monotonic_s
                    self.last_unix_s = self._dated(unix_s, self.last_unix_s, where)
                    yield Entry(where, self.last_unix_s, item, whole)
                    number, whole = number + 1, True

    def _dated(self, unix_s: float, otherwise: float, where: str) -> float:
        """A time, or what to take in its place if it is none."""
        if 0 <= unix_s < _LAST_UNIX_S:
            return unix_s
        if not self._undated:
            self.damaged = self._undated = True
            self.problems.append(
                f"{where}: its time is {unix_s:g} s since 1970: the file was changed or damaged; "
                "from here on, times may be wrong"
            )
        return otherwise

    def _continues(self, head: Head, before: Head | None, number: int, where: str) -> bool:
        """Whether a head follows what was before it without a gap."""
        if head.version != VERSION:
            raise OSError(
                f"{where} is of version {head.version} of event logs, and this pccl reads version "
                f"{VERSION}: take pccl {head.pccl}"
            )
        if head.missing < 0:
            self.problems.append(
                f"{where}: the master could not write there when it ended: its last events are "
                "missing"
            )
        same = before is not None and (before.process, head.line > 0) == (head.process, True)
        missing = head.line - (number if same else 0)
        if missing:
            self.problems.append(
                f"{where}: {missing} events before that are missing, in files that were removed"
            )
        return not missing

    def _damage(self, item: Damaged, where: str) -> None:
        if item.torn:
            self.problems.append(f"{where}: the master has ended within this line")
            return
        self.damaged = True
        self.problems.append(
            f"{where}: this is no event ({item.why}): the file was changed or damaged; what "
            "follows is told without it"
        )
