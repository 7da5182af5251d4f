"""API calls in progress, each shared by its waiting caller and the control thread; and their cost.

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
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias, TypeVar

from pccl.errors import PCCLError
from pccl.insight import Sample, Stats
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
            if self.left_s == 0 and self._late is not call and call.end is None:
                self._late = call  # even if there is a note: notes may come without a pause
                client.time_out(call, f"its caller gave up after {self._timeout_s:g} s")
            if note is not None:
                return note
            call.quiet = call.quiet or Quiet(call.began_s)
            if call.quiet.is_over:
                client.inquire(call)
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


SAMPLES = 64
NO_CPU = -1.0


@dataclass(slots=True)
class _Marks:
    """The times of a collective under way, and the engine's processor time then."""

    what: str
    small: bool
    started_s: float
    cpu_s: float = NO_CPU
    held_s: float = 0.0
    held_cpu_s: float = NO_CPU


class CallMetrics:
    """The cost of one membership's calls: counted by the control thread, read by any thread.

    A collective has three spans. They end when all peers have entered it (the start vote), when
    this peer holds the whole result (its data has moved), and when all hold it (the finish vote). A
    small collective, whose data travels with the votes, has only the first span.

    Args:
        engine_s: processor time of the engine's thread so far; below 0 where it is not known.

    `Stats` and `Explanation` are made from the public attributes.
    """

    def __init__(self, engine_s: Callable[[], float]) -> None:
        self._engine_s = engine_s
        self.collectives: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.tx_bytes = self.rx_bytes = self.syncs = self.recoveries = 0
        self.sync_seconds = self.recovery_seconds = 0.0
        self.entering_seconds = self.moving_seconds = self.finishing_seconds = 0.0
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)  # the last collectives
        self._marks: dict[int, _Marks] = {}
        self._failed_s: float | None = None
        self.moved_s = 0.0  # how long collectives have moved data since the streams were opened
        self._moving: set[int] = set()
        self._moving_since_s = 0.0

    def stats(self) -> Stats:
        """A copy, from any thread."""
        found = {one.name: getattr(self, one.name) for one in fields(Stats)}
        found |= {"collectives": dict(self.collectives), "failures": dict(self.failures)}
        return Stats(**found)

    # ---- what the control thread sees ----

    def opened(self) -> None:
        """A stream is opened: the counts of its connections begin at 0."""
        self.moved_s, self._moving_since_s = 0.0, time.monotonic()

    def started(self, call: int, what: str) -> None:
        """The data of a collective begins to move."""
        now_s = time.monotonic()
        if not self._moving:
            self._moving_since_s = now_s
        self._moving.add(call)
        self._marks[call] = _Marks(what, False, now_s, self._engine_s())
        self._recovered(now_s)

    def stored(self, call: int, what: str) -> None:
        """The result of a small collective came with the votes."""
        now_s = time.monotonic()
        self._marks[call] = _Marks(what, True, now_s, held_s=now_s)
        self._recovered(now_s)

    def held(self, op: int) -> None:
        marks = self._marks.get(op)
        if marks is not None:
            marks.held_s, marks.held_cpu_s = time.monotonic(), self._engine_s()
            self._stopped(op, marks.held_s)

    def ended(self, end: effects.Answer | effects.Fail, began_s: float) -> None:
        """A call that began at `began_s` has ended."""
        now_s, marks = time.monotonic(), self._marks.pop(end.call, None)
        self._stopped(end.call, now_s)
        if isinstance(end, effects.Fail):
            self.failures[end.fault.name.lower()] += 1
            if end.again and self._failed_s is None:
                self._failed_s = now_s
        elif isinstance(end.value, effects.Reduced) and marks is not None:
            self._count(end.value, marks, began_s, now_s)
        elif isinstance(end.value, effects.Synced):
            self.syncs += 1
            self.sync_seconds += now_s - began_s
            self.tx_bytes += end.value.tx_bytes
            self.rx_bytes += end.value.rx_bytes

    def _count(self, value: effects.Reduced, marks: _Marks, began_s: float, now_s: float) -> None:
        held_s = marks.held_s or now_s
        known = min(marks.cpu_s, marks.held_cpu_s) >= 0
        sample = Sample(
            marks.what,
            value.world_size,
            value.tx_bytes,
            marks.small,
            max(0.0, marks.started_s - began_s),
            held_s - marks.started_s,
            now_s - held_s,
            marks.held_cpu_s - marks.cpu_s if known else None,
        )
        self.samples.append(sample)
        self.collectives[sample.what] += 1
        self.tx_bytes += value.tx_bytes
        self.rx_bytes += value.rx_bytes
        self.entering_seconds += sample.entering_s
        self.moving_seconds += sample.moving_s
        self.finishing_seconds += sample.finishing_s

    def _stopped(self, op: int, now_s: float) -> None:
        if op in self._moving:
            self._moving.discard(op)
            if not self._moving:
                self.moved_s += now_s - self._moving_since_s

    def _recovered(self, now_s: float) -> None:
        if self._failed_s is not None:
            self.recoveries += 1
            self.recovery_seconds += now_s - self._failed_s
            self._failed_s = None
