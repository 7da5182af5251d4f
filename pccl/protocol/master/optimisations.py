"""Optimisations of the rings between the vote of all peers and the choice of new rings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from itertools import islice, zip_longest

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.ledger import Ledger, Optimisation
from pccl.protocol.rounds import WITHDRAWN, Kind, Round
from pccl.protocol.topology import (
    SPREAD_MAX,
    Link,
    Links,
    best_rings,
    seconds,
    slowest,
    tournament,
)
from pccl.types import Result

SLOTS_MAX = 16  # of pairs that are measured one after the other: the rest of many is not


class Optimisations(Ledger):
    """Has links measured, several pairs at once, and installs the rings that suit them.

    Only links within groups matter, and of those only links between machines.
    """

    def _begin_optimisation(self, round_: Round[object]) -> None:
        groups = dict.fromkeys(self.peers[number].info.group for number in round_.votes)
        schedules = [self._schedule(self._accepted(group)) for group in groups]
        slots = deque(
            {number: senders for part in slot for number, senders in part.items()}
            for slot in zip_longest(*schedules, fillvalue={})
        )
        calls = {number: vote.call for number, vote in round_.votes.items()}
        self._optimisation = Optimisation(calls, slots)
        self._probe(self._optimisation)

    def _schedule(self, numbers: list[int]) -> list[dict[int, tuple[int, ...]]]:
        """Who of a group is to measure what comes from whom, slot by slot.

        First each link by itself; then, where there may be several rings, all at once.
        """
        infos = {number: self.peers[number].info for number in numbers}
        pairs = (
            [(a, b) for a, b in slot if not reach.local(infos[a], infos[b])]
            for slot in tournament(numbers)
        )
        slots: list[dict[int, tuple[int, ...]]] = []
        for slot in islice((slot for slot in pairs if slot), SLOTS_MAX):
            slots.append(
                {number: (sender,) for a, b in slot for number, sender in ((a, b), (b, a))}
            )
        if 2 < len(numbers) <= SPREAD_MAX and slots:
            distant = {
                number: tuple(
                    n for n in numbers if n != number and not reach.local(infos[n], infos[number])
                )
                for number in numbers
            }
            slots.append({number: senders for number, senders in distant.items() if senders})
        return slots

    def _probe(self, optimisation: Optimisation) -> None:
        """Has the next links measured, or ends when there are none."""
        calls = optimisation.calls
        while optimisation.slots and not optimisation.measuring:
            for number, senders in optimisation.slots.popleft().items():
                left = tuple(sender for sender in senders if sender in calls)
                if number in calls and left:
                    optimisation.measuring[number] = left
        if not optimisation.measuring:
            self._end_optimisation(optimisation)
            return
        seq = optimisation.seq = self._take_seq()
        for number, senders in optimisation.measuring.items():
            self._send(number, m.Probe(calls[number], seq, senders, self._nonces.of_call(seq)))

    def _measured(self, number: int, measured: m.Measured) -> None:
        optimisation = self._optimisation
        if (
            optimisation is None
            or optimisation.seq != measured.seq
            or number not in optimisation.measuring
        ):
            if measured.seq >= self._next_seq:
                why = f"it measured in probe {measured.seq} out of turn"
                self._remove(number, why, Result.INTERNAL_ERROR)
            return  # of a probe that has ended otherwise, while this was on its way
        senders = optimisation.measuring.pop(number)
        hop = senders[0], number
        if hop in optimisation.links:  # once more, with all others at once
            optimisation.inflow[number] = measured.rate
        else:
            optimisation.links[hop] = Link(measured.rate, measured.delay_us)
        if not optimisation.measuring:
            self._probe(optimisation)

    def _optimises(self, number: int, call: int | None = None) -> bool:
        """Whether a peer stands in the optimisation, by this call."""
        optimisation = self._optimisation
        if optimisation is None or number not in optimisation.calls:
            return False
        return call is None or optimisation.calls[number] == call

    def _optimise_without(self, lost: Set[int]) -> None:
        """Peers are lost: nobody waits for them, or measures links to them."""
        optimisation = self._optimisation
        if optimisation is None or not optimisation.calls.keys() & lost:
            return
        for number in lost:
            optimisation.calls.pop(number, None)
        optimisation.measuring = {
            number: senders
            for number, senders in optimisation.measuring.items()
            if number not in lost and not lost >= {*senders}
        }
        if not optimisation.calls:
            self._optimisation = None
        elif not optimisation.measuring:
            self._probe(optimisation)

    def _fail_optimisation(self, why: str) -> None:
        """Gives an optimisation up for all; the rings stay as they are."""
        optimisation, self._optimisation = self._optimisation, None
        assert optimisation is not None
        for number, call in optimisation.calls.items():
            self._fail(number, call, WITHDRAWN[Kind.OPTIMIZE], why, m.Cause.TIMEOUT)

    def _end_optimisation(self, optimisation: Optimisation) -> None:
        self._optimisation = None
        self._lost.clear()
        self._optimize_rounds += 1
        for group in dict.fromkeys(self.peers[n].info.group for n in optimisation.calls):
            self._choose_rings(group, optimisation)
        for number, call in optimisation.calls.items():
            self._send(number, m.OptimizeResult(call, self._optimize_rounds))

    def _choose_rings(self, group_number: int, optimisation: Optimisation) -> None:
        """Installs the best rings for a group, if they are better than those that it has."""
        group, numbers = self._groups[group_number], self._accepted(group_number)
        infos = {number: self.peers[number].info for number in numbers}
        measured = {hop: link for hop, link in optimisation.links.items() if infos.keys() >= {*hop}}
        if not measured:
            return
        for hop, link in measured.items():
            if link.rate:
                group.blame.measured(*hop)
        measured |= dict.fromkeys(group.blame.blocked, Link(0, 0))

        def local(a: int, b: int) -> bool:
            return reach.local(infos[a], infos[b])

        links = Links(measured, local, optimisation.inflow)
        current = group.planned
        rings = best_rings(current, links)
        for title, found in (("were", current), ("are", rings)):
            self._note(f"the rings of group {group_number} {title} {_describe(found, links)}")
        if rings != current:
            group.rings = rings
            self._new_epoch(group_number)


def _describe(rings: Sequence[m.Ring], links: Links) -> str:
    """Rings, and what is expected of them, in words."""
    orders = "; ".join(
        f"{' -> '.join(map(str, ring.order))} (weight {ring.weight})" for ring in rings
    )
    a, b = min((slowest(ring.order, links) for ring in rings), key=lambda hop: links[hop].rate)
    return (
        f"{orders}: the slowest link, from peer {a} to peer {b}, carries "
        f"{links[a, b].rate * 8e-6:.0f} Mbit/s, and an all-reduce in which each peer sends 64 MiB "
        f"takes about {seconds(rings, links):.2f} s"
    )
