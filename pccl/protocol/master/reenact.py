"""Has another master do what a record says, and compares."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.machine import Master
from pccl.protocol.master.record import Line, Recorder
from pccl.protocol.master.veil import refill

SECRET = b"of a master without peers"


class Differs(Exception):
    """The master did something else this time; the text says what."""


class Reenactment:
    """A master that is fed the lines of a record.

    Attributes:
        master: None before the first `Began`, and after `lose`.
    """

    def __init__(self) -> None:
        self.master: Master | None = None
        self._recorder = Recorder(None)

    def lose(self) -> None:
        """The next lines are missing: what follows cannot be fed until a master begins again."""
        self.master = None

    def feed(self, line: Line) -> bool:
        """Has one input happen again. False if it cannot, because earlier ones are missing.

        Raises:
            Differs: the effects are not those of the record.
        """
        # of a master that is not known, it is not known what it said last
        comparable = self.master is not None or not getattr(line.input, "why", "")
        failed = ""
        effects: list[Effect] = []
        try:
            if self.master is None and not isinstance(line.input, inputs.Began):
                return False
            effects = self.happen(line)
        except Differs:
            raise
        except Exception as error:
            failed = exception_text(error)
        if line.failed == "MemoryError":  # which does not come again; a new master follows
            self.lose()
            return True
        event = refill(line.input, line.sizes)
        again = self._recorder.line(line.at_s, event, effects, failed)  # its names change, too
        if comparable and (again.effects, again.failed) != (line.effects, line.failed):
            raise Differs(difference(line, again))
        return True

    def happen(self, line: Line) -> list[Effect]:
        """Has one input happen again, whatever follows. Raises what that raises."""
        event = refill(line.input, line.sizes)
        if isinstance(event, inputs.Began):
            return self._begin(event)
        assert self.master is not None, "a record begins with a Began"
        self.master.now_s = line.at_s
        return inputs.feed(self.master, event)

    def _begin(self, began: inputs.Began) -> list[Effect]:
        effects: list[Effect] = []
        if began.why and self.master is not None:
            journal, effects = self.master.reborn()
            if journal != began.journal:
                raise Differs(f"the next master began with {began.journal}, and now with {journal}")
        if not began.why:  # in a process of its own
            self._recorder = Recorder(None)
        self.master = inputs.begin(began, _zeros, SECRET)
        return effects


def lines(text: str) -> list[Line]:
    """Lines of a record, as an event log has them."""
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in text.split("\n") if line]


def exception_text(error: BaseException) -> str:
    """How a record names an exception."""
    return "MemoryError" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


def difference(line: Line, again: Line) -> str:
    """Where two lines of the same input differ, in words."""
    if line.failed != again.failed:
        return f"it failed with {line.failed or 'nothing'!r}, and now with {again.failed!r}"
    for what in ("notes", "told"):
        before, after = getattr(line, what), getattr(again, what)
        for one, other in zip(before, after, strict=False):
            if one != other:
                return f"before: {one}; now: {other}"
        if len(before) != len(after):
            return f"{what} before: {before}; now: {after}"
    return f"the effects had the digest {line.effects}, and now {again.effects}"


def _zeros(work: m.Work, parts: Sequence[bytes]) -> bytes:
    """In place of the reduction: a record has the sizes of contributions only."""
    return bytes(len(parts[0]))
