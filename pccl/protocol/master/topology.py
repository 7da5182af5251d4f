"""Each group's epoch and rings, and the peers to drop because others cannot reach them.

If a peer cannot open a stream to another one, it reports this. One report proves little, so the
master dials the accused itself, and meanwhile the rings avoid the link. The evidence consists of
the links that failed since the last collective that went around the rings, the links that this
collective used, and the results of the master's dials. docs/internals/protocol.md ("A peer that
cannot be reached") has the rules. `Blame.verdict` applies rules 1 to 3, `Accusations`
(collectives.py) applies 4 and 5, and `Blame.last_resort` applies 6. Rule 6 waits for some attempts:
a peer that has just died is accused, too, and is dropped anyway when its connection breaks.

A peer that only dials out (`outgoing`) connects to a rendezvous point: reach.py chooses the point,
and the master tells the peer. Two such peers need a third one that relays. If there is none, the
rings avoid their link. If this is impossible, their calls fail before anything has begun.

`Optimizations` have the links measured, several pairs at once, and install the best rings. Only
links within groups and between machines are measured.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple, TypeAlias

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.effects import Outbox
from pccl.protocol.master.history import History, Numbers
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.tally import Tally
from pccl.protocol.messages import PeerInfo, Ring
from pccl.protocol.ring import BARRED, plan_rings
from pccl.protocol.rounds import OPTIMIZE, Round
from pccl.protocol.topology import (
    ALL_MAX,
    Everything,
    Hop,
    Link,
    Links,
    Schedule,
    Slot,
    Survey,
    best_rings,
    hops,
    seconds,
    slowest,
    tour,
)
from pccl.types import Result

ATTEMPTS = 3  # to open a stream that all rings need, to a peer that was reached before
ACCUSED_MAX = 8  # peers that one peer may accuse at a time; two are enough to judge it
SEVERAL = 2
SEVERAL_AGAINST_DIAL = 3
WHY_MAX = 200  # characters of one peer's report on one link
NAMES_MAX = 4  # links quoted in a sentence


class Verdict(NamedTuple):
    """The peer to drop, and the links to or from it that are the evidence."""

    guilty: int
    links: tuple[Hop, ...]


class Blame:
    def __init__(self) -> None:
        self.blocked: dict[Hop, str] = {}  # blocked links, and why
        self.dials: dict[int, str] = {}  # results of dials: "" if reached, else why not
        # links tried since the last success: the number of epochs, and the latest epoch
        self._current: dict[Hop, tuple[int, int]] = {}
        self._dialling: set[int] = set()
        self._dialled: set[int] = set()
        self._worked: tuple[Ring, ...] = ()
        self._worked_epoch = 0

    # ---- evidence ----

    def accuse(self, accuser: int, accused: int, epoch: int, why: str) -> bool:
        """Notes that a peer could not open a stream to another. True: dial the accused."""
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
        """Notes the end of a dial: "": it reached the accused; None: it does not count, or was not
        made; else why it failed."""
        if number in self._dialling and why is not None:
            self.dials[number] = why
        self._dialling.discard(number)

    def worked(self, rings: Sequence[Ring], epoch: int) -> None:
        """Notes that a collective went around these rings, which clears all accusations."""
        self._worked, self._worked_epoch = tuple(rings), epoch
        self._current.clear()
        self._dialled.clear()
        self._dialling.clear()
        self.dials.clear()

    def measured(self, one: int, other: int) -> None:
        """Notes that data arrived between two peers, which needs streams in both directions."""
        for link in ((one, other), (other, one)):
            self.blocked.pop(link, None)
            self._current.pop(link, None)

    def forget(self, number: int) -> None:
        self.blocked = {link: why for link, why in self.blocked.items() if number not in link}
        self._current = {link: at for link, at in self._current.items() if link in self.blocked}
        self._dialled.discard(number)
        self._dialling.discard(number)
        self.dials.pop(number, None)

    def forgive(self) -> None:
        """Unblocks the links that were blocked before the last success."""
        self.blocked = {link: why for link, why in self.blocked.items() if link in self._current}

    # ---- conclusions ----

    def cost(self) -> Callable[[Hop], int]:
        """The cost for a ring to use a link.

        A blocked link is never used. Links that have worked are best. The best place for a suspect
        is between peers that are not suspected, because an accuser's word about an accused peer
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
        """The peer to drop by rule 1, 2 or 3, whatever the rings. `size` is the group's size."""
        of, by = self._accusations()
        for number in sorted(of):
            if self.dials.get(number):
                return self._verdict(number, 1)
        worked = self._links_that_worked() - self._current.keys()
        for number in sorted(of, reverse=True):
            needed = SEVERAL_AGAINST_DIAL if number in self.dials else SEVERAL
            needed = max(SEVERAL, min(needed, size - 1))
            needed += sum(link[1] == number for link in worked)
            many = len(of[number]) >= needed and len(of[number]) > len(by[number])
            if many and number not in self._dialling:
                return self._verdict(number, 1)
        for number in sorted(by, reverse=True):
            alone = all(of[other] == {number} or other in self.dials for other in by[number])
            needed = SEVERAL + sum(link[0] == number for link in worked)
            if len(by[number]) >= needed and alone and not by[number] & self._dialling:
                return self._verdict(number, 0)
        return None

    def last_resort(self, proven: Collection[int]) -> Verdict | None:
        """The peer to drop by rule 6: no ring is possible. None while more reports may come."""
        attempts = max((tried for tried, _ in self._current.values()), default=0)
        if attempts < ATTEMPTS and any(accused in proven for _, accused in self._current):
            return None
        return self._worst({*self._current}, proven)

    def between(self, one: int, other: int, proven: Collection[int]) -> Verdict | None:
        """Which of two peers that must reach each other to drop by rule 6; None: no evidence."""
        return self._worst({(one, other), (other, one)} & self._current.keys(), proven)

    def sentence(self, verdict: Verdict, info: Callable[[int], PeerInfo]) -> str:
        """Why a peer is dropped: the evidence, and the remedy. `info` gives peers by number."""
        guilty = info(verdict.guilty)
        links = verdict.links[:NAMES_MAX]
        foreign = all(reach.foreign(info(one), info(other)) for one, other in links)
        if links[0][0] == verdict.guilty:
            whom = " or ".join(f"{info(link[1])} ({self.blocked[link]})" for link in links)
            cure = reach.BRIDGE if foreign else reach.EGRESS
            theirs = all(self.dials.get(other) == "" for _, other in links)
            others = ", whom the master reaches" if theirs else ""
            return f"{guilty} could not reach {whom}{others}: {cure}"
        facts = [
            f"{info(link[0])} could not reach {guilty} ({self.blocked[link]})" for link in links
        ]
        if (dial := self.dials.get(verdict.guilty)) is not None:
            facts.append(f"the master could not ({dial})" if dial else "the master could")
        return f"{', '.join(facts)}: {reach.BRIDGE if foreign else reach.cure(guilty)}"

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
        return self._verdict(guilty, 1 if of[guilty] else 0)

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

    def _verdict(self, number: int, end: int) -> Verdict:
        """The verdict on a peer, with its links as accuser (`end` is 0) or as accused (1)."""
        links = sorted(link for link in self._current if link[end] == number)
        return Verdict(number, tuple(links))


