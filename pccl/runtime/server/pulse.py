"""Detects that this process did not run for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("pccl")


def _clocks() -> list[Callable[[], float]]:
    """Several clocks: some stop while the machine sleeps, and some jump afterwards."""
    clocks: list[Callable[[], float]] = [time.monotonic, time.time]
    if hasattr(time, "CLOCK_BOOTTIME"):
        clocks.append(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    return clocks


class Pulse:
    """Distinguishes a loop's pauses (the process was stopped, the machine asleep) from its waits.

    Args:
        limit_s: shorter pauses do not count.
        clocks: for tests.
    """

    def __init__(self, limit_s: float, clocks: Sequence[Callable[[], float]] | None = None) -> None:
        self._limit_s = limit_s
        self._clocks = _clocks() if clocks is None else clocks
        self._at = [clock() for clock in self._clocks]

    def beat(self, waited_s: float) -> float:
        """To be called after each wait of the loop, which should have lasted at most `waited_s`.

        Returns:
            How long the loop did not run, in seconds; 0.0 up to the limit.
        """
        before, self._at = self._at, [clock() for clock in self._clocks]
        paused_s = max(now - then for now, then in zip(self._at, before, strict=True)) - waited_s
        return paused_s if paused_s > self._limit_s else 0.0


class Pauses:
    """The times in which this process did not run, which must not count against peers.

    Args:
        timeout_s: after which others consider this process lost.

    Attributes:
        total_s: the sum of all pauses.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pulse = Pulse(timeout_s / 2)
        self._woke_s: float | None = None  # the end of the latest pause
        self.total_s = 0.0

    def feel(self, waited_s: float = 0.0) -> None:
        """To be called after each wait, which should have lasted at most `waited_s`, and before
        whatever depends on pauses: they come at any moment."""
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
        """Whether a pause of this process explains connections that break now."""
        return self._woke_s is not None and time.monotonic() - self._woke_s < 2 * self._timeout_s

    def dealt_with(self) -> None:
        """The pause was handled: connections that break from now on have other reasons."""
        self._woke_s = None
