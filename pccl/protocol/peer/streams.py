"""A peer's streams: which are open, and those around its rings.

Streams belong to an epoch. The first collective of a new epoch closes the old ones and opens new
ones; nothing in an old epoch still needs them, because an epoch ends only when no collective is
running or all are interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import CloseStream, OpenStream
from pccl.protocol.peer.knowledge import Knowledge
from pccl.protocol.peer.outbox import Outbox
from pccl.protocol.ring import successors


class Streams:
    """Opens and closes streams.

    Attributes:
        ring: to this peer's successors, one for each ring of `epoch`.
        epoch: their epoch.
    """

    def __init__(self, knowledge: Knowledge, outbox: Outbox) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._next = 1
        self.ring: tuple[int, ...] = ()
        self.epoch = 0

    def open(self, info: m.PeerInfo) -> int:
        """Opens a stream to a peer. Returns its number."""
        stream = self._next
        self._next += 1
        self._outbox.do(OpenStream(stream, info))
        return stream

    def close(self, streams: Iterable[int]) -> None:
        """Closes streams."""
        for stream in streams:
            self._outbox.do(CloseStream(stream))

    def renew(self, epoch: int) -> None:
        """Replaces the rings' streams by those of an epoch, unless they are its already."""
        if self.epoch == epoch:
            return
        self.close(self.ring)
        plan = self._knowledge.plan
        infos = {info.peer: info for info in plan.peers}
        to = successors(plan.rings, self._knowledge.number)
        self.ring, self.epoch = tuple(self.open(infos[n]) for n in to), epoch

    def end(self) -> None:
        """Closes the rings' streams for good."""
        self.close(self.ring)
        self.ring = ()