@dataclass(slots=True)
class Group:
    epoch: int = 0
    rings: tuple[m.Ring, ...] = ()  # the optimized rings
    planned: tuple[m.Ring, ...] = ()  # the rings of this epoch
    broken: bool = False  # whether a collective has failed in this epoch, which voids its streams
    blame: Blame = field(default_factory=Blame)
    rates: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes/s, when last measured
    # seqs and sizes of small results that some peer may lack
    small: deque[tuple[int, int]] = field(default_factory=deque)


class Groups(dict[int, Group]):
    """The groups that have accepted peers."""

    def __init__(
        self, membership: Membership, numbers: Numbers, history: History, outbox: Outbox
    ) -> None:
        super().__init__()
        self._membership, self._numbers = membership, numbers
        self._history, self._outbox = history, outbox

    def repair(self, number: int) -> None:
        """Gives a group new streams, if a collective has failed since it got the current ones.

        The failure itself does not renew the streams: usually a peer has died, and when its loss is
        noticed soon afterwards, the survivors get new streams anyway.
        """
        if self[number].broken:
            self.renew(number)

    def renew(self, number: int, gone: Sequence[m.Gone] = ()) -> None:
        """Gives a group new streams: its members have changed, or a collective has failed."""
        group = self.setdefault(number, Group())
        group.epoch, group.broken = self._numbers.take_epoch(), False
        group.planned = self.plan(number)
        peers = tuple(map(self._membership.info, self._membership.accepted(number)))
        nonce = self._numbers.nonce("epoch", group.epoch)
        count, lost = self._history.topology, tuple(gone[: m.GONE_MAX])
        plan = m.Plan(group.epoch, peers, group.planned, count, nonce, lost)
        for peer in peers:
            self._outbox.send(peer.peer, plan)

    def plan(self, number: int) -> tuple[m.Ring, ...]:
        group = self[number]
        infos = [self._membership.info(one) for one in self._membership.accepted(number)]
        return plan_rings(infos, group.rings, group.blame.cost())

    def proven(self, number: int) -> set[int]:
        """The peers of a group with which a collective has gone around the rings."""
        accepted = self._membership.accepted(number)
        return {one for one in accepted if self._membership.peers[one].proven}


