"""One call of the API in progress, between the thread that waits for it and the one that works.

An exception may come to the waiting thread at any moment, and a call that ends, however it ends,
has let go first: no memory is referred to, no peer waits for it. So whoever makes a call does all
of it, from before the first command to the end, in one `try`, whose handler is `Client.let_go`.
What must be done once begun is done first (uninterrupted.py); the exception is raised after it.
"""

from __future__ import annotations

import math
import numbers
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a piece that is fetched by `op` has arrived, and waits for its verdict."""

    op: int
    piece: int
    leaf: int


Note = (
    effects.Answer
    | effects.Fail
    | effects.Follow
    | effects.Measure
    | effects.Fetched
    | m.Welcome
    | Leaf
)
End = effects.Answer | effects.Fail


class Quiet:
    """A wait in silence, from now on: it is broken after QUIET_S, and then after longer gaps."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._gap_s = limits.QUIET_S
        self._until_s = self._began_s + limits.QUIET_S

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        """Whether it is time to say what the wait is for; not again for a while."""
        now = time.monotonic()
        if now < self._until_s:
            return False
        self._gap_s = min(2 * self._gap_s, limits.QUIET_MAX_S)
        self._until_s = now + self._gap_s
        return True


class Call:
    """One API call in progress: notes come in, the last one is an Answer or a Fail.

    Attributes:
        end: that last note, once it is there. Nothing refers to the caller's memory any more.
        hearers: are called with the end when it comes; the control thread's to fill.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.began_s = time.monotonic()
        self.serve_op = 0  # of a synchronisation
        self._quiet = Quiet()
        self.end: End | None = None
        self.hearers: list[Callable[[End], None]] = []
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def put(self, note: Note) -> None:
        """Called by the control thread."""
        if isinstance(note, effects.Answer | effects.Fail):
            self.end = self.end or note
        self._notes.put(note)
        while self.end is not None and self.hearers:
            self.hearers.pop()(self.end)

    def next(self, timeout_s: float | None = None) -> Note:
        """The next note. After the end that one, as often as it is asked for.

        Raises:
            queue.Empty: there was none in that time.
        """
        at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:  # in slices: what comes to this thread just before a wait does not end it
            left_s = limits.SLICE_S if at is None else min(limits.SLICE_S, at - time.monotonic())
            try:
                note = self._notes.get(timeout=max(0.0, left_s))
            except queue.Empty:
                if self.end is not None:
                    return self.end
                if left_s < limits.SLICE_S:
                    raise
            else:
                if note is self.end:
                    self._notes.put(note)  # for whoever waits as well
                return note

    @property
    def is_long(self) -> bool:
        """Whether it is time to say for whom it waits; not again for a while."""
        return self._quiet.is_over

    def settle(self) -> None:
        """Returns when the end is there."""
        while self.end is None:
            self.next()

    @property
    def has_notes(self) -> bool:
        """Whether `next` would return at once."""
        return not self._notes.empty()


class Caller(Protocol):
    """What a wait asks of the client."""

    def inquire(self, call: Call) -> None:
        """Has the log say for whom a call waits."""

    def withdraw(self, call: Call, why: str) -> None:
        """Waits no longer for a call."""


class Deadline:
    """When the caller of a call gives up. The call is withdrawn then, and answered all the same.

    Args:
        timeout_s: seconds from now; None: never.
        name: of the parameter, for the errors.

    Raises:
        TypeError: it is no number.
        ValueError: it is no time to wait for.
    """

    def __init__(self, timeout_s: float | None, name: str = "timeout") -> None:
        self._timeout_s = timeout_s
        self._late: Call | None = None  # which was withdrawn
        self._at: float | None = None
        if timeout_s is None:
            return
        if not isinstance(timeout_s, numbers.Real) or isinstance(timeout_s, bool):
            raise TypeError(f"{name} is {timeout_s!r}: it must be a number of seconds, or None")
        if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"{name} is {timeout_s!r}: it must be in 0 to {threading.TIMEOUT_MAX:.0f} seconds, "
                "or None to wait as long as it takes"
            )
        self._at = time.monotonic() + float(timeout_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until then; None: never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def next(self, client: Caller, call: Call) -> Note:
        """The call's next note. Where it is long in coming, the log says why."""
        note = self.next_within(client, call, math.inf)
        assert note is not None
        return note

    def next_within(self, client: Caller, call: Call, seconds: float) -> Note | None:
        """The call's next note, or None when none came for so many seconds."""
        due = time.monotonic() + seconds
        while True:
            until = [limits.QUIET_S, due - time.monotonic()]
            if self._at is not None and self._late is not call:
                until.append(self._at - time.monotonic())
            try:
                return call.next(max(0.0, min(until)))
            except queue.Empty:
                self._notice(client, call)
            if time.monotonic() >= due:
                return None

    def _notice(self, client: Caller, call: Call) -> None:
        """There was no note: gives up if it is time to, or says for whom the call waits."""
        if self._at is not None and self._late is not call and time.monotonic() >= self._at:
            self._late = call
            client.withdraw(call, f"its caller gave up after {self._timeout_s:g} s")
        elif call.is_long:
            client.inquire(call)
