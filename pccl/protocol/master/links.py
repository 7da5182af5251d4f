"""Each group's epoch and rings, the evidence about the links between its peers, and who is dropped
for it.

A peer that cannot open a stream to another one reports it. One report proves little: the fault may
lie with the accused (a firewall, a wrong address), with the accuser (it can connect to no peer), or
between the two. So the master dials the accused itself, and meanwhile the rings avoid the link. No
peer is dropped yet, because a peer that is really at fault fails in the other rings too. The
evidence: which peer could not reach which since the last collective that went around the rings,
which links that collective used, and how the master's dials ended. The rules, in order:

1. If the master cannot reach the accused either, and its view counts, the accused is dropped.
2. If several could not reach a peer, and more than it could not reach itself, it is dropped. Two
   are enough, or three (or all others) if the master reaches it; one more for each that did reach
   it.
3. If a peer could not reach several, each of which the master reaches or no one else accuses, that
   peer is dropped. Two are enough, and one more for each that it did reach.
4. If there are rings without any blocked link, no peer is dropped.
5. If there are such rings once links that were blocked before the last success may be used again,
   no peer is dropped.
6. Otherwise one must be dropped: the peer that has trouble with most others; then an accuser before
   a peer that the master reaches; then one with which nothing has ever succeeded; then the latest.
   A peer that has just died is accused too, and is dropped when its connection is seen to break. So
   this waits for some attempts, unless nothing has ever succeeded with the accused.

A blocked link is not used again while both its peers stay, unless it is measured to work, or by 5.

Such a peer connects itself, to a meeting point that reach.py chooses: the master passes on where.
Two that are apart need a third peer that relays. If there is none, the rings do without their
link, and where that is impossible their calls fail, before anything has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.outbox import Outbox
from pccl.protocol.master.recovery import History, Numbers
from pccl.protocol.messages import PeerInfo, Ring
from pccl.protocol.ring import BARRED, Hop, plan_rings
from pccl.protocol.topology import hops
from pccl.types import Result

ATTEMPTS = 3  # to open a stream to a peer that was reached before, if all rings need it
ACCUSED_MAX = 8  # that one peer may accuse at the same time: two are enough to judge it
SEVERAL = 2
SEVERAL_AGAINST_DIAL = 3
WHY_MAX = 200  # characters of what one peer says of one link
NAMES_MAX = 4  # links quoted in a sentence


class Verdict(NamedTuple):
    """The peer to drop, and the links that are the evidence: to it, or from it."""

    guilty: int
    links: tuple[Hop, ...]


class Blame:
    """The evidence of one group."""

    def __init__(self) -> None:
        self.blocked: dict[Hop, str] = {}  # and why
        self.dials: dict[int, str] = {}  # their results: "" reached, or why not
        # links tried since the last success: in how many epochs, and the latest of these
        self._current: dict[Hop, tuple[int, int]] = {}
        self._dialling: set[int] = set()
        self._dialled: set[int] = set()
        self._worked: tuple[Ring, ...] = ()
        self._worked_epoch = 0

    # ---- evidence ----

    def accuse(self, accuser: int, accused: int, epoch: int, why: str) -> bool:
        """A peer could not open a stream to another. Returns whether to dial the accused."""
        link = accuser, accused
        others = sum(one == accuser for one, _ in self._current.keys() - {link})
        if epoch < self._worked_epoch or others >= ACCUSED_MAX:
            return False
        self.blocked[link] = why[:WHY_MAX]
        attempts, last = self._current.get(link, (0, -1))
        self._current[link] = attempts + (epoch > last), max(epoch, last)
        first = accused not in self._dialled
        self._dialled.add(accused)
        self._dialling |= {accused} if first else set()
        return first

    def dialled(self, number: int, why: str | None) -> None:
        """The dial of an accused has ended: "": it was reached; None: no dial was made, or it does
        not count."""
        if number in self._dialling and why is not None:
            self.dials[number] = why
        self._dialling.discard(number)

    def worked(self, rings: Sequence[Ring], epoch: int) -> None:
        """A collective went around these rings, which ends the trouble."""
        self._worked, self._worked_epoch = tuple(rings), epoch
        self._current.clear()
        self._dialled.clear()
        self._dialling.clear()
        self.dials.clear()

    def measured(self, one: int, other: int) -> None:
        """Data arrived from one peer at another, which requires streams in both directions."""
        for link in ((one, other), (other, one)):
            self.blocked.pop(link, None)
            self._current.pop(link, None)

    def forget(self, number: int) -> None:
        """A peer is gone."""
        self.blocked = {link: why for link, why in self.blocked.items() if number not in link}
        self._current = {link: at for link, at in self._current.items() if link in self.blocked}
        self._dialled.discard(number)
        self._dialling.discard(number)
        self.dials.pop(number, None)

    def forgive(self) -> None:
        """Links that were blocked before the last success may be tried again."""
        self.blocked = {link: why for link, why in self.blocked.items() if link in self._current}

    # ---- what follows ----

    def cost(self) -> Callable[[Hop], int]:
        """The cost for a ring to use a link.

        A blocked link is not used at all. Links that have worked are best; a suspect is tried
        next to peers that are not suspected, because what an accuser says of an accused peer
        proves least.
        """
        blocked, worked = self.blocked, self._links_that_worked()
        accusers, accused = ({link[end] for link in self._current} for end in (0, 1))

        def cost(link: Hop) -> int:
            if link in blocked:
                return BARRED
            if link in worked:
                return 0
            return (0, 1, 3)[(link[0] in accusers) + (link[1] in accused)]

        return cost

    def verdict(self, size: int) -> Verdict | None:
        """The peer to drop whatever the rings are, by rule 1, 2 or 3; `size` is the group's."""
        of, by = self._accusations()
        for number in sorted(of):
            if self.dials.get(number):
                return self._accused(number)
        worked = self._links_that_worked() - self._current.keys()
        for number in sorted(of, reverse=True):
            needed = SEVERAL_AGAINST_DIAL if number in self.dials else SEVERAL
            needed = max(SEVERAL, min(needed, size - 1))
            needed += sum(link[1] == number for link in worked)
            many = len(of[number]) >= needed and len(of[number]) > len(by[number])
            if many and number not in self._dialling:
                return self._accused(number)
        for number in sorted(by, reverse=True):
            alone = all(of[other] == {number} or other in self.dials for other in by[number])
            needed = SEVERAL + sum(link[0] == number for link in worked)
            if len(by[number]) >= needed and alone and not by[number] & self._dialling:
                return self._accuser(number)
        return None

    def last_resort(self, proven: Collection[int]) -> Verdict | None:
        """The peer to drop because no ring is possible, by rule 6; None while more reports may
        come."""
        attempts = max((tried for tried, _ in self._current.values()), default=0)
        if attempts < ATTEMPTS and any(accused in proven for _, accused in self._current):
            return None
        return self._worst({*self._current}, proven)

    def between(self, one: int, other: int, proven: Collection[int]) -> Verdict | None:
        """Which of two peers that must reach each other to drop, by rule 6; None: there is no
        evidence."""
        return self._worst({(one, other), (other, one)} & self._current.keys(), proven)

    def sentence(self, verdict: Verdict, info: Callable[[int], PeerInfo]) -> str:
        """Why a peer is dropped: the evidence, and the remedy. `info` knows peers by number."""
        guilty = info(verdict.guilty)
        links = verdict.links[:NAMES_MAX]
        foreign = all(reach.foreign(info(one), info(other)) for one, other in links)
        if links[0][0] == verdict.guilty:
            whom = " or ".join(f"{info(link[1])} ({self.blocked[link]})" for link in links)
            cure = reach.BRIDGE if foreign else reach.EGRESS
            theirs = all(self.dials.get(other) == "" for _, other in links)
            others = ", whom the master reaches" if theirs else ""
            return f"{guilty} could not reach {whom}{others}: {cure}"
        told = [
            f"{info(link[0])} could not reach {guilty} ({self.blocked[link]})" for link in links
        ]
        if (dial := self.dials.get(verdict.guilty)) is not None:
            told.append(f"the master could not ({dial})" if dial else "the master could")
        return f"{', '.join(told)}: {reach.BRIDGE if foreign else reach.cure(guilty)}"

    def _worst(self, links: Set[Hop], proven: Collection[int]) -> Verdict | None:
        of, by = self._accusations()
        if self._dialling & {accused for _, accused in links}:
            return None

        def guilt(number: int) -> tuple[int, int, bool, int]:
            refuted = by[number] and by[number] <= self.dials.keys() and not of[number]
            cleared = number in self.dials and not by[number]
            trouble = len(of[number] | by[number])
            return trouble, bool(refuted) - cleared, number not in proven, number

        guilty = max({end for link in links for end in link}, key=guilt, default=None)
        if guilty is None:
            return None
        return self._accused(guilty) if of[guilty] else self._accuser(guilty)

    def _accusations(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """The accusers of each accused, and the accused of each accuser."""
        of: dict[int, set[int]] = defaultdict(set)
        by: dict[int, set[int]] = defaultdict(set)
        for accuser, accused in self._current:
            of[accused].add(accuser)
            by[accuser].add(accused)
        return of, by

    def _links_that_worked(self) -> set[Hop]:
        return {hop for ring in self._worked for hop in hops(ring.order)}

    def _accused(self, number: int) -> Verdict:
        return Verdict(number, tuple(sorted(link for link in self._current if link[1] == number)))

    def _accuser(self, number: int) -> Verdict:
        return Verdict(number, tuple(sorted(link for link in self._current if link[0] == number)))


@dataclass(slots=True)
class Group:
    """The state that the peers of one group share."""

    epoch: int = 0
    rings: tuple[m.Ring, ...] = ()  # as optimized
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


# Drops peers from the run, each for a reason; if there is a result, they are told, with its cause.
RemoveAll: TypeAlias = Callable[[Mapping[int, str], Result | None, m.Cause], None]


class Dismissals:
    """Drops peers.

    Args:
        membership: the registered peers.
        groups: have the evidence against peers.
        remove_all: drops peers. When it returns, all others continue without them.
    """

    def __init__(self, membership: Membership, groups: Groups, remove_all: RemoveAll) -> None:
        self._membership, self._groups = membership, groups
        self._remove_all = remove_all

    def dismiss_all(
        self, whys: Mapping[int, str], result: Result, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Drops peers, and tells each of them why."""
        self._remove_all(whys, result, cause)

    def dismiss(self, number: int, why: str, result: Result) -> None:
        """Drops a peer, and tells it why."""
        self.dismiss_all({number: why}, result)

    def convict(self, group: int, verdict: Verdict) -> None:
        """Drops a peer that cannot reach others, or cannot be reached; tells all peers why."""
        why = self._groups[group].blame.sentence(verdict, self._membership.info)
        self.dismiss(verdict.guilty, why, Result.RANK_CONNECTION_FAILED)
