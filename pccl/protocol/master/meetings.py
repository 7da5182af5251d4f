"""Peers to which nobody can connect, and those that have something to send to them.

Such a peer connects itself, to a meeting point that reach.py chooses: the master passes on where.
Two that are apart need a third peer that relays. If there is none, the rings do without their
link, and where that is impossible their calls fail, before anything has begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.outbox import Outbox
from pccl.protocol.topology import hops


class Meetings:
    """Tells peers where they meet.

    Args:
        membership: the peers.
        outbox: collects effects.
    """

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self._membership, self._outbox = membership, outbox

    @property
    def relays(self) -> list[m.PeerInfo]:
        """The peers that relay."""
        infos = map(self._membership.info, self._membership.accepted())
        return [info for info in infos if info.relay]

    def meet(self, number: int, meet: m.Meet) -> None:
        """A peer has something to send to one to which it cannot connect."""
        sender = self._membership.info(number)
        if not self._membership.has(meet.peer, sender.group):
            return  # it has gone meanwhile
        receiver = self._membership.info(meet.peer)
        for to, message in reach.meeting(sender, receiver, meet, self.relays):
            self._outbox.send(to.peer, message)

    def severed(self, pairs: Iterable[tuple[int, int]]) -> str:
        """Why some peers cannot send to others, by pairs of which one must; empty if all can."""
        for pair in pairs:
            one, other = map(self._membership.info, pair)
            if reach.apart(one, other) and not self.relays:
                return reach.severed(one, other)
        return ""

    def broken(self, rings: Iterable[m.Ring]) -> str:
        """The same, for those that are neighbours in rings."""
        return self.severed(hop for ring in rings for hop in hops(ring.order))
