"""Which peer has to leave when peers cannot reach each other. No I/O.

A peer that cannot open a stream to another one says so. One such report proves little: the fault
may lie with the accused (a firewall, a wrong address), with the accuser (it can connect to nobody),
or between the two. So the master dials the accused itself, and meanwhile the rings avoid the link,
so that nobody has to leave yet: a peer that is really at fault fails in the other rings too. The
evidence is which peer could not reach which since the last collective that went around the rings,
over which links that one went, and how the master's dials ended. The verdicts, in their order:

1. The master cannot reach the accused either, where its view counts: the accused goes.
2. Several could not reach a peer, more than it could not reach itself: it goes. Two are enough, or
   three where the master reaches it, or all others; and one more for each that did reach it.
3. A peer could not reach several, each of whom the master reaches or nobody else accuses: it goes.
   Two are enough, and one more for each that it did reach.
4. There are rings without any link that is blocked: nobody goes.
5. There are, if links that were blocked before the last success may work again: nobody goes.
6. One has to go: the peer that has trouble with most others; then an accuser before a peer that
   the master reaches; then one with which nothing has ever succeeded; then the one that came last.
   A peer that has just died is accused too, and goes when its connection is seen to be gone: so
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

ATTEMPTS = 3  # to open a stream to a peer that was reached before, if no ring goes without
ACCUSED_MAX = 8  # whom one peer may accuse at the same time: two are enough to judge it
SEVERAL = 2
SEVERAL_AGAINST_DIAL = 3
WHY_MAX = 200  # characters of what one peer says of one link
NAMES_MAX = 4  # links quoted in a sentence


class Verdict(NamedTuple):
    """Which peer has to go, and the links that are the evidence: to it, or from it."""

    guilty: int
    links: tuple[Hop, ...]


class Blame:
    """The evidence of one group."""

    def __init__(self) -> None:
        self.blocked: dict[Hop, str] = {}  # and what stood in the way
        self.dials: dict[int, str] = {}  # what is known of them: "" reached, or why not
        # of that what was tried since the last success: in how many epochs, and in which last
        self._current: dict[Hop, tuple[int, int]] = {}
        self._dialling: set[int] = set()
        self._dialled: set[int] = set()
        self._worked: tuple[Ring, ...] = ()
        self._worked_epoch = 0

    # ---- evidence ----

    def accuse(self, accuser: int, accused: int, epoch: int, why: str) -> bool:
        """A peer could not open a stream to another in an epoch. Whether to dial the accused."""
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
        """The dial of an accused has ended: "" it got through; None: it was not made, or does not
        count."""
        if number in self._dialling and why is not None:
            self.dials[number] = why
        self._dialling.discard(number)

    def worked(self, rings: Sequence[Ring], epoch: int) -> None:
        """A collective went all the way around these rings: the trouble is over."""
        self._worked, self._worked_epoch = tuple(rings), epoch
        self._current.clear()
        self._dialled.clear()
        self._dialling.clear()
        self.dials.clear()

    def measured(self, one: int, other: int) -> None:
        """Data came from one to another, which took streams of both directions."""
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
        """What was blocked before the last success may be tried again."""
        self.blocked = {link: why for link, why in self.blocked.items() if link in self._current}

    # ---- what follows ----

    def cost(self) -> Callable[[Hop], int]:
        """What it costs a ring to use a link.

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
        """The peer of a group of that size that has to go whatever its rings are: by 1, 2 or 3."""
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
        """The peer that has to go because no ring is possible, by 6; None while more reports may
        come."""
        attempts = max((tried for tried, _ in self._current.values()), default=0)
        if attempts < ATTEMPTS and any(accused in proven for _, accused in self._current):
            return None
        return self._worst({*self._current}, proven)

    def between(self, one: int, other: int, proven: Collection[int]) -> Verdict | None:
        """Which of two peers that must reach each other has to go, by 6; None: there is no
        evidence."""
        return self._worst({(one, other), (other, one)} & self._current.keys(), proven)

    def sentence(self, verdict: Verdict, info: Callable[[int], PeerInfo]) -> str:
        """Why one has to go: the evidence, and the cure. `info` knows the peers by number."""
        guilty = info(verdict.guilty)
        links = verdict.links[:NAMES_MAX]
        if links[0][0] == verdict.guilty:
            whom = " or ".join(f"{info(link[1])} ({self.blocked[link]})" for link in links)
            theirs = all(self.dials.get(other) == "" for _, other in links)
            others = ", whom the master reaches" if theirs else ""
            return f"{guilty} could not reach {whom}{others}: {reach.EGRESS}"
        told = [
            f"{info(link[0])} could not reach {guilty} ({self.blocked[link]})" for link in links
        ]
        if (dial := self.dials.get(verdict.guilty)) is not None:
            told.append(f"the master could not ({dial})" if dial else "the master could")
        return f"{', '.join(told)}: {reach.cure(guilty)}"

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
        """By whom each accused is accused, and whom each accuser accuses."""
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
