"""Has the engine say how far its ops are, for the master to show: only of those that take long."""

from __future__ import annotations

import time

from pccl.protocol.peer import Peer
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine


class Progress:
    """Asks about each op that is under way at two looks in a row.

    Attributes:
        due_s: when to look next; None: nothing was under way.
    """

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer
        self._before: set[int] = set()  # what was under way at the last look
        self.due_s: float | None = None

    def tick(self) -> None:
        """Looks, if it is time to."""
        now_s = time.monotonic()
        if self.due_s is None:
            if self._peer.moves:
                self.due_s, self._before = now_s + limits.PROGRESS_LOOK_S, set(self._peer.moving)
        elif now_s >= self.due_s:
            moving = set(self._peer.moving)
            for op in moving & self._before:
                self._engine.query(op)
            self.due_s = now_s + limits.PROGRESS_LOOK_S if self._peer.moves else None
            self._before = moving
