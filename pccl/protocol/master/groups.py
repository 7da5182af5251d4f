"""Each group's epoch and rings, and the evidence about the links between its peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.master.blame import Blame
from pccl.protocol.master.history import History
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.numbers import Numbers
from pccl.protocol.master.outbox import Outbox
from pccl.protocol.ring import plan_rings


@dataclass(slots=True)
class Group:
    """The state that the peers of one group share."""

    epoch: int = 0
    rings: tuple[m.Ring, ...] = ()  # as optimised
    planned: tuple[m.Ring, ...] = ()  # as in force in this epoch
    broken: bool = False  # whether a collective has failed in this epoch: its streams are void
    blame: Blame = field(default_factory=Blame)
    rates: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes/s, when last measured


class Groups:
    """The groups that have accepted peers."""

    def __init__(
        self, membership: Membership, numbers: Numbers, history: History, outbox: Outbox
    ) -> None:
        self._membership, self._numbers = membership, numbers
        self._history, self._outbox = history, outbox
        self._groups: dict[int, Group] = {}

    def __getitem__(self, number: int) -> Group:
        return self._groups[number]

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def repair(self, number: int) -> None:
        """Gives a group new streams, if a collective has failed since it got the current ones.

        This is not done at the failure itself: usually a peer has died, which is about to be
        noticed, and the survivors then get new streams anyway.
        """
        if self._groups[number].broken:
            self.renew(number)

    def renew(self, number: int) -> None:
        """Gives a group new streams: its membership has changed, or a collective has failed."""
        group = self._groups.setdefault(number, Group())
        group.epoch, group.broken = self._numbers.take_epoch(), False
        group.planned = self.plan(number)
        peers = tuple(map(self._membership.info, self._membership.accepted(number)))
        nonce = self._numbers.nonce_of_epoch(group.epoch)
        plan = m.Plan(group.epoch, peers, group.planned, self._history.topology, nonce)
        for peer in peers:
            self._outbox.send(peer.peer, plan)

    def plan(self, number: int) -> tuple[m.Ring, ...]:
        """Plans the rings of a group."""
        group = self._groups[number]
        infos = [self._membership.info(one) for one in self._membership.accepted(number)]
        return plan_rings(infos, group.rings, group.blame.cost())

    def proven(self, number: int) -> set[int]:
        """The peers of a group with which a collective has gone around the rings."""
        accepted = self._membership.accepted(number)
        return {one for one in accepted if self._membership.peers[one].proven}

    def restore(self, number: int, rings: tuple[m.Ring, ...]) -> None:
        """Restores a group after a restart; `renew` it next."""
        self._groups[number] = Group(rings=rings)

    def forget(self, number: int) -> None:
        """Forgets a group that is empty."""
        self._groups.pop(number, None)
