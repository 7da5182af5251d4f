"""Detects that this process did not run for a while.

Three clocks, three jobs. Waiting is measured by `time.monotonic`. Sleep of the machine is seen by
a clock that goes on meanwhile, as `time.monotonic` does not on Linux and macOS. The wall clock only
dates what is written for people: it may be set at any moment, so nothing is measured by it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger("pccl")

Clock = Callable[[], float]


def _running() -> float:
    return time.monotonic()


def elapsed() -> float:
    """Seconds, counted on while the machine sleeps; no change of the wall clock moves it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # this one counts sleep there; Python's monotonic() does not
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


class Pause(NamedTuple):
    """How long a loop did not run, in seconds.

    Attributes:
        running_s: by `time.monotonic`: what would count against those it waits for.
        elapsed_s: with the sleep of the machine.
    """

    running_s: float = 0.0
    elapsed_s: float = 0.0


class Pulse:
    """Distinguishes a loop's pauses (the process was stopped, the machine asleep) from its waits.

    Args:
        limit_s: shorter pauses do not count.
        running, elapsed: the clocks; others for tests.
    """

    def __init__(self, limit_s: float, running: Clock = _running, elapsed: Clock = elapsed) -> None:
        self._limit_s = limit_s
        self._clocks = running, elapsed
        self._at = running(), elapsed()

    def beat(self, waited_s: float) -> Pause:
        """To be called after each wait of the loop, which should have lasted at most `waited_s`.

        Returns:
            The pause; zero up to the limit.
        """
        before = self._at
        running, elapsed = self._clocks
        self._at = running(), elapsed()
        pause = Pause(*(now - then - waited_s for now, then in zip(self._at, before, strict=True)))
        if max(pause) <= self._limit_s:
            return Pause()
        return Pause(max(0.0, pause.running_s), max(pause))


class Pauses:
    """The times in which this process did not run, which must not count against peers.

    Args:
        timeout_s: after which others consider this process lost.

    Attributes:
        total_s: the sum of all pauses, as far as `time.monotonic` has counted them: less this, it
            is the time that the process has run.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pulse = Pulse(timeout_s / 2)
        self._woke_s: float | None = None  # the end of the latest pause
        self.total_s = 0.0

    def feel(self, waited_s: float = 0.0) -> None:
        """To be called after each wait, which should have lasted at most `waited_s`, and before
        whatever depends on pauses: they come at any moment."""
        pause = self._pulse.beat(waited_s)
        if pause.elapsed_s:
            log.warning(
                "master: it did not run for %.1f s: its process was stopped, or the machine was "
                "asleep or busy",
                pause.elapsed_s,
            )
            self.total_s += pause.running_s
            self._woke_s = time.monotonic()

    @property
    def woke_lately(self) -> bool:
        """True if a pause of this process explains connections that break now."""
        return self._woke_s is not None and time.monotonic() - self._woke_s < 2 * self._timeout_s

    def dealt_with(self) -> None:
        """The pause was handled: connections that break from now on have other reasons."""
        self._woke_s = None
