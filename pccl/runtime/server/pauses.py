"""Detects pauses of this process: it was stopped, or the machine was asleep.

The master uses three clocks. `time.monotonic` measures waits; on Linux and macOS it does not count
the machine's sleep. `elapsed` does. The wall clock may be set at any moment, so it only dates texts
for people.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

log = logging.getLogger("pccl")

Clock = Callable[[], float]


def elapsed() -> float:
    """Seconds, including the sleep of the machine. Setting the wall clock does not change it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # this clock counts sleep there; Python's monotonic() does not
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


class Pauses:
    """The pauses of this process, which must not count against peers.

    A pause counts if it is longer than half the timeout.

    Args:
        timeout_s: the time after which peers consider this process lost.
        running, elapsed: the clocks; tests pass others.
    """

    def __init__(
        self, timeout_s: float, running: Clock = time.monotonic, elapsed: Clock = elapsed
    ) -> None:
        self._timeout_s = timeout_s
        self._running, self._elapsed = running, elapsed
        self._checked = running(), elapsed()
        self._woke_s: float | None = None  # the end of the latest pause
        # the sum of all pauses by `time.monotonic`; without it, the clock shows how long the
        # process has run
        self.total_s = 0.0

    def check(self, waited_s: float = 0.0) -> None:
        """Looks for a pause since the last check.

        Call it after each wait, and before anything that depends on pauses.

        Args:
            waited_s: the time limit of the longest wait since the last check.
        """
        running_s, elapsed_s = self._checked
        self._checked = self._running(), self._elapsed()
        running_s = self._checked[0] - running_s - waited_s
        elapsed_s = self._checked[1] - elapsed_s - waited_s
        if max(running_s, elapsed_s) > self._timeout_s / 2:
            log.warning(
                "master: it did not run for %.1f s: its process was stopped, or the machine was "
                "asleep or busy",
                max(running_s, elapsed_s),
            )
            self.total_s += max(0.0, running_s)
            self._woke_s = self._running()

    @property
    def woke_lately(self) -> bool:
        """True if a pause of this process explains connections that break now."""
        return self._woke_s is not None and self._running() - self._woke_s < 2 * self._timeout_s

    def dealt_with(self) -> None:
        """The pause was handled: connections that break later have other reasons."""
        self._woke_s = None
