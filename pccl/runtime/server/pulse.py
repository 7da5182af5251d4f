"""Notices that this process did not run for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


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
