"""Chooses which links to measure, and estimates the others. Pure functions and data.

In a group of n peers there are n (n - 1) links. Up to ALL_MAX peers all of them are measured, each
peer with one other at a time. In larger groups that would take too long, and nobody needs it: what
counts there is which peers are near each other. A *site* is a set of peers; each has reached
another one quickly. A survey finds the sites: of two sets of peers one pair is measured,
and then they are one site, or two for good. So it takes about as many slots as there are sites,
because the peers of a site are compared with those of others at the same time. The ring then leaves
each site once, over the best link that was measured between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import TypeAlias

from pccl.protocol.topology import SPREAD_MAX, Hop, Link, best_order, hops, tournament, typical

ALL_MAX = 17  # peers: of more, not all pairs are measured. 17 peers take 17 slots, 16 take 15
SLOTS_MAX = 32  # of a survey; sets that have not been compared by then count as two sites
SITE_US = 25_000  # until the first bytes, which takes five round trips: of one site

Slot: TypeAlias = dict[int, tuple[int, ...]]  # what is measured at once: receivers, their senders


class Everything:
    """All links: each by itself; then, of few peers, all at once. Those that are `local` (on one
    machine) are not measured.
    """

    def __init__(self, numbers: Sequence[int], local: Callable[[int, int], bool]) -> None:
        self._slots: deque[Slot] = deque()
        for slot in tournament(numbers):
            pairs = [(a, b) for a, b in slot if not local(a, b)]
            if pairs:
                self._slots.append(_both_ways(pairs))
        if 2 < len(numbers) <= SPREAD_MAX and self._slots:
            distant = {
                number: tuple(n for n in numbers if n != number and not local(n, number))
                for number in numbers
            }
            self._slots.append({number: senders for number, senders in distant.items() if senders})

    def next(self, links: Mapping[Hop, Link]) -> Slot:
        """The next slot, by the links that are known so far; empty: there is no more."""
        return self._slots.popleft() if self._slots else {}


class Survey:
    """Finds the sites of many peers; those of one machine are at one site."""

    def __init__(self, machines: Iterable[Sequence[int]]) -> None:
        self._members = {one[0]: list(one) for one in machines}  # of each set; named by one of them
        self._name = {peer: name for name, peers in self._members.items() for peer in peers}
        self._apart: dict[int, set[int]] = {name: set() for name in self._members}
        self._asked: list[tuple[int, int]] = []
        self._slots = 0

    def next(self, links: Mapping[Hop, Link]) -> Slot:
        for a, b in self._asked:
            self._learn(a, b, [links.get((a, b)), links.get((b, a))])
        self._slots += 1
        self._asked = self._pairs() if self._slots <= SLOTS_MAX else []
        return _both_ways(self._asked)

    @property
    def sites(self) -> list[tuple[int, ...]]:
        """The sites, as far as is known; the peers of a machine are neighbours in it."""
        return [tuple(peers) for peers in self._members.values()]

    def _learn(self, a: int, b: int, found: Sequence[Link | None]) -> None:
        """Two peers were measured with each other; if neither has reached the other one, they are
        at two sites."""
        one, other = self._name[a], self._name[b]
        delays = [link.delay_us for link in found if link is not None and link.rate]
        if one == other:
            return
        if not delays or min(delays) > SITE_US:
            self._apart[one].add(other)
            self._apart[other].add(one)
            return
        if len(self._members[one]) < len(self._members[other]):
            one, other = other, one
        for peer in self._members[other]:
            self._name[peer] = one
        self._members[one] += self._members.pop(other)
        self._apart[one] |= (gone := self._apart.pop(other))
        for third in gone:
            self._apart[third].discard(other)
            self._apart[third].add(one)
        self._apart[one].discard(one)

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of sets that were not compared yet, each peer in at most one: small sets first,
        each with the largest ones."""
        large = sorted(self._members, key=lambda name: (-len(self._members[name]), name))
        free = {name: list(reversed(self._members[name])) for name in large}
        pairs = []
        done: set[frozenset[int]] = set()
        for name in reversed(large):
            for other in large:
                if not free[name]:
                    break
                both = frozenset((name, other))
                if name == other or not free[other] or other in self._apart[name] or both in done:
                    continue
                done.add(both)
                pairs.append((free[name].pop(), free[other].pop()))
        return pairs


Schedule: TypeAlias = Everything | Survey  # the measurements of one group


def tour(sites: Sequence[Sequence[int]], measured: Mapping[Hop, Link]) -> tuple[int, ...]:
    """A ring over all peers that leaves each site once; it begins with the lowest number."""
    site_of = {peer: index for index, site in enumerate(sites) for peer in site}
    between = typical(measured, site_of)
    known = {hop: between.get(hop, Link(0, 0)) for hop in permutations(range(len(sites)), 2)}
    order = best_order(range(len(sites)), known) if len(sites) > 1 else (0,)
    gates: dict[Hop, list[Hop]] = {}
    for hop in measured:
        if hop[0] in site_of and hop[1] in site_of:
            gates.setdefault((site_of[hop[0]], site_of[hop[1]]), []).append(hop)
    entry: dict[int, int] = {}
    leave: dict[int, int] = {}
    for one, other in hops(order) if len(order) > 1 else ():
        best = sorted(gates.get((one, other), ()), key=lambda hop: (-measured[hop].rate, hop))
        for a, b in best:
            alone, only = len(sites[one]) == 1, len(sites[other]) == 1
            if (alone or a != entry.get(one)) and (only or b != leave.get(other)):
                leave[one], entry[other] = a, b
                break
    found = [
        peer for site in order for peer in _walk(sites[site], entry.get(site), leave.get(site))
    ]
    first = found.index(min(found))
    return (*found[first:], *found[:first])


def _walk(site: Sequence[int], first: int | None, last: int | None) -> list[int]:
    """The peers of a site, from the one that is entered to the one that is left."""
    middle = [peer for peer in site if peer not in (first, last)]
    begin = [] if first is None else [first]
    return [*begin, *middle, *([] if last is None or last == first else [last])]


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Slot:
    return {number: (sender,) for a, b in pairs for number, sender in ((a, b), (b, a))}
