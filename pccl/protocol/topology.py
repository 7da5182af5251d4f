"""From measured links to rings: which links are measured, and the best rings over them.

All links of a ring carry the same bytes at the same time. So the slowest link determines the time
of a large collective, plus the delay of two trips around the ring. The best ring solves a
bottleneck traveling salesman problem. An exact search finds it for few peers; for many, local
search (2-opt and or-opt: Croes, 1958; Or, 1976) finds a good one.

One ring leaves most links of a mesh idle. If the links of a peer do not share one bottleneck,
several rings, each with a share of the data, take a fraction of the time.

A group of n peers has n (n - 1) links. Up to ALL_MAX peers all links are measured, each peer with
one other at a time. In larger groups that would take too long, and it matters only which peers are
near each other. A *site* is a set of peers; each of them reaches another one quickly. A survey
finds the sites: it measures one pair from two sets of peers, which are then one site, or two for
good. It takes about as many slots as there are sites, because the peers of a site are compared with
several other sites at the same time. The ring then leaves each site once, over the best measured
link to the next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from pccl.protocol.messages import RINGS_MAX, Ring

NOMINAL_BYTES = 64 << 20  # on each link, in the collective for which orders are compared
CHUNK_BYTES = 256 << 10  # the size of a chunk
EXACT_MAX = 8  # peers; more have too many orders to consider all
SPREAD_MAX = 6  # peers of a group that may have several rings: for more, choosing takes long
SHARES = 8  # of the best ring's slowest link; each share goes to the ring that gains most
SEARCH_STEPS = 300_000  # links considered by a local search: about half a second
GAIN = 0.2  # an order changes only if it saves this share of the time: measurements vary
ALL_MAX = 17  # the most peers of which all pairs are measured: 17 take 17 slots, 16 take 15
SLOTS_MAX = 32  # slots of a survey; sets that have not been compared by then count as two sites
SITE_US = 25_000  # peers of one site get the first bytes, after five round trips, within this time

Hop: TypeAlias = tuple[int, int]  # from whom, to whom
Slot: TypeAlias = dict[int, tuple[int, ...]]  # what is measured at once: receivers, their senders


class Link(NamedTuple):
    """The measured path from one peer to another."""

    rate: int  # bytes per second; 0: nothing arrived
    delay_us: int  # until the first bytes


LOCAL = Link(8 << 30, 100)  # within a machine: more than any network, and not worth measuring


class Links:
    """The links among some peers.

    An unknown link counts as the typical one between the sites of its ends, if these are known;
    otherwise as the worst known link at either end.
    """

    def __init__(
        self,
        measured: Mapping[tuple[int, int], Link],  # by sender and receiver
        local: Callable[[int, int], bool],  # whether two peers are on one machine
        # bytes per second that reach a peer while all peers on other machines send to it and to
        # each other, if known
        inflow: Mapping[int, int],
        # the site of each peer, if known
        site_of: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._measured, self.local, self.inflow = measured, local, inflow
        self._site_of, self._typical = site_of, typical(measured, site_of)
        self._worst: dict[int, Link] = {}
        for ends, link in measured.items():
            for end in ends:
                self._worst[end] = _worse(self._worst.get(end, link), link)

    def __getitem__(self, hop: tuple[int, int], /) -> Link:
        if hop in self._measured:
            return self._measured[hop]
        if self.local(*hop):
            return LOCAL
        between = self._typical.get((self._site_of.get(hop[0], -1), self._site_of.get(hop[1], -1)))
        if between is not None:
            return between
        one, other = (self._worst.get(end, Link(0, 0)) for end in hop)
        return _worse(one, other)


def _worse(one: Link, other: Link) -> Link:
    return Link(min(one.rate, other.rate), max(one.delay_us, other.delay_us))


def typical(measured: Mapping[Hop, Link], site_of: Mapping[int, int]) -> dict[Hop, Link]:
    """The median link from each site to each other one, and within each."""
    known: dict[Hop, list[Link]] = {}
    for (a, b), link in measured.items():
        if a in site_of and b in site_of:
            known.setdefault((site_of[a], site_of[b]), []).append(link)
    return {
        sites: Link(
            sorted(link.rate for link in links)[len(links) // 2],
            sorted(link.delay_us for link in links)[len(links) // 2],
        )
        for sites, links in known.items()
    }


def tournament(peers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs of peers, in slots of disjoint ones (the circle method of round-robin tournaments).

    n peers need n - 1 slots, or n if n is odd.
    """
    seats: list[int | None] = [*peers, *([None] if len(peers) % 2 else [])]
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def seconds(rings: Sequence[Ring], links: Links) -> float:
    """The expected time of an all-reduce in which each peer sends NOMINAL_BYTES."""
    total = sum(ring.weight for ring in rings)
    load: Counter[tuple[int, int]] = Counter()  # weights of the rings over a link
    received: Counter[int] = Counter()  # weights that reach a peer over the network
    around_s = 0.0
    for ring in rings:
        for hop in hops(ring.order):
            load[hop] += ring.weight
            received[hop[1]] += 0 if links.local(*hop) else ring.weight
        around_s = max(around_s, sum(_hop_seconds(links[hop])[1] for hop in hops(ring.order)))
    busiest_s = max(_hop_seconds(links[hop])[0] * weight for hop, weight in load.items())
    for peer, weight in received.items():
        if peer in links.inflow:
            busiest_s = max(busiest_s, NOMINAL_BYTES / (links.inflow[peer] or 1) * weight)
    return busiest_s / total + around_s


