"""Detects that this process did not run for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("pccl")


def _clocks() -> list[Callable[[], float]]:
    """Several clocks: some stand still while the machine sleeps, and some jump afterwards."""
    clocks: list[Callable[[], float]] = [time.monotonic, time.time]
    if hasattr(time, "CLOCK_BOOTTIME"):
        clocks.append(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    return clocks


class Pulse:
    """Tells a pause of a loop from its waiting: the process was stopped, or its machine asleep.

    Args:
        limit_s: pauses from here on count.
        clocks: what tells the time; for tests.
    """

    def __init__(self, limit_s: float, clocks: Sequence[Callable[[], float]] | None = None) -> None:
        self._limit_s = limit_s
        self._clocks = _clocks() if clocks is None else clocks
        self._at = [clock() for clock in self._clocks]

    def beat(self, waited_s: float) -> float:
        """To be called after each waiting of the loop, which was to last no longer than this.

        Returns:
            How long the loop did not run, in seconds; 0.0 if not for longer than the limit.
        """
        before, self._at = self._at, [clock() for clock in self._clocks]
        paused_s = max(now - then for now, then in zip(self._at, before, strict=True)) - waited_s
        return paused_s if paused_s > self._limit_s else 0.0


class Pauses:
    """The times in which this process did not run. They count against nobody.

    Args:
        timeout_s: after which others take this process for lost.

    Attributes:
        total_s: of all of them.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pulse = Pulse(timeout_s / 2)
        self._woke_s: float | None = None  # when the last one ended
        self.total_s = 0.0

    def feel(self, waited_s: float) -> None:
        """To be called after each waiting, which was to last no longer than this."""
        paused_s = self._pulse.beat(waited_s)
        if paused_s:
            log.warning(
                "master: it did not run for %.1f s: its process was stopped, or the machine was "
                "asleep or busy",
                paused_s,
            )
            self.total_s += paused_s
            self._woke_s = time.monotonic()

    @property
    def woke_lately(self) -> bool:
        """Whether connections that break now do so for a pause of this process."""
        return self._woke_s is not None and time.monotonic() - self._woke_s < 2 * self._timeout_s

    def dealt_with(self) -> None:
        """Its consequences have been drawn: what breaks from now on does so for other reasons."""
        self._woke_s = None
