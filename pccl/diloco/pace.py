"""When a peer has trained enough for an outer round."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pccl.support.logs import Reminder

_REMEMBERED = 8  # rounds
_LEAST_PART = 0.1

_log = logging.getLogger("pccl.diloco")


class Pace(Protocol):
    """Is asked after each inner step.

    Attributes:
        late: whether this peer, for which a round is due, has not trained enough.
    """

    late: bool

    def begin(self) -> None:
        """A round has ended, or this peer has joined: it trains."""

    def due(self, inner_step: int) -> bool:
        """Whether the outer round comes after this inner step, the first of which is 1."""

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        """What all peers have told: seconds that they have trained, and steps."""


class Steps:
    """So many inner steps."""

    def __init__(self, inner_steps: int) -> None:
        self.late = False
        self._inner_steps = inner_steps

    def begin(self) -> None:
        """Nothing depends on it."""

    def due(self, inner_step: int) -> bool:
        """After the last one."""
        return inner_step == self._inner_steps

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        """Nothing depends on it."""


class _Clock:
    """Foresees when the next inner step would end: no peer lets the others wait for one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began_s = self._stepped_s = time.monotonic()
        self._longest_s = 0.0

    def step(self) -> None:
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._stepped_s)
        self._stepped_s = now_s

    @property
    def elapsed_s(self) -> float:
        return self._stepped_s - self._began_s

    @property
    def next_s(self) -> float:
        """At most so long after the begin."""
        return self.elapsed_s + self._longest_s


class Seconds:
    """So many seconds: each peer takes the inner steps that it can.

    It stops earlier if one more step would end more than the grace too late.
    """

    def __init__(self, seconds: float, grace: float) -> None:
        self.late = False
        self._seconds = seconds
        self._grace = grace
        self._clock = _Clock()
        self._reminder = Reminder(_log)

    def begin(self) -> None:
        """The seconds count from here."""
        self._clock.begin()

    def due(self, inner_step: int) -> bool:
        """After the seconds, or before a step that would take too long."""
        self._clock.step()
        elapsed_s = self._clock.elapsed_s
        if inner_step == 1 and elapsed_s > self._seconds + self._grace:
            self._reminder.warn(
                f"one inner step of this peer took {elapsed_s:.2f} s, and a round has "
                f"inner_seconds={self._seconds:g}: all other peers wait for it"
            )
        return elapsed_s >= self._seconds or self._clock.next_s > self._seconds + self._grace

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        """Nothing depends on it."""


class Deadline:
    """So many inner steps, unless `enough` peers would have to wait for this one.

    From what the peers tell each other in a round, each knows how long the steps of all take. When
    `enough` of them must have taken theirs, the grace begins; a peer that would take longer ends
    there, late. It goes on in the next round, and is not late in that one.

    Unless the grace is given, it is measured: as much as that time has varied in the last rounds,
    and at least one inner step or a tenth of it.
    """

    def __init__(self, inner_steps: int, enough: int, grace: float | None) -> None:
        self._inner_steps = inner_steps
        self._enough = enough
        self._grace = grace
        self._clock = _Clock()
        self._deadline_s: float | None = None  # after the begin
        self._times: deque[float] = deque(maxlen=_REMEMBERED)  # in which enough have been ready
        self._taken = 0  # inner steps, in rounds for which this peer was late
        self._step = 0
        self.late = False

    def begin(self) -> None:
        """The others have begun, too."""
        self._taken = self._taken + self._step if self.late else 0
        self._step = 0
        self._clock.begin()

    def due(self, inner_step: int) -> bool:
        """After the steps, or at the deadline."""
        self._clock.step()
        self._step = inner_step
        if self._taken + inner_step >= self._inner_steps:
            self.late = False
            return True
        if self._deadline_s is None or self._clock.next_s <= self._deadline_s:
            return False
        self.late = self._taken == 0
        return True

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        """Finds when the next deadline is."""
        needed = sorted(seconds / steps * self._inner_steps for seconds, steps in speeds if steps)
        if needed:
            time_s = needed[min(self._enough, len(needed)) - 1]
            self._times.append(time_s)
            self._deadline_s = time_s + (self._measured() if self._grace is None else self._grace)

    def _measured(self) -> float:
        last = self._times[-1]
        varied = max(self._times) - min(self._times)
        return max(varied, last / self._inner_steps, _LEAST_PART * last)
