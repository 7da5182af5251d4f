"""What a run under faults must know of the program whose copies it disturbs."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Protocol

from pccl.cli.chaos.follower import Watch
from pccl.cli.chaos.stage import Copy

SETTLE_S = 3.0  # a master knows in less whether a copy is still there


class Crew(Protocol):
    """What is known of the program whose copies are disturbed."""

    def command(self, number: int, alive: Sequence[Copy]) -> Sequence[str]:
        """How the copy of that number is started, beside those that live."""

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Marks the copies that could go on alone: they are in the run, and have its state."""

    def group(self, copy: Copy) -> int:
        """Which copies share a state."""

    def leave(self, copy: Copy) -> None:
        """Asks a copy to end."""


class Strangers:
    """Copies of a program of which nothing is known but what their master sees.

    Args:
        command: of each.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._alive: set[int] = set()
        self._changed_s = 0.0

    def command(self, number: int, alive: Sequence[Copy]) -> Sequence[str]:
        """All alike."""
        return self._command

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """All that live are in the run if it has as many peers for a while, and goes on."""
        now_s = time.monotonic()
        alive = {copy.number for copy in copies if copy.ended_s is None}
        disturbed = any(copy.stopped for copy in copies)
        if alive != self._alive or disturbed:
            self._alive, self._changed_s = alive, now_s
        if len(watch.accepted) == len(alive) and watch.last_s > self._changed_s + SETTLE_S:
            for copy in copies:
                if not copy.befell or copy.befell[-1][0] + SETTLE_S < watch.last_s:
                    copy.settled = True

    def group(self, copy: Copy) -> int:
        """All are one group, as far as is known."""
        return 0

    def leave(self, copy: Copy) -> None:
        """SIGTERM, or TerminateProcess."""
        copy.signal(signal.SIGTERM)
