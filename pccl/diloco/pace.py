"""Decides when a peer has trained enough for an outer round."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from pccl import TensorInfo
from pccl.diloco.model import Replica
from pccl.diloco.settings import Settings
from pccl.extension import Grace

_REMEMBERED = 8  # the number of rounds whose times are kept
_LEAST_DROP_S = 2.0  # the minimum time before a peer is dropped, with mode="decoupled"
_LEAST_PATIENCE_S = 0.2
_LEAST_PART = 0.1  # a measured grace is at least this fraction of the last of these times

REMINDER_S = 5.0  # between the first two warnings of a kind; each further gap is twice as long
_log = logging.getLogger("pccl.diloco")


class Pace:
    """Decides after each inner step whether an outer round is due: here, after a fixed number.

    The number is known when the round begins, and does not change if a mean is applied meanwhile.
    """

    waits_for_all = True  # whether it waits for all others, however late

    def __init__(self) -> None:
        self.late = False  # whether this peer may arrive before it has taken all its inner steps
        self._inner_steps = 1  # in this round

    def begin(self, inner_steps: int) -> None:
        """Starts a round of `inner_steps`, if the pace counts them."""
        self._inner_steps = inner_steps

    def due(self, inner_step: int) -> bool:
        """True if the outer round comes after this inner step; the first step is 1."""
        return inner_step >= self._inner_steps

    def fraction(self, inner_step: int) -> float:
        """The completed fraction of a round; 0 if it may differ between peers."""
        return min(1.0, inner_step / self._inner_steps)

    @property
    def grace(self) -> Grace | None:
        """How long this peer waits for others when a round is due; None: without limit."""
        return None

    def entries(self) -> list[TensorInfo]:
        return []

    def rejoin(self) -> None:
        """Handles a round that ended without this peer, whose progress goes into the next one."""

    def set_speeds(self, speeds: Sequence[tuple[float, int]]) -> None:
        """Takes the training seconds and inner steps of all peers in the last round."""


class _Clock:
    """Measures inner steps, and predicts when the next one would end at the latest."""

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
    def since_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def elapsed_s(self) -> float:
        return self._stepped_s - self._began_s

    @property
    def next_s(self) -> float:
        """The end of the next step in seconds since `begin`, if it takes as long as the longest."""
        return self.elapsed_s + self._longest_s


class Seconds(Pace):
    """A round is due after a number of seconds, in which each peer takes as many steps as it can.

    The processes of a replica ask the first of them.
    """

    def __init__(self, seconds: float, grace: float, enough: int | None, replica: Replica) -> None:
        super().__init__()
        self.waits_for_all = enough is None
        self._replica = replica
        self._enough = enough
        self._seconds = seconds
        self._grace = grace
        self._clock = _Clock()
        self._reminder = Reminder(_log)

    def begin(self, inner_steps: int) -> None:
        self._clock.begin()

    def fraction(self, inner_step: int) -> float:
        return 0.0

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
        late = self._clock.next_s > self._seconds + self._grace
        return bool(self._replica.first(int(late or elapsed_s >= self._seconds)))


class Deadline(Pace):
    """A round is due after a number of inner steps, or when `enough` peers would wait for this one:
    see docs/howto/diloco.md, "Machines that are not alike".

    With several fragments a peer is never late, but contributes its progress so far: otherwise it
    could always be late for the same fragments.
    """

    waits_for_all = False

    def __init__(self, enough: int, grace: float | None, fragments: int) -> None:
        super().__init__()
        self._enough = enough
        self._may_be_late = fragments == 1
        self._given_s = grace
        self._clock = _Clock()
        # times until enough peers were ready in the last rounds, the newest last; 0: unknown
        self._times_s = np.zeros(_REMEMBERED)
        self._taken = 0  # inner steps in the preceding rounds for which this peer was late
        self._owes = False  # whether it was late for the last round
        self._step = 0

    def entries(self) -> list[TensorInfo]:
        return [TensorInfo.from_numpy(self._times_s, "diloco.pace.times")]

    def begin(self, inner_steps: int) -> None:
        super().begin(inner_steps)
        self._owes = self.late
        self._taken = self._taken + self._step if self.late else 0
        self._step = 0
        self._clock.begin()

    def rejoin(self) -> None:
        """Restarts the count of inner steps, like the others."""
        self.late, self._taken, self._step = self._may_be_late, 0, 0

    def due(self, inner_step: int) -> bool:
        self._clock.step()
        self._step = inner_step
        if self._taken + inner_step >= self._inner_steps:
            self.late = False
            return True
        grace_s = self._grace_s
        if grace_s is None or not self._times_s[-1]:
            return False
        if self._clock.next_s <= self._times_s[-1] + grace_s:
            return False
        self.late = self._may_be_late and not self._owes
        return True

    def set_speeds(self, speeds: Sequence[tuple[float, int]]) -> None:
        needed = sorted(seconds / steps * self._inner_steps for seconds, steps in speeds if steps)
        if needed:
            self._times_s[:-1] = self._times_s[1:]
            self._times_s[-1] = needed[min(self._enough, len(needed)) - 1]

    @property
    def grace(self) -> Grace | None:
        """None if it is not measured yet, or if this peer itself is late."""
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
        return max(float(np.ptp(known)), last / self._inner_steps, _LEAST_PART * last)


class Forecast(Deadline):
    """The pace of a syncer: it takes part in a meeting when its learner has taken its inner steps,
    or when part of the grace has passed since the time forecast for `enough` learners.

    A peer that does not come is dropped after the grace; if none is given, after four times the
    measured one and at least two seconds, because no learner waits for it.
    """

    def __init__(self, enough: int, grace: float | None) -> None:
        super().__init__(enough, grace, fragments=0)
        self.patient = False  # whether this peer waits for all others

    def begin(self, inner_steps: int) -> None:
        self._inner_steps = inner_steps

    def fraction(self, inner_step: int) -> float:
        return 0.0

    def mark(self) -> None:
        """Records a meeting of all syncers, which starts the time until the next."""
        self._clock.begin()

    def left_s(self) -> float | None:
        """The seconds for which the syncer still waits for its learner; None: without limit."""
        grace_s = self._grace_s
        if grace_s is None or not self._times_s[-1]:
            return None
        wait_s = min(grace_s / 2, self._drop_s(grace_s) / 4)
        return float(self._times_s[-1]) + wait_s - self._clock.since_s

    def patience_s(self, step_s: float) -> float:
        """The seconds for which it then waits for the end of an inner step of about `step_s`."""
        return min(max(_LEAST_PATIENCE_S, 2 * step_s), self._drop_s(self._grace_s or 0.0) / 2)

    def _drop_s(self, grace_s: float) -> float:
        return grace_s if self._given_s is not None else max(4 * grace_s, _LEAST_DROP_S)

    @property
    def grace(self) -> Grace | None:
        seconds = self._grace_s
        if seconds is None or self.patient:
            return None
        return Grace(self._enough, self._drop_s(seconds))


def pace_of(settings: Settings, replica: Replica) -> Pace:
    if settings.inner_seconds is not None:
        seconds = settings.inner_seconds / settings.fragments
        return Seconds(seconds, settings.grace or 0.0, settings.deadline_peers, replica)
    if settings.mode == "decoupled":
        return Forecast(settings.deadline_peers or 1, settings.grace)
    if settings.deadline_peers is not None:
        return Deadline(settings.deadline_peers, settings.grace, settings.fragments)
    return Pace()


class Reminder:
    """Limits a repeated warning: it is logged at once, and then after growing gaps."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Treats the next message as new."""
        self._next_s, self._gap_s = 0.0, REMINDER_S

    def warn(self, text: str) -> None:
        """Logs the warning if it is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._log.warning(text)
            if self._next_s:
                self._gap_s *= 2
            self._next_s = now_s + self._gap_s
