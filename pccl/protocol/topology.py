"""Which order of a ring suits links of different speed. Pure functions.

All links of a ring carry the same bytes at the same time, so the slowest decides how long a large
collective takes, and how far it is around the ring twice is added to that. A ring that is best in
this sense is a bottleneck travelling salesman's tour: found for certain among few peers, by local
search (2-opt and or-opt: Croes, 1958; Or, 1976) among many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

NOMINAL_BYTES = 64 << 20  # that each link carries in the collective which an order is to suit
CHUNK_BYTES = 256 << 10  # what a peer has of them before it sends on
EXACT_MAX = 8  # peers; more have too many orders to look at all
SEARCH_STEPS = 300_000  # links looked at by a local search: half a second, or so
GAIN = 0.2  # of the time: for less no order is given up, since measurements vary


class Link(NamedTuple):
    """What is known of the way from one peer to another.

    Attributes:
        rate: bytes per second; 0: nothing came through.
        delay_us: until the first bytes are there.
    """

    rate: int
    delay_us: int


LOCAL = Link(8 << 30, 100)  # within a machine: more than any network, and not worth measuring


class Links:
    """The links among some peers; one that is not known is as bad as the worst at its ends.

    Args:
        measured: by (from whom, to whom).
        local: whether two peers are on one machine.
    """

    def __init__(
        self, measured: Mapping[tuple[int, int], Link], local: Callable[[int, int], bool]
    ) -> None:
        self._measured, self._local = measured, local
        self._worst: dict[int, Link] = {}
        for ends, link in measured.items():
            for end in ends:
                self._worst[end] = _worse(self._worst.get(end, link), link)

    def __getitem__(self, hop: tuple[int, int]) -> Link:
        """The link of a hop: from whom, to whom."""
        if hop in self._measured:
            return self._measured[hop]
        if self._local(*hop):
            return LOCAL
        one, other = (self._worst.get(end, Link(0, 0)) for end in hop)
        return _worse(one, other)


def _worse(one: Link, other: Link) -> Link:
    return Link(min(one.rate, other.rate), max(one.delay_us, other.delay_us))


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


def seconds(order: Sequence[int], links: Links) -> float:
    """How long an all-reduce over a ring is expected to take, with NOMINAL_BYTES on each link."""
    hops = [_hop_seconds(links[hop]) for hop in pairwise((*order, order[0]))]
    return max(all_s for all_s, _ in hops) + sum(chunk_s for _, chunk_s in hops)


def _hop_seconds(link: Link) -> tuple[float, float]:
    """What all bytes take over a link, and what one chunk adds to its way, twice around."""
    rate = link.rate or 1
    return NOMINAL_BYTES / rate, 2 * (link.delay_us * 1e-6 + CHUNK_BYTES / rate)


def slowest(order: Sequence[int], links: Links) -> tuple[int, int]:
    """The slowest link of a ring: from whom to whom."""
    return min(pairwise((*order, order[0])), key=lambda hop: links[hop].rate)


def best_order(current: Sequence[int], links: Links) -> tuple[int, ...]:
    """The order of a ring over the peers of `current`, which is kept if none is clearly better.

    It begins with the lowest number, so that rank 0 stays with the same peer.

    Args:
        current: the ring as it is, two peers or more.
        links: all links among them.
    """
    if len(current) <= EXACT_MAX:
        found = _exact(current, links)
    else:
        found = _search(current, links)
    if seconds(found, links) > (1 - GAIN) * seconds(current, links):
        return tuple(current)
    first = found.index(min(found))
    return (*found[first:], *found[:first])


def _exact(current: Sequence[int], links: Links) -> tuple[int, ...]:
    """The best of all orders, by depth first; one that cannot beat the best so far is given up."""
    best, best_s = tuple(current), seconds(current, links)
    cost, pace = {}, {}
    for hop in permutations(current, 2):
        pace[hop], cost[hop] = _hop_seconds(links[hop])
    start: tuple[int, ...] = (current[0],)
    stack = [(start, frozenset(current[1:]), 0.0, 0.0)]
    while stack:
        path, left, around, slowest_s = stack.pop()
        if around + slowest_s >= best_s:
            continue
        if not left:
            last = path[-1], path[0]
            whole_s = around + cost[last] + max(slowest_s, pace[last])
            if whole_s < best_s:
                best, best_s = path, whole_s
        for peer in sorted(left, reverse=True):
            hop = path[-1], peer
            after = around + cost[hop], max(slowest_s, pace[hop])
            stack.append(((*path, peer), left - {peer}, *after))
    return best


def _search(current: Sequence[int], links: Links) -> tuple[int, ...]:
    """The better of what local search makes of the current order and of a greedy one."""
    found = [_improved(start, links) for start in (list(current), _greedy(current, links))]
    best = min(found, key=lambda order: seconds(order, links))
    return tuple(best)


def _greedy(current: Sequence[int], links: Links) -> list[int]:
    """From each peer on to the one that is reached at the best rate."""
    order, left = [current[0]], set(current[1:])
    while left:
        last = order[-1]
        order.append(max(sorted(left), key=lambda peer: links[last, peer].rate))
        left.discard(order[-1])
    return order


def _improved(order: list[int], links: Links) -> list[int]:
    """An order in which no change of one kind makes a better one, unless that takes too long."""
    best_s, steps, better = seconds(order, links), 0, True
    while better:
        better = False
        for changed in _changes(order):
            steps += len(order)
            if steps > SEARCH_STEPS // 2:
                return order
            changed_s = seconds(changed, links)
            if changed_s < best_s:
                order, best_s, better = changed, changed_s, True
                break
    return order


def _changes(order: list[int]) -> Iterator[list[int]]:
    """The orders in which some neighbours go the other way, or elsewhere."""
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
