"""Which peer to drop when peers cannot reach each other. No I/O.

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
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from typing import NamedTuple

from pccl.protocol import reach
from pccl.protocol.messages import PeerInfo, Ring
from pccl.protocol.ring import BARRED, Hop
from pccl.protocol.topology import hops

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
