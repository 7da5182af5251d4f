"""When a peer has trained enough for an outer round, in modes without fragments."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from pccl import TensorInfo
from pccl.diloco.model import Replica
from pccl.diloco.settings import Settings
from pccl.extension import Grace
from pccl.support.logs import Reminder

_REMEMBERED = 8  # rounds
_LEAST_PART = 0.1

_log = logging.getLogger("pccl.diloco")


class Pace(ABC):
    """Is asked after each inner step.

    Attributes:
        late: whether this peer, for which a round is due, has not trained enough.
        waits_for_all: whether rounds wait for all peers, however late they are.
    """

    def __init__(self, waits_for_all: bool = True) -> None:
        self.late = False
        self.waits_for_all = waits_for_all

    @abstractmethod
    def due(self, inner_step: int) -> bool:
        """True if the outer round comes after this inner step; the first step is 1."""

    def fraction(self, inner_step: int) -> float:
        """The part of a round that so many inner steps are; the same on all peers, or 0."""
        return 0.0

    @property
    def grace(self) -> Grace | None:
        """How long this peer, for which a round is due, waits for others; None: without end."""
        return None

    def entries(self) -> list[TensorInfo]:
        """The entries that a newcomer needs."""
        return []

    def begin(self) -> None:
        """A round has ended, or this peer has joined: it trains."""

    def rejoin(self) -> None:
        """A round has ended without this peer, and its progress is in the next one."""

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        """Takes the values of all peers: seconds that they have trained, and steps."""


class Steps(Pace):
    """So many inner steps."""

    def __init__(self, inner_steps: Callable[[], int]) -> None:
        super().__init__()
        self._inner_steps = inner_steps  # of this round

    def fraction(self, inner_step: int) -> float:
        return min(1.0, inner_step / self._inner_steps())

    def due(self, inner_step: int) -> bool:
        return inner_step == self._inner_steps()


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


class Seconds(Pace):
    """So many seconds: each peer takes the inner steps that it can.

    It stops earlier if one more step would end more than the grace too late. With `enough`, a round
    waits for others no longer than the grace once so many have come.
    """

    def __init__(self, seconds: float, grace: float, enough: int | None = None) -> None:
        super().__init__(waits_for_all=enough is None)
        self._enough = enough
        self._seconds = seconds
        self._grace = grace
        self._clock = _Clock()
        self._reminder = Reminder(_log)

    def begin(self) -> None:
        self._clock.begin()

    @property
    def grace(self) -> Grace | None:
        return None if self._enough is None else Grace(self._enough, self._grace)

    def due(self, inner_step: int) -> bool:
        self._clock.step()
        elapsed_s = self._clock.elapsed_s
        if inner_step == 1 and elapsed_s > self._seconds + self._grace:
            self._reminder.warn(
                f"one inner step of this peer took {elapsed_s:.2f} s, and a round has "
                f"inner_seconds={self._seconds:g}: all other peers wait for it"
            )
        return elapsed_s >= self._seconds or self._clock.next_s > self._seconds + self._grace


class Deadline(Pace):
    """So many inner steps, unless `enough` peers would have to wait for this one.

    From what the peers tell each other in a round, each knows how long the steps of all take. When
    `enough` of them must have taken theirs, the grace begins; a peer that would take longer ends
    there, late. It goes on in the next round, and is not late in that one.

    That is a forecast, which saves a peer from being dropped: once `enough` have come, those that
    are ready wait for the others no longer than the grace.

    Unless the grace is given, it is measured: as much as that time has varied in the last rounds,
    and at least one inner step or a tenth of it.
    """

    def __init__(self, inner_steps: Callable[[], int], enough: int, grace: float | None) -> None:
        super().__init__(waits_for_all=False)
        self._inner_steps = inner_steps
        self._enough = enough
        self._given_s = grace
        self._clock = _Clock()
        # in which enough have been ready, the last one last; 0: not known
        self._times_s = np.zeros(_REMEMBERED)
        self._taken = 0  # inner steps, in rounds for which this peer was late
        self._owes = False  # whether it was late for the last one
        self._step = 0

    def entries(self) -> list[TensorInfo]:
        return [TensorInfo.from_numpy(self._times_s, "diloco.pace.times")]

    def begin(self) -> None:
        self._owes = self.late
        self._taken = self._taken + self._step if self.late else 0
        self._step = 0
        self._clock.begin()

    def rejoin(self) -> None:
        """It does not go on with the same inner steps: others have begun with all of theirs."""
        self.late, self._taken, self._step = True, 0, 0

    def fraction(self, inner_step: int) -> float:
        return min(1.0, inner_step / self._inner_steps())

    def due(self, inner_step: int) -> bool:
        self._clock.step()
        self._step = inner_step
        if self._taken + inner_step >= self._inner_steps():
            self.late = False
            return True
        grace_s = self._grace_s
        if grace_s is None or not self._times_s[-1]:
            return False
        if self._clock.next_s <= self._times_s[-1] + grace_s:
            return False
        self.late = not self._owes
        return True

    def heard(self, speeds: Sequence[tuple[float, int]]) -> None:
        needed = sorted(seconds / steps * self._inner_steps() for seconds, steps in speeds if steps)
        if needed:
            self._times_s[:-1] = self._times_s[1:]
            self._times_s[-1] = needed[min(self._enough, len(needed)) - 1]

    @property
    def grace(self) -> Grace | None:
        """None if it is to be measured and was not yet, or if this peer is late itself."""
        seconds = self._grace_s
        return None if seconds is None or self.late else Grace(self._enough, seconds)

    @property
    def _grace_s(self) -> float | None:
        if self._given_s is not None:
            return self._given_s
        known = self._times_s[self._times_s > 0]
        if not known.size:
            return None
        last = float(known[-1])
        return max(float(np.ptp(known)), last / self._inner_steps(), _LEAST_PART * last)


class LeaderClock(Pace):
    """The pace of the replica's first process, which the others ask after each inner step."""

    def __init__(self, pace: Pace, replica: Replica) -> None:
        super().__init__()
        self._pace = pace
        self._replica = replica

    def begin(self) -> None:
        self._pace.begin()

    def due(self, inner_step: int) -> bool:
        return bool(self._replica.first(int(self._pace.due(inner_step))))


def pace_of(settings: Settings, replica: Replica, outer_step: Callable[[], int]) -> Pace:
    if settings.inner_seconds is not None:
        pace = Seconds(settings.inner_seconds, settings.grace or 0.0, settings.deadline_peers)
        return LeaderClock(pace, replica) if replica.size > 1 else pace

    def inner_steps() -> int:
        return settings.steps_at(outer_step())

    if settings.deadline_peers is not None:
        return Deadline(inner_steps, settings.deadline_peers, settings.grace)
    return Steps(inner_steps)
