"""The members of a group, in the order of torch's ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pccl import Communicator
from pccl.calls.operands import Ranks
from pccl.protocol.ring import checksum

Listener = Callable[[], None]


class Members:
    """Who is in a communicator's group, as the program knows it.

    pccl's rank is a position in the ring, which `optimize_topology` may change. torch's rank is a
    position in the order in which peers have joined (or in the order that they were started with),
    so it changes only if a peer with a lower rank is lost: the ranks of those that stay close up,
    and newcomers come last. The program learns of a loss by the first collective that notices it,
    which is the same one on all members.

    Attributes:
        own: the number of this peer in its run; 0 before it has joined.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.own = 0
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._order: tuple[int, ...] = (self.own,)

    def enter(self) -> None:
        """This peer has joined the run: it knows itself."""
        self.own = self._comm.parts.membership.client("rank").number
        self._order = (self.own,)

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the peers, by torch's rank."""
        return self._order

    @property
    def rank(self) -> int:
        """torch's rank of this peer."""
        return self._order.index(self.own)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._order)

    def arrange(self, order: Sequence[int]) -> None:
        """All members agree on this order."""
        with self._lock:
            changed = tuple(order) != self._order
            self._order = tuple(order)
        if changed:
            self._tell()

    def refresh(self) -> None:
        """Forgets those that are lost; newcomers, whom `arrange` adds, stay unknown."""
        present = set(self.ring())
        with self._lock:
            remaining = tuple(number for number in self._order if number in present)
            changed = remaining != self._order
            self._order = remaining
        if changed:
            self._tell()

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after each change."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def ring(self) -> tuple[int, ...]:
        """The peers of the group by their position in the ring, as the master says just now."""
        client = self._comm.parts.membership.client("rank")
        plan = client.plan
        return plan.rings[0].order if plan.rings else (client.number,)

    def known_ring(self) -> tuple[int, ...]:
        """The known members by their position in the ring.

        If one of them is lost, their number is out of date, and so a collective that depends on
        ranks fails on all members alike. Their order does not matter then.
        """
        ring = self.ring()
        return ring if set(ring) == set(self._order) else self._order

    def ranks(self, ring: tuple[int, ...]) -> Ranks:
        """What a collective must know of a ring."""
        return Ranks(ring.index(self.own), len(ring), ring.index(min(ring)), checksum(ring))
