"""The lines of an event log over all its files, and the state machine that is fed with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pccl.protocol.master.inputs import Began
from pccl.protocol.master.record import Differs, Gap, Line, Reenactment
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


BYTES_MAX = 8 << 20  # of a test that anybody would keep
TEMPLATE = '''"""What a master did in the field; made by `pccl replay --to-test`."""

from pccl.protocol.master.record import Reenactment, lines

RECORD = r"""
{record}
"""


def test_the_master_does_what_is_right() -> None:
    """Each input but the last one has the effects that it had; the last one raises nothing."""
    again = Reenactment()
    *before, last = lines(RECORD)
    for line in before:
        assert again.feed(line)
    again.happen(last)
'''


class Case:
    """The lines from a master's beginning up to the first one that has failed, or to the last."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._over = False

    def add(self, entry: Entry) -> None:
        """One more line."""
        if self._over:
            return
        if not entry.whole:
            self._lines.clear()
        if self._lines or isinstance(entry.line.input, Began):
            self._lines.append(entry.line)
            self._over = bool(entry.line.failed)

    def text(self, log: Path) -> str:
        """The test. Raises OSError: there is nothing to test, or too much."""
        encoded = b"\n".join(map(msgspec.json.encode, self._lines)).decode()
        if not self._lines:
            raise OSError(f"{log} has no beginning of a master, from which a test could start")
        if len(encoded) > BYTES_MAX:
            raise OSError(
                f"a test of {log} would have {len(encoded) >> 20} MiB: cut the log behind the "
                "line in question"
            )
        return TEMPLATE.format(record=encoded)  # JSON has no three quotes in a row
