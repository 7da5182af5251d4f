"""Has the engine say how far its ops are, for the master to show: only of those that take long."""

from __future__ import annotations

import time

from pccl.protocol.peer import Peer
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine


class Progress:
    """Asks about each op that is under way at two looks in a row.

    Attributes:
        due_s: when to look next; None: nothing is under way.
    """

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer
        self._before: set[int] = set()  # what was under way at the last look
        self.due_s: float | None = None

    def tick(self) -> bool:
        """Looks, if it is time to. Whether the engine was asked."""
        if not self._peer.moves:
            self.due_s = None
            return False
        now_s = time.monotonic()
        if self.due_s is None:
            self.due_s, self._before = now_s + limits.PROGRESS_LOOK_S, set(self._peer.moving)
        if now_s < self.due_s:
            return False
        moving = set(self._peer.moving)
        lasting, self._before = moving & self._before, moving
        self.due_s = now_s + limits.PROGRESS_LOOK_S
        for op in lasting:
            self._engine.tell(op)
        return bool(lasting)
