"""The master of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from pccl.protocol.master import Master
from pccl.protocol.master.blame import Verdict
from pccl.protocol.master.recovery import Before
from pccl.protocol.master.restart import Restart


class Watched(Master):
    """A master that lets itself be watched when it judges, and when shared state is gone.

    Attributes:
        convicted: told of a peer that has to go, its group's size, and whether that synchronises.
        bereft: told of a group whose shared state is gone; None: all groups have lost theirs.
    """

    convicted: Callable[[int, tuple[int, bool]], None]
    bereft: Callable[[int | None], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dismissals, history = self.run.dismissals, self.run.history
        self._convict, self._lose, self._restore = dismissals.convict, history.lose, history.restore
        dismissals.convict = self._watch_convict
        history.lose, history.restore = self._watch_lose, self._watch_restore
        self._restored = False

    def _watch_convict(self, group: int, verdict: Verdict) -> None:
        size, synchronises = self.run.membership.size(group), self.run.synchronisations.under_way
        self.convicted(verdict.guilty, (size, synchronises(group)))
        self._convict(group, verdict)

    def _watch_lose(self, group: int, numbers: Set[int]) -> bool:
        gone = self._lose(group, numbers)
        if gone:
            self.bereft(group)
        return gone

    def _watch_restore(self, before: Before) -> None:
        self._restore(before)
        self._restored = True
        for group, was in before.groups.items():
            if not was.holders:
                self.bereft(group)

    def _go_on(self, restart: Restart) -> None:
        self._restored = False
        super()._go_on(restart)
        if not self._restored:  # nobody came back
            self.bereft(None)
