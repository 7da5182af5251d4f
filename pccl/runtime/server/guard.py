"""Limits what a connection without a complete message can cost a master. Does no I/O itself.

libzmq limits the size of a frame, but neither the number of frames of a message nor the time until
a connection's first message. Incomplete messages take libzmq's memory, which is not visible here.
But the system counts the bytes that a connection has received. If they grow without a complete
message, that is an attack, and the connection is cut.

An empty frame takes 2 bytes on the wire and 64 in memory. So strangers can take at most 32 times
STRANGERS_BYTES of a master's memory, plus the data that arrives between two checks.

On systems that do not count (all except Linux), only time and number are limited.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pccl.runtime import limits

PATIENCE = 3  # factor of the time limit while the master has unread messages
SHARE = 50  # a pause between looks is at least this many times as long as a look


class Verdict(NamedTuple):
    """A connection to cut, and why."""

    line: Line
    why: str


@dataclass(slots=True, eq=False)
class Line:
    """An accepted connection."""

    descriptor: int
    since_s: float  # when it was accepted, or its latest message was read
    counted: int = 0  # bytes received until then
    stranger: bool = True  # none of its messages has been read
    heard: bool = False  # a message was read since the last look
    cut: bool = False


class Guard:
    """The connections of a server, as its monitor reports them.

    Args:
        received: the number of bytes that a descriptor has received; None if unknown.
        lines_max: the most connections. Further ones are cut; strangers may be half as many, and
            the oldest beyond that are cut.
        clock: measures how long a look takes.
    """

    def __init__(
        self,
        received: Callable[[int], int | None],
        lines_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._received = received
        self._lines_max = lines_max
        self._lines: dict[int, Line] = {}  # by descriptor, in the order of their acceptance
        self._next_s = 0.0
        self._rested_s = 0.0  # the earliest time of the next look, by SHARE
        self._pause_s = limits.STRANGERS_LOOK_S

    def accepted(self, descriptor: int, now_s: float) -> Line:
        """A connection was accepted."""
        self._lines.pop(descriptor, None)
        line = self._lines[descriptor] = Line(descriptor, now_s)
        self._pause_s = limits.STRANGERS_LOOK_S
        self._next_s = max(self._rested_s, min(self._next_s, now_s + limits.STRANGERS_LOOK_S))
        return line

    @property
    def full(self) -> bool:
        """Whether there are more connections than there may be."""
        return len(self._lines) > self._lines_max

    def gone(self, descriptor: int) -> None:
        """The connection with this descriptor is closed."""
        self._lines.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """A whole message of it was read."""
        line = self._lines.get(descriptor)
        if line is not None:
            line.heard = True
            line.stranger = False

    def is_open(self, descriptor: int) -> bool:
        """Whether a connection has this descriptor."""
        return descriptor in self._lines

    def holds(self, line: Line) -> bool:
        """Whether its descriptor still belongs to that connection."""
        return self._lines.get(line.descriptor) is line

    @property
    def patience_s(self) -> float | None:
        """The longest time until the next look; None: until a connection is accepted."""
        return self._pause_s if self._lines else None

    def look(self, now_s: float, drained: bool) -> list[Verdict]:
        """Looks at all connections, if it is time to.

        Args:
            now_s: of the monotonic clock.
            drained: whether all messages that have arrived have been read.

        Returns:
            The connections to cut.
        """
        if now_s < self._next_s or not self._lines:
            return []
        began_s = self._clock()
        limit_s = limits.HELLO_S if drained else PATIENCE * limits.HELLO_S
        verdicts = []
        for line in self._lines.values():
            why = "" if line.cut else self._see(line, now_s, limit_s)
            if why:
                verdicts.append(Verdict(line, why))
                line.cut = True
        for verdict in self._crowd():
            verdicts.append(verdict)
            verdict.line.cut = True
        ended_s = now_s + self._clock() - began_s
        strangers = any(line.stranger for line in self._lines.values())
        self._pause_s = limits.STRANGERS_LOOK_S if strangers else limits.KNOWN_LOOK_S
        self._rested_s = ended_s + SHARE * (ended_s - now_s)
        self._next_s = max(self._rested_s, ended_s + self._pause_s)
        return verdicts

    def _see(self, line: Line, now_s: float, limit_s: float) -> str:
        """Why to cut it; empty if not."""
        if line.heard:
            line.heard, line.since_s = False, now_s
            line.counted = self._received(line.descriptor) or line.counted
            return ""
        waited_s = now_s - line.since_s
        if line.stranger and waited_s > limit_s:
            return f"it has said nothing for {limit_s:g} s"
        most = limits.STRANGER_BYTES if line.stranger else limits.KNOWN_BYTES
        unread = self._unread(line)
        if unread > most + limits.HEARTBEAT_BYTES_S * waited_s:
            return f"it has sent {unread} bytes of a message without an end"
        return ""

    def _unread(self, line: Line) -> int:
        total = self._received(line.descriptor)
        return 0 if total is None else total - line.counted

    def _crowd(self) -> list[Verdict]:
        """Strangers to cut because there are too many, or because they hold too much together."""
        strangers = [line for line in self._lines.values() if line.stranger and not line.cut]
        surplus = strangers[: max(0, len(strangers) - self._lines_max // 2)]
        verdicts = [Verdict(line, "too many connections say nothing") for line in surplus]
        sizes = [(self._unread(line), line) for line in strangers[len(surplus) :]]
        total = sum(size for size, _ in sizes)
        for size, line in sorted(sizes, key=lambda pair: -pair[0]):
            if total <= limits.STRANGERS_BYTES:
                break
            total -= size
            verdicts.append(Verdict(line, "too much arrives that is no message yet"))
        return verdicts
