"""Peers that cannot reach each other: dials the accused, and drops a peer or has the rings avoid
the link. blame.py says what the evidence proves.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.collectives import Collectives
from pccl.protocol.master.dismissals import Dismissals
from pccl.protocol.master.effects import Dial
from pccl.protocol.master.groups import Group, Groups
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.outbox import Outbox, plain
from pccl.protocol.master.table import CollectiveTable
from pccl.protocol.ring import uses


class Accusations:
    """Collects reports of streams that could not be opened, and acts on the verdicts.

    Args:
        synchronises: whether a group has a synchronisation in progress. Its plan belongs to the
            group's epoch, but has its own streams.
    """

    def __init__(
        self,
        membership: Membership,
        groups: Groups,
        table: CollectiveTable,
        collectives: Collectives,
        outbox: Outbox,
        dismissals: Dismissals,
        synchronises: Callable[[int], bool],
    ) -> None:
        self._membership, self._groups = membership, groups
        self._table, self._collectives = table, collectives
        self._outbox, self._dismissals = outbox, dismissals
        self._synchronises = synchronises

    def unreached(self, number: int, unreached: m.Unreached) -> None:
        """No stream from one peer to another could be opened."""
        peers, accused = self._membership.peers, unreached.peer
        group_number = peers[number].info.group
        group = self._groups[group_number]
        other = peers.get(accused)
        if other is None or not other.accepted or other.info.group != group_number:
            return  # it has gone meanwhile
        if accused == number or unreached.epoch > group.epoch:
            return
        if group.blame.accuse(number, accused, unreached.epoch, plain(unreached.why)):
            if other.info.outgoing:  # which no dial can reach
                group.blame.dialled(accused, None)
            else:
                self._outbox.do(Dial(other.info, other.dial))
        self._judge(group_number)

    def dialled(self, number: int, why: str | None) -> None:
        """A dial has ended: "": the peer was reached; None: no dial was made."""
        peer = self._membership.peers.get(number)
        if peer is None or peer.info.group not in self._groups:
            return  # it has gone meanwhile
        blame = self._groups[peer.info.group].blame
        accusers = [self._membership.info(one) for one, other in blame.blocked if other == number]
        if why and not reach.matters(peer.info, peer.seen, accusers):
            why = None
        blame.dialled(number, plain(why) if why else why)
        self._judge(peer.info.group)

    def _judge(self, group_number: int) -> None:
        """Drops the peer that is at fault, or has the rings avoid the link."""
        while group_number in self._groups:
            group = self._groups[group_number]
            if not group.blame.blocked:
                return
            verdict = group.blame.verdict(self._membership.size(group_number))
            if verdict is None and not self._go_around(group_number, group):
                verdict = group.blame.last_resort(self._groups.proven(group_number))
            if verdict is None:
                return
            self._dismissals.convict(group_number, verdict)

    def _go_around(self, group_number: int, group: Group) -> bool:
        """Has the rings avoid the blocked links, if possible; if necessary, links that were blocked
        before the last success are used again."""
        blame = group.blame
        if uses(self._groups.plan(group_number), blame.blocked):
            blame.forgive()
            if uses(self._groups.plan(group_number), blame.blocked):
                return False
        used = [link for link in blame.blocked if uses(group.planned, (link,))]
        if used and not self._synchronises(group_number):
            a, b = used[0]
            why = f"{self._membership.info(a)} could not reach {self._membership.info(b)}"
            self._outbox.note(f"{why} ({blame.blocked[a, b]}): the rings go another way")
            self._groups.renew(group_number)
            self._collectives.interrupt(self._table.of_group(group_number), why)
        return True
