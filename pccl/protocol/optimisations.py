"""Optimisations of the rings between the vote of all peers and the choice of new rings."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice, zip_longest

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.ledger import WITHDRAWN, Ledger, Optimisation
from pccl.protocol.ring import plan_rings
from pccl.protocol.rounds import Kind, Round
from pccl.protocol.topology import Link, Links, best_order, seconds, slowest, tournament
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
            [pair for pairs in slot for pair in pairs]
            for slot in zip_longest(*schedules, fillvalue=[])
        )
        calls = {number: vote.call for number, vote in round_.votes.items()}
        self._optimisation = Optimisation(calls, slots)
        self._probe(self._optimisation)

    def _schedule(self, numbers: list[int]) -> list[list[tuple[int, int]]]:
        """The pairs of a group that are to be measured, slot by slot."""
        infos = {number: self.peers[number].info for number in numbers}
        slots = (
            [(a, b) for a, b in slot if not reach.local(infos[a], infos[b])]
            for slot in tournament(numbers)
        )
        return list(islice((slot for slot in slots if slot), SLOTS_MAX))

    def _probe(self, optimisation: Optimisation) -> None:
        """Has the next pairs measured, or ends when there are none."""
        calls = optimisation.calls
        while optimisation.slots and not optimisation.measuring:
            for a, b in optimisation.slots.popleft():
                if a in calls and b in calls:
                    optimisation.measuring |= {a: b, b: a}
        if not optimisation.measuring:
            self._end_optimisation(optimisation)
            return
        optimisation.seq = self._take_seq()
        for number, other in optimisation.measuring.items():
            self._send(number, m.Probe(calls[number], optimisation.seq, other))

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
        sender = optimisation.measuring.pop(number)
        optimisation.links[sender, number] = Link(measured.rate, measured.delay_us)
        if not optimisation.measuring:
            self._probe(optimisation)

    def _optimises(self, number: int, call: int | None = None) -> bool:
        """Whether a peer stands in the optimisation, by this call."""
        optimisation = self._optimisation
        if optimisation is None or number not in optimisation.calls:
            return False
        return call is None or optimisation.calls[number] == call

    def _optimise_without(self, lost: Collection[int]) -> None:
        """Peers are lost: nobody waits for them, or measures links to them."""
        optimisation = self._optimisation
        if optimisation is None or not optimisation.calls.keys() & lost:
            return
        for number in lost:
            optimisation.calls.pop(number, None)
        optimisation.measuring = {
            number: other
            for number, other in optimisation.measuring.items()
            if number not in lost and other not in lost
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
        self._optimize_rounds += 1
        for group in dict.fromkeys(self.peers[n].info.group for n in optimisation.calls):
            self._choose_order(group, optimisation)
        for number, call in optimisation.calls.items():
            self._send(number, m.OptimizeResult(call, self._optimize_rounds))

    def _choose_order(self, group_number: int, optimisation: Optimisation) -> None:
        """Installs the best order for a group, if it is better than the one that it has."""
        group, numbers = self._groups[group_number], self._accepted(group_number)
        infos = {number: self.peers[number].info for number in numbers}
        rings = plan_rings(list(infos.values()), group.order)
        if not rings:
            return
        links = Links(optimisation.links, lambda a, b: reach.local(infos[a], infos[b]))
        current = rings[0].order
        order = best_order(current, links)
        for title, ring in (("was", current), ("is", order)):
            a, b = slowest(ring, links)
            self._note(
                f"the ring of group {group_number} {title} {' -> '.join(map(str, ring))}: its "
                f"slowest link, from peer {a} to peer {b}, carries {links[a, b].rate * 8e-6:.0f} "
                f"Mbit/s, and 64 MiB on each link take about {seconds(ring, links):.2f} s"
            )
        if order != current:
            group.order = order
            self._new_epoch(group_number)