class Rendezvous:
    """Tells peers that cannot connect to each other where to meet."""

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self._membership, self._outbox = membership, outbox
        # by pair: how many relays it has given up, and the epoch in which it gave up the last one
        self._given_up: dict[frozenset[int], tuple[int, int]] = {}

    @property
    def relays(self) -> list[m.PeerInfo]:
        infos = map(self._membership.info, self._membership.accepted())
        return [info for info in infos if info.relay]

    def request(self, number: int, request: m.RendezvousRequest) -> None:
        """Arranges a meeting for a peer that cannot connect to its receiver."""
        sender = self._membership.info(number)
        if not self._membership.has(request.peer, sender.group):
            return  # the receiver has gone meanwhile
        receiver = self._membership.info(request.peer)
        failures, _ = self._given_up.get(frozenset((number, request.peer)), (0, 0))
        for to, message in reach.rendezvous(sender, receiver, request, self.relays, failures):
            self._outbox.send(to.peer, message)

    def give_up(self, number: int, accused: int, epoch: int) -> bool:
        """Gives up the relay at which two peers did not meet. True if they have not tried all."""
        one, other = map(self._membership.info, (number, accused))
        if not reach.apart(one, other) or len(self.relays) < 2:
            return False
        pair, present = frozenset((number, accused)), self._membership.peers.keys()
        self._given_up = {each: at for each, at in self._given_up.items() if each <= present}
        failures, last = self._given_up.get(pair, (0, -1))
        if epoch > last:  # only one of the two directions counts
            failures += 1
            self._given_up[pair] = failures, epoch
        return failures % len(self.relays) > 0

    def severed(self, pairs: Iterable[tuple[int, int]]) -> str:
        """Why a pair cannot send to each other, for the first such pair; empty if all can."""
        for pair in pairs:
            one, other = map(self._membership.info, pair)
            if reach.apart(one, other) and not self.relays:
                return reach.severed(one, other)
        return ""

    def broken(self, rings: Iterable[m.Ring]) -> str:
        """The first severed pair of neighbors in the rings, in words; empty if there is none."""
        return self.severed(hop for ring in rings for hop in hops(ring.order))


# Drops peers from the run, each for a reason. If a result is given, they receive it and the cause.
RemoveAll: TypeAlias = Callable[[Mapping[int, str], Result | None, m.Cause], None]


