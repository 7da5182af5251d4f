"""A peer's streams: those around its rings, those of sends, and others that are opened one by one.

The rings' streams belong to an epoch. The first collective of a new epoch closes the old ones and
opens new ones; nothing in an old epoch still needs them, because an epoch ends only when no
collective is running or all are interrupted.

When a collective has committed in an epoch, all members have streams of that epoch. From then on a
peer may send data to its successors before the master has started a collective. The successors hold
the data until the collective starts, and drop it if the epoch ends instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import CloseStream, OpenStream, Outbox
from pccl.protocol.peer.state import Knowledge
from pccl.protocol.ring import successors


class Streams:
    """Opens and closes streams.

    Attributes:
        ring: the streams to this peer's successors, one for each ring of `epoch`.
        epoch: the epoch of these streams.
        proven: the epoch of the last collective that has committed; 0: the last one has failed.
    """

    def __init__(self, knowledge: Knowledge, outbox: Outbox) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._next = 1
        self.ring: tuple[int, ...] = ()
        self.epoch = self.proven = 0
        self._direct: dict[int, int] = {}  # the streams of sends, by peer
        self._lost: set[int] = set()  # lost streams of sends that are not closed yet

    def open(self, info: m.PeerInfo) -> int:
        """Opens a stream to a peer. Returns its number."""
        stream = self._next
        self._next += 1
        self._outbox.do(OpenStream(stream, info, self._knowledge.plan.nonce))
        return stream

    def close(self, streams: Iterable[int]) -> None:
        """Closes streams."""
        for stream in streams:
            self._outbox.do(CloseStream(stream))

    def renew(self, epoch: int) -> None:
        """Replaces the rings' streams by those of an epoch, unless they are of that epoch."""
        if self.epoch == epoch:
            return
        self.close(self.ring)
        plan = self._knowledge.plan
        infos = {info.peer: info for info in plan.peers}
        to = successors(plan.rings, self._knowledge.number)
        self.ring, self.epoch = tuple(self.open(infos[n]) for n in to), epoch

    @property
    def ready(self) -> bool:
        """True if the successors hold data that is sent to them before a collective starts."""
        return bool(self.ring) and self.epoch == self.proven == self._knowledge.plan.epoch

    # ---- of sends ----

    def direct(self, peer: int) -> int:
        """The stream for sends to a peer; opened if necessary. It does not depend on the epoch."""
        self._clear()
        if peer not in self._direct:
            self._direct[peer] = self.open(self._knowledge.info(peer))
        return self._direct[peer]

    def keep(self, peers: Iterable[int]) -> None:
        """Closes the streams of sends to all other peers, which have left the group."""
        self._clear()
        gone = self._direct.keys() - set(peers)
        self.close(self._direct.pop(peer) for peer in sorted(gone))

    def lost(self, stream: int) -> None:
        """The stream of a send is lost; the next send opens another one."""
        for peer in [peer for peer, each in self._direct.items() if each == stream]:
            self._lost.add(self._direct.pop(peer))

    def _clear(self) -> None:
        self.close(sorted(self._lost))
        self._lost.clear()

    def end(self) -> None:
        """Closes the rings' streams, and those of sends, for good."""
        self.close(self.ring)
        self.ring = ()
        self.keep(())
