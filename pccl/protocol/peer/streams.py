"""A peer's streams: for its rings, for receivers of rows, for sends, and others.

The rings' streams belong to an epoch. The first collective of a new epoch closes the old streams
and opens new ones. No call still needs the old streams, because an epoch ends only when no
collective is running or all are interrupted. Direct streams lead to members that are not next on a
ring, and belong to the epoch, too. A peer opens them when it first has rows for these members. If a
direct stream cannot connect, the rows travel around the rings, and no peer is blamed.

When a collective has committed in an epoch, all members have streams of that epoch. From then on, a
peer may send data to its successors before the master starts a collective. The successors hold the
data until the start, and drop it if the epoch ends instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.peer.effects import CloseStream, OpenStream, Outbox
from pccl.protocol.peer.state import AbandonedCalls, Knowledge
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
        self._direct: dict[int, int] = {}  # the direct streams of `epoch`, by peer
        self._unreached: set[int] = set()  # peers that no direct stream can be connected to
        self._sends: dict[int, int] = {}  # the streams of sends, by peer
        self._lost: set[int] = set()  # lost streams that are not closed yet

    def open(self, info: m.PeerInfo, shares: int = 1) -> int:
        stream = self._next
        self._next += 1
        self._outbox.do(OpenStream(stream, info, self._knowledge.plan.nonce, shares))
        return stream

    def close(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._outbox.do(CloseStream(stream))

    def renew(self, epoch: int) -> None:
        """Closes the streams of an epoch, and opens the streams of another one.

        Direct streams are opened when they are needed.
        """
        if self.epoch == epoch:
            return
        self._close_epoch()
        plan = self._knowledge.plan
        infos = {info.peer: info for info in plan.peers}
        to = successors(plan.rings, self._knowledge.number)
        self.ring, self.epoch = tuple(self.open(infos[n]) for n in to), epoch

    def _close_epoch(self) -> None:
        self._clear()
        self.close((*self.ring, *self._direct.values()))
        self.ring = ()
        self._direct.clear()

    @property
    def ready(self) -> bool:
        """True if the successors hold data sent to them before a collective starts."""
        return bool(self.ring) and self.epoch == self.proven == self._knowledge.plan.epoch

    # ---- to receivers of rows ----

    def direct(self, receivers: Collection[int]) -> tuple[int, ...]:
        """Streams to the receivers of this peer's rows, by rank, opened if necessary.

        0: the rows travel around the rings.
        """
        plan, number = self._knowledge.plan, self._knowledge.number
        infos = {info.peer: info for info in plan.peers}
        near = {*successors(plan.rings, number), *self._unreached}
        found: list[int] = []
        for peer in plan.rings[0].order:
            wanted = peer in receivers and peer not in near
            if wanted and peer not in self._direct and not reach.apart(infos[number], infos[peer]):
                self._direct[peer] = self.open(infos[peer], len(receivers))
            found.append(self._direct.get(peer, 0) if wanted else 0)
        return tuple(found)

    def is_direct(self, stream: int) -> bool:
        return stream in self._direct.values()

    def unreached(self, peer: int) -> None:
        self._unreached.add(peer)

    # ---- of sends ----

    def of_send(self, peer: int) -> int:
        """The stream for sends to a peer; opened if necessary. It does not depend on the epoch."""
        self._clear()
        if peer not in self._sends:
            self._sends[peer] = self.open(self._knowledge.info(peer))
        return self._sends[peer]

    def keep(self, peers: Set[int]) -> None:
        self._clear()
        self._unreached.intersection_update(peers)
        gone = self._sends.keys() - peers
        self.close(self._sends.pop(peer) for peer in sorted(gone))

    def lost(self, stream: int) -> None:
        """A direct stream or a send's stream is lost; another is opened when it is needed."""
        for streams in (self._direct, self._sends):
            for peer in [peer for peer, each in streams.items() if each == stream]:
                self._lost.add(streams.pop(peer))

    def _clear(self) -> None:
        self.close(sorted(self._lost))
        self._lost.clear()

    def end(self) -> None:
        """Closes the streams of the epoch and of sends for good."""
        self._close_epoch()
        self.keep(frozenset())


class Common:
    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge, self.outbox = knowledge, Outbox()
        self.streams = Streams(knowledge, self.outbox)
        self.abandoned = AbandonedCalls()
        # calls that the master was asked to take back, and why, until it answers
        self.withdrawals: dict[int, str] = {}


class Part:
    def __init__(self, common: Common) -> None:
        self._knowledge, self._outbox = common.knowledge, common.outbox
        self._streams, self._abandoned = common.streams, common.abandoned
        self._withdrawals = common.withdrawals
