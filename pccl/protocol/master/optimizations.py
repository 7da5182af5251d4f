"""Optimizations of the rings between the vote of all peers and the choice of new rings."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import permutations

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.links import Dismissals, Groups, Meetings
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.outbox import Outbox
from pccl.protocol.master.recovery import History, Numbers
from pccl.protocol.rounds import WITHDRAWN, Kind, Round, RoundId
from pccl.protocol.survey import ALL_MAX, Everything, Schedule, Slot, Survey, tour
from pccl.protocol.topology import Link, Links, best_rings, seconds, slowest
from pccl.types import Result


@dataclass(slots=True)
class Optimization:
    """An optimization, from the vote of all accepted peers to the choice of the rings."""

    calls: dict[int, int]  # of its members
    schedules: dict[int, Schedule]  # of each group: what is to be measured
    seq: int = 0
    measuring: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the current measurements
    links: dict[tuple[int, int], Link] = field(default_factory=dict)  # from whom to whom
    inflow: dict[int, int] = field(default_factory=dict)  # bytes per second from all at once
    since_s: float = 0.0  # when the last peer entered it


class Optimizations:
    """Has links measured, several pairs at once, and installs the best rings.

    Only links within groups matter, and of those only links between machines.

    Attributes:
        current: the optimization in progress, if any.
    """

    def __init__(
        self,
        membership: Membership,
        numbers: Numbers,
        history: History,
        groups: Groups,
        meetings: Meetings,
        outbox: Outbox,
        dismissals: Dismissals,
    ) -> None:
        self._membership, self._numbers = membership, numbers
        self._history, self._groups, self._meetings = history, groups, meetings
        self._outbox, self._dismissals = outbox, dismissals
        self.current: Optimization | None = None

    def begin(self, round_: Round[object]) -> None:
        """All accepted peers have voted for an optimization."""
        groups = dict.fromkeys(map(self._membership.group_of, round_.votes))
        schedules = {group: self._schedule(self._membership.accepted(group)) for group in groups}
        calls = {number: vote.call for number, vote in round_.votes.items()}
        self.current = Optimization(calls, schedules)
        self.current.since_s = next(reversed(round_.votes.values())).since_s
        self._probe(self.current)

    def _schedule(self, numbers: list[int]) -> Schedule:
        """What is measured of a group: all links, or of many peers what tells their sites."""
        infos = {number: self._membership.info(number) for number in numbers}
        if len(numbers) <= ALL_MAX:
            relayed = bool(self._meetings.relays)

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
        nonce = self._numbers.nonce_of_call(seq)
        for number, senders in optimization.measuring.items():
            self._outbox.send(number, m.Probe(calls[number], seq, senders, nonce))

    def measured(self, number: int, measured: m.Measured) -> None:
        """A peer reports the result of a measurement."""
        optimization = self.current
        if (
            optimization is None
            or optimization.seq != measured.seq
            or number not in optimization.measuring
        ):
            if self._numbers.is_unknown(measured.seq):
                why = f"it measured in probe {measured.seq} out of turn"
                self._dismissals.dismiss(number, why, Result.INTERNAL_ERROR)
            return  # of a probe that has ended meanwhile
        senders = optimization.measuring.pop(number)
        hop = senders[0], number
        if hop in optimization.links:  # measured before: this time with all others at once
            optimization.inflow[number] = measured.rate
        else:
            optimization.links[hop] = Link(measured.rate, measured.delay_us)
        if not optimization.measuring:
            self._probe(optimization)

    def has(self, number: int) -> bool:
        """Whether a peer takes part in the optimization."""
        return self.current is not None and number in self.current.calls

    def lose(self, lost: Set[int]) -> None:
        """Peers are lost: their links are not measured any more."""
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

    def withdraw(self, number: int, call: int) -> bool:
        """A caller withdraws, which ends it for all. Whether that call was part of it.

        The rings stay as they are.
        """
        optimization = self.current
        if optimization is None or optimization.calls.get(number) != call:
            return False
        self.current = None
        why = f"{self._membership.info(number)} waited no longer"
        round_, result = RoundId(Kind.OPTIMIZE, None), WITHDRAWN[Kind.OPTIMIZE]
        self._outbox.fail_all(optimization.calls, round_, result, why, m.Cause.TIMEOUT)
        return True

    def _end(self, optimization: Optimization) -> None:
        self.current = None
        self._membership.go_on()
        self._history.optimized += 1
        for group in dict.fromkeys(map(self._membership.group_of, optimization.calls)):
            self._choose_rings(group, optimization)
            self._history.of(group).repeatable = True  # a collective may have failed for old ranks
        for number, call in optimization.calls.items():
            self._outbox.send(number, m.OptimizeResult(call, self._history.optimized))

    def _choose_rings(self, group_number: int, optimization: Optimization) -> None:
        """Installs the best rings for a group, if they are clearly better than its current ones."""
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
