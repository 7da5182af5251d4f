"""A log as a test for pytest, which goes with the change that it has led to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pccl.cli.replay.source import Entry
from pccl.protocol.master.inputs import Began
from pccl.protocol.master.record import Line

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
