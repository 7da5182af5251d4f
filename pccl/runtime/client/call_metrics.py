"""The cost of this peer's calls: counted by the control thread, read by any thread.

A collective has three spans. They end when all peers have entered it (the start vote), when this
peer holds the whole result (its data has moved), and when all hold it (the finish vote). A small
collective, whose data travels with the votes, has only the first span.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from pccl.insight import Sample, Stats
from pccl.protocol.peer import effects

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
    """Counts of one membership.

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
