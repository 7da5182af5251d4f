"""An API call in progress, shared by its waiting caller and the control thread.

An exception may be raised in the waiting thread at any moment. However a call ends, it must first
release everything: then nothing refers to the caller's memory, and no peer waits for the call. So a
caller makes the whole call in one `try`, which begins before the first command, and its handler
calls `PeerClient.cancel`. Work that must not stop halfway is finished first (signals.py); the
exception is raised afterwards.
"""

from __future__ import annotations

import math
import numbers
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from pccl.errors import PCCLError
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a piece, fetched by `op`, has arrived and waits for its result."""

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
T = TypeVar("T")
# A caller's part in a call: yields the number of seconds to wait for the next note, and receives
# the note, or None if there was none in that time.
Steps: TypeAlias = Generator[float, Note | None, T]


def error_of(name: str, end: effects.Fail, began_s: float | None = None) -> PCCLError:
    """The exception for a failed call, with its phase and duration."""
    when = [end.phase] if end.phase else []
    if began_s is not None:
        when.append(f"{time.monotonic() - began_s:.1f} s after the call began")
    why = f"{end.why} ({', '.join(when)})" if when else end.why
    error: PCCLError = end.fault.value(end.result, name, why)
    return error


class Quiet:
    """A wait that is logged after QUIET_S, and then at growing intervals."""

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.monotonic() if began_s is None else began_s
        self._gap_s = limits.QUIET_S
        self._until_s = self._began_s + limits.QUIET_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        """True if a log line about the wait is due; then False for a while."""
        now = time.monotonic()
        if now < self._until_s:
            return False
        self._gap_s = min(2 * self._gap_s, limits.QUIET_MAX_S)
        self._until_s = now + self._gap_s
        return True


class Call:
    """An API call in progress: it receives notes, the last of which is an Answer or a Fail."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.began_s = time.monotonic()
        self.serve_op = 0  # the op that serves, in a synchronization
        self.aim = ""  # the purpose of the call, which the log names if it takes long
        # says when a log line about the missing peers is due; None: the call has not waited long
        self.quiet: Quiet | None = None
        # the last note; once it has arrived, nothing refers to the caller's memory
        self.end: End | None = None
        # called with the end; only the control thread adds to them
        self.callbacks: list[Callable[[End], None]] = []
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def put(self, note: Note) -> None:
        """Called by the control thread."""
        if isinstance(note, effects.Answer | effects.Fail):
            self.end = self.end or note
        self._notes.put(note)
        while self.end is not None and self.callbacks:
            self.callbacks.pop()(self.end)

    def next(self, timeout_s: float | None = None) -> Note | None:
        """The next note, or None if none comes in that time; after the end, always the last one."""
        at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:  # in slices: a signal just before a wait does not interrupt it
            left_s = limits.SLICE_S if at is None else min(limits.SLICE_S, at - time.monotonic())
            note: Note | None
            try:
                note = self._notes.get(timeout=max(0.0, left_s))
            except queue.Empty:  # work in this block would chain its failures to this exception
                note = self.end
            else:
                if note is self.end:
                    self._notes.put(note)  # other threads may wait for the end too
            if note is not None or left_s < limits.SLICE_S:
                return note

    def settle(self) -> None:
        while self.end is None:
            self.next()

    @property
    def has_notes(self) -> bool:
        """True if `next` would return at once."""
        return not self._notes.empty()


class Caller(Protocol):
    """The part of the client that a wait uses."""

    def inquire(self, call: Call) -> None:
        """Logs which peers a call waits for."""

    def time_out(self, call: Call, why: str) -> None:
        """Withdraws a call."""


class Deadline:
    """A caller's time limit. A call past its limit is withdrawn, but still answered.

    Args:
        timeout_s: seconds from now; None: no limit.
        name: name of the parameter, for errors.

    Raises:
        TypeError: `timeout_s` is not a number.
        ValueError: `timeout_s` is not a valid time.
    """

    def __init__(self, timeout_s: float | None, name: str = "timeout") -> None:
        self._timeout_s = timeout_s
        self._late: Call | None = None  # the call that was withdrawn
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
        """Seconds left; None: no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def next(self, client: Caller, call: Call, seconds: float = math.inf) -> Note | None:
        """The call's next note, or None if none comes within `seconds`.

        If it takes long, the log says why.
        """
        due = time.monotonic() + seconds
        while True:
            until = [limits.QUIET_S, due - time.monotonic()]
            if self._at is not None and self._late is not call:
                until.append(self._at - time.monotonic())
            note = call.next(max(0.0, min(until)))
            if note is not None:
                return note
            self._notice(client, call)
            if time.monotonic() >= due:
                return None

    def follow(self, client: Caller, call: Call, steps: Steps[T]) -> T:
        """Waits for the notes of a call on behalf of `steps`, and returns the result of `steps`."""
        try:
            seconds = next(steps)
            while True:
                seconds = steps.send(self.next(client, call, seconds))
        except StopIteration as end:
            result: T = end.value
            return result

    def _notice(self, client: Caller, call: Call) -> None:
        """No note came: withdraws the call if its time is up, or logs what it waits for."""
        if self._at is not None and self._late is not call and time.monotonic() >= self._at:
            self._late = call
            client.time_out(call, f"its caller gave up after {self._timeout_s:g} s")
            return
        call.quiet = call.quiet or Quiet(call.began_s)
        if call.quiet.is_over:
            client.inquire(call)