class Dismissals:
    def __init__(self, membership: Membership, groups: Groups, remove_all: RemoveAll) -> None:
        self._membership, self._groups = membership, groups
        self._remove_all = remove_all

    def dismiss_all(
        self, whys: Mapping[int, str], result: Result, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        self._remove_all(whys, result, cause)

    def dismiss(self, number: int, why: str, result: Result) -> None:
        self.dismiss_all({number: why}, result)

    def out_of_turn(self, number: int, message: m.PeerMessage) -> None:
        why = f"it sent a {type(message).__name__} out of turn"
        self.dismiss(number, why, Result.INTERNAL_ERROR)

    def drop_for(self, group: int, verdict: Verdict) -> None:
        """Drops a peer that cannot reach others, or cannot be reached; tells all peers why."""
        why = self._groups[group].blame.sentence(verdict, self._membership.info)
        self.dismiss(verdict.guilty, why, Result.RANK_CONNECTION_FAILED)


class RunContext:
    """The objects that all parts of a run use."""

    def __init__(
        self, membership: Membership, numbers: Numbers, history: History, remove_all: RemoveAll
    ) -> None:
        self.membership, self.numbers, self.history = membership, numbers, history
        self.tally = Tally()
        self.outbox = Outbox(membership.peers, numbers.take_seq)
        self.groups = Groups(membership, numbers, history, self.outbox)
        self.rendezvous = Rendezvous(membership, self.outbox)
        self.dismissals = Dismissals(membership, self.groups, remove_all)


class RunPart:
    """A part of a run, with the objects that all parts share."""

    def __init__(self, context: RunContext) -> None:
        self._membership, self._numbers = context.membership, context.numbers
        self._history, self._tally = context.history, context.tally
        self._outbox, self._groups = context.outbox, context.groups
        self._rendezvous, self._dismissals = context.rendezvous, context.dismissals


@dataclass(slots=True)
class Optimization:
    """An optimization, from the vote of all accepted peers to the choice of the rings."""

    calls: dict[int, int]  # the members' calls
    schedules: dict[int, Schedule]  # by group: the links to measure
    seq: int = 0
    measuring: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the current measurements
    links: dict[tuple[int, int], Link] = field(default_factory=dict)  # by sender and receiver
    inflow: dict[int, int] = field(default_factory=dict)  # bytes per second from all others at once
    since_s: float = 0.0  # when the last peer entered it


class Optimizations(RunPart):
    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.current: Optimization | None = None  # the optimization in progress, if any

    def begin(self, round_: Round) -> None:
        groups = dict.fromkeys(map(self._membership.group_of, round_.votes))
        schedules = {group: self._schedule(self._membership.accepted(group)) for group in groups}
        self.current = Optimization(round_.calls, schedules, since_s=round_.since_s)
        self._probe(self.current)

    def _schedule(self, numbers: list[int]) -> Schedule:
        """The measurements for a group: all links, or for many peers a survey of the sites."""
        infos = {number: self._membership.info(number) for number in numbers}
        if len(numbers) <= ALL_MAX:
            relayed = bool(self._rendezvous.relays)

            def unmeasured(a: int, b: int) -> bool:
                one, other = infos[a], infos[b]
                return reach.local(one, other) or (reach.apart(one, other) and not relayed)

            return Everything(numbers, unmeasured)
        machines: dict[object, list[int]] = {}
        for number, info in infos.items():
            machines.setdefault(info.machine if info.ipc else number, []).append(number)
        return Survey(machines.values())

    def _probe(self, optimization: Optimization) -> None:
        """Starts the next measurements, or ends the optimization if there are none."""
        calls, more = optimization.calls, True
        while more and not optimization.measuring:
            slot: Slot = {}
            for schedule in optimization.schedules.values():
                slot |= schedule.next(optimization.links)
            more = bool(slot)
            for number, senders in slot.items():
                left = tuple(sender for sender in senders if sender in calls)
                if number in calls and left:
                    optimization.measuring[number] = left
        if not optimization.measuring:
            self._end(optimization)
            return
        seq = optimization.seq = self._numbers.take_seq()
        nonce = self._numbers.nonce("call", seq)
        for number, senders in optimization.measuring.items():
            self._outbox.send(number, m.Probe(calls[number], seq, senders, nonce))

    def measured(self, number: int, measured: m.Measured) -> None:
        optimization = self.current
        if (
            optimization is None
            or optimization.seq != measured.seq
            or number not in optimization.measuring
        ):
            if self._numbers.is_unknown(measured.seq):
                self._dismissals.out_of_turn(number, measured)
            return  # the probe has ended meanwhile
        senders = optimization.measuring.pop(number)
        hop = senders[0], number
        if hop in optimization.links:  # the second measurement, with all others at once
            optimization.inflow[number] = measured.rate
        else:
            optimization.links[hop] = Link(measured.rate, measured.delay_us)
        if not optimization.measuring:
            self._probe(optimization)

    def has(self, number: int) -> bool:
        return self.current is not None and number in self.current.calls

    def lose(self, lost: Set[int]) -> None:
        optimization = self.current
        if optimization is None or not optimization.calls.keys() & lost:
            return
        for number in lost:
            optimization.calls.pop(number, None)
        optimization.measuring = {
            number: senders
            for number, senders in optimization.measuring.items()
            if number not in lost and not lost >= {*senders}
        }
        if not optimization.calls:
            self.current = None
        elif not optimization.measuring:
            self._probe(optimization)

    def withdraw(self, number: int, withdraw: m.Withdraw) -> bool:
        """Withdraws a caller, which ends its optimization for all; False if it is in none.

        The rings stay as they are.
        """
        optimization = self.current
        if optimization is None or optimization.calls.get(number) != withdraw.call:
            return False
        self.current = None
        failure = withdraw.failure(self._membership.info(number))
        self._outbox.fail_all(optimization.calls, OPTIMIZE, *failure)
        return True

    def _end(self, optimization: Optimization) -> None:
        self.current = None
        self._membership.go_on()
        self._history.optimized += 1
        for group in dict.fromkeys(map(self._membership.group_of, optimization.calls)):
            self._choose_rings(group, optimization)
            self._history.of(group).repeatable = True  # a collective may have failed: ranks change
        for number, call in optimization.calls.items():
            self._outbox.send(number, m.OptimizeResult(call, self._history.optimized))

    def _choose_rings(self, group_number: int, optimization: Optimization) -> None:
        """Installs the best rings for a group, if they are clearly better than the current ones."""
        group, numbers = self._groups[group_number], self._membership.accepted(group_number)
        infos = {number: self._membership.info(number) for number in numbers}
        measured = {hop: link for hop, link in optimization.links.items() if infos.keys() >= {*hop}}
        if not measured:
            return
        group.rates = {hop: link.rate for hop, link in measured.items()}
        for hop, link in measured.items():
            if link.rate:
                group.blame.measured(*hop)
        pairs = permutations(infos.values(), 2)
        avoided = [(one.peer, other.peer) for one, other in pairs if reach.apart(one, other)]
        measured |= dict.fromkeys([*group.blame.blocked, *avoided], Link(0, 0))

        def local(a: int, b: int) -> bool:
            return reach.local(infos[a], infos[b])

        sites = _sites(optimization.schedules.get(group_number), numbers)
        site_of = {number: index for index, site in enumerate(sites) for number in site}
        order = tour(sites, measured) if sites else ()
        links = Links(measured, local, optimization.inflow, site_of)
        current = group.planned
        rings = best_rings(current, links, order)
        for title, found in (("were", current), ("are", rings)):
            self._outbox.note(
                f"the rings of group {group_number} {title} {_describe(found, links)}"
            )
        if rings != current:
            group.rings = rings
            self._groups.renew(group_number)


def _sites(schedule: Schedule | None, numbers: Sequence[int]) -> list[list[int]]:
    """The sites of these peers; empty if all links were measured instead."""
    if not isinstance(schedule, Survey):
        return []
    left = {*numbers}
    sites = [[number for number in site if number in left] for site in schedule.sites]
    known = {number for site in sites for number in site}
    return [site for site in sites if site] + [[one] for one in numbers if one not in known]


def _describe(rings: Sequence[m.Ring], links: Links) -> str:
    """Rings and their expected speed, in words."""
    orders = "; ".join(
        f"{' -> '.join(map(str, ring.order))} (weight {ring.weight})" for ring in rings
    )
    a, b = min((slowest(ring.order, links) for ring in rings), key=lambda hop: links[hop].rate)
    return (
        f"{orders}: the slowest link, from peer {a} to peer {b}, carries "
        f"{links[a, b].rate * 8e-6:.0f} Mbit/s, and an all-reduce in which each peer sends 64 MiB "
        f"takes about {seconds(rings, links):.2f} s"
    )