def best_rings(
    current: Sequence[Ring], links: Links, order: tuple[int, ...] = ()
) -> tuple[Ring, ...]:
    """The best rings for the links; the current ones, unless others are clearly better.

    There are several rings only if the links to a peer are known to carry more together than each
    alone. The first ring begins with the lowest number, so that rank 0 stays with the same peer.
    """
    order = order or best_order(current[0].order, links)
    found: tuple[Ring, ...] = (Ring(order, 1),)
    if len(order) <= SPREAD_MAX and links.inflow.keys() >= {*order}:
        several = _spread(order, links)
        if seconds(several, links) < (1 - GAIN) * seconds(found, links):
            found = several
    return found if seconds(found, links) < (1 - GAIN) * seconds(current, links) else (*current,)


def hops(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise((*order, order[0]))


def slowest(order: Sequence[int], links: Links | Mapping[Hop, Link]) -> tuple[int, int]:
    return min(hops(order), key=lambda hop: links[hop].rate)


def best_order(current: Sequence[int], links: Links | Mapping[Hop, Link]) -> tuple[int, ...]:
    """The best order of one ring over the peers of `current`; it begins with the lowest number."""
    if len(current) <= EXACT_MAX:
        found = exact(current, {hop: _hop_seconds(links[hop]) for hop in permutations(current, 2)})
    else:
        found = _search(current, links)
    first = found.index(min(found))
    return (*found[first:], *found[:first])


def _hop_seconds(link: Link) -> tuple[float, float]:
    """The time of all bytes on a link, and its part of a chunk's two trips around the ring."""
    rate = link.rate or 1
    return NOMINAL_BYTES / rate, 2 * (link.delay_us * 1e-6 + CHUNK_BYTES / rate)


def _order_seconds(order: Sequence[int], links: Links | Mapping[Hop, Link]) -> float:
    """The part of `seconds` that depends on the order of a ring."""
    costs = [_hop_seconds(links[hop]) for hop in hops(order)]
    return max(all_s for all_s, _ in costs) + sum(chunk_s for _, chunk_s in costs)


def _spread(order: Sequence[int], links: Links) -> tuple[Ring, ...]:
    """Rings that use the links together: a packing of Hamiltonian cycles, the heaviest first.

    The remaining capacity is divided into equal shares. Each goes to the best ring at that point.
    """
    left = {hop: links[hop] for hop in permutations(order, 2)}
    share = left[slowest(order, left)].rate // SHARES
    weights: Counter[tuple[int, ...]] = Counter()
    for _ in range(SHARES * len(order)):
        ring = best_order(order, left)
        if left[slowest(ring, left)].rate < max(share, 1):
            break
        weights[ring] += 1
        for hop in hops(ring):
            left[hop] = left[hop]._replace(rate=left[hop].rate - share)
    return tuple(Ring(*one) for one in weights.most_common(RINGS_MAX)) or (Ring((*order,), 1),)


def exact(current: Sequence[int], costs: Mapping[Hop, tuple[float, float]]) -> tuple[int, ...]:
    """The best order of one ring over a few peers; the current one, unless another is better.

    Depth first; orders that cannot beat the best so far are skipped.

    Args:
        current: begins with the peer with which all orders begin.
        costs: for each hop, a cost that counts only if it is the greatest, and one that adds up.
    """
    best = tuple(current)
    known = [costs[hop] for hop in hops(best)]
    least = max(once for once, _ in known) + sum(each for _, each in known)
    start: tuple[int, ...] = (current[0],)
    stack = [(start, frozenset(current[1:]), 0.0, 0.0)]
    while stack:
        path, left, around, worst = stack.pop()
        if around + worst >= least:
            continue
        if not left:
            once, each = costs[path[-1], path[0]]
            whole = around + each + max(worst, once)
            if whole < least:
                best, least = path, whole
        for peer in sorted(left, reverse=True):
            once, each = costs[path[-1], peer]
            stack.append(((*path, peer), left - {peer}, around + each, max(worst, once)))
    return best


def _search(current: Sequence[int], links: Links | Mapping[Hop, Link]) -> tuple[int, ...]:
    """The better result of local search from the current order and from a greedy one."""
    found = [_improved(start, links) for start in (list(current), _greedy(current, links))]
    best = min(found, key=lambda order: _order_seconds(order, links))
    return tuple(best)


def _greedy(current: Sequence[int], links: Links | Mapping[Hop, Link]) -> list[int]:
    """An order that continues from each peer to the remaining peer with the best rate."""
    order, left = [current[0]], set(current[1:])
    while left:
        last = order[-1]
        order.append(max(sorted(left), key=lambda peer: links[last, peer].rate))
        left.discard(order[-1])
    return order


def _improved(order: list[int], links: Links | Mapping[Hop, Link]) -> list[int]:
    """An order that no single change improves, unless the search takes too long."""
    best_s, steps, better = _order_seconds(order, links), 0, True
    while better:
        better = False
        for changed in _changes(order):
            steps += len(order)
            if steps > SEARCH_STEPS // 2:
                return order
            changed_s = _order_seconds(changed, links)
            if changed_s < best_s:
                order, best_s, better = changed, changed_s, True
                break
    return order


def _changes(order: list[int]) -> Iterator[list[int]]:
    """All orders that differ by a run of neighbors, reversed or moved elsewhere."""
    n = len(order)
    for i in range(n):
        for j in range(i + 1, n):
            part = order[i : j + 1]
            yield [*order[:i], *reversed(part), *order[j + 1 :]]
            if j - i < 3:
                rest = order[:i] + order[j + 1 :]
                for k in range(len(rest)):
                    if k != i:
                        yield [*rest[:k], *part, *rest[k:]]


# ---- which links are measured ----


class Everything:
    """All links: each by itself; then, for few peers, all at once. `local` links (on one machine)
    are not measured.
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
        """The next slot, given the links known so far; empty: there is no more."""
        return self._slots.popleft() if self._slots else {}


class Survey:
    """Finds the sites of many peers; those of one machine are at one site."""

    def __init__(self, machines: Iterable[Sequence[int]]) -> None:
        self._members = {one[0]: list(one) for one in machines}  # by a member: its set
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
        """The sites found so far. A site's peers on one machine are neighbors."""
        return [tuple(peers) for peers in self._members.values()]

    def _learn(self, a: int, b: int, found: Sequence[Link | None]) -> None:
        """Notes a measurement of two peers; if neither reached the other, they are at two sites."""
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
    """The peers of a site, from the ring's entry to its exit."""
    middle = [peer for peer in site if peer not in (first, last)]
    begin = [] if first is None else [first]
    return [*begin, *middle, *([] if last is None or last == first else [last])]


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Slot:
    return {number: (sender,) for a, b in pairs for number, sender in ((a, b), (b, a))}
