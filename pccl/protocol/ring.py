"""Ring planning: the orders of the peers, and the share of the data of each ring."""

from __future__ import annotations

import functools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from pccl.protocol import reach
from pccl.protocol.messages import PeerInfo, Ring, Spec
from pccl.protocol.topology import EXACT_MAX, Hop, exact, hops
from pccl.types import CollectiveKind

ALIGNMENT = 64  # elements; shares, segments and chunks begin at its multiples (c/pccl_core.h)
BARRED = 1 << 20  # the cost of a hop to avoid at any price
COSTLY_MAX = 4  # costly hops improved at the same time

Cost = Callable[[Hop], int]


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A peer's place in one ring of a collective: fields of a pccl_ring (c/pccl_core.h)."""

    stream: int  # leads to the successor
    members: int  # the number of the ring's members
    position: int  # this peer's position in the ring
    begin: int = 0  # the offset at which the ring's share of the data begins
    count: int = 0  # the number of offsets in the share
    root: int = 0  # the position of the root, if the collective has one
    ranks: tuple[int, ...] = ()  # the members' ranks by position; empty: they are the positions


def checksum(order: Sequence[int]) -> int:
    """A checksum of the order of a ring's peers, from which the ranks follow; never 0."""
    return zlib.crc32(" ".join(map(str, order)).encode()) or 1


def free(hop: Hop) -> int:
    """The cost of a hop if no hop is to be avoided."""
    return 0


def plan_rings(
    peers: Sequence[PeerInfo], chosen: Sequence[Ring] = (), cost: Cost = free
) -> tuple[Ring, ...]:
    """Rings over all peers: the chosen ones, else one ring; none for fewer than two peers.

    The chosen rings may contain peers that have left, and lack newcomers. `peers` are in the order
    of acceptance, which breaks ties, so every call gives the same plan. An order with a barred hop
    is changed if a change makes it cheaper; a hop between peers that are apart is barred.
    """
    if len(peers) < 2:
        return ()
    outgoing = {peer.peer: peer for peer in peers if peer.outgoing}

    def barred(hop: Hop) -> bool:
        one, other = outgoing.get(hop[0]), outgoing.get(hop[1])
        return one is not None and other is not None and reach.apart(one, other)

    def price(hop: Hop) -> int:
        return max(cost(hop), BARRED) if barred(hop) else cost(hop)

    weights: Counter[tuple[int, ...]] = Counter()
    for ring in chosen or (Ring((), 1),):
        order = _order(peers, ring.order)
        if outgoing:
            order = _spread(order, outgoing.keys(), barred)
        if any(price(hop) >= BARRED for hop in hops(order)):
            order = _cheaper(order, price)
        weights[order] += ring.weight
    return tuple(Ring(order, weight) for order, weight in weights.items())


def _spread(
    order: Sequence[int], outgoing: Collection[int], barred: Callable[[Hop], bool]
) -> tuple[int, ...]:
    """The order with as few barred hops as possible, otherwise unchanged; rank 0 stays.

    A hop is `barred` if it is between two `outgoing` peers that are apart.
    """
    blocks: list[list[int]] = []  # outgoing peers of one machine, or one other peer
    for number in order:
        before = blocks[-1][-1] if blocks else -1
        if number in outgoing and before in outgoing and not barred((before, number)):
            blocks[-1].append(number)
        else:
            blocks.append([number])
    kept: list[list[int]] = []
    moved: deque[list[int]] = deque()
    for block in blocks:
        clash = kept and barred((kept[-1][-1], block[0]))
        (moved if clash else kept).append(block)
    if len(kept) > 1 and barred((kept[-1][-1], kept[0][0])):
        moved.append(kept.pop())
    spread: list[int] = []
    for block, after in zip(kept, [*kept[1:], kept[0]], strict=True):
        spread += block
        if moved and block[-1] not in outgoing and after[0] not in outgoing:
            spread += moved.popleft()
    return (*spread, *(number for block in moved for number in block))


def uses(rings: Sequence[Ring], barred: Collection[Hop]) -> bool:
    return any(hop in barred for ring in rings for hop in hops(ring.order))


def _cheaper(order: tuple[int, ...], cost: Cost) -> tuple[int, ...]:
    """A cheaper order, if there is one: the cheapest for few peers, a good one for many."""
    if len(order) > EXACT_MAX:
        return _swapped(order, cost)
    return exact(order, {hop: (0, cost(hop)) for hop in permutations(order, 2)})


def _swapped(order: tuple[int, ...], cost: Cost) -> tuple[int, ...]:
    """Swaps peers at costly hops with others while this makes the order cheaper."""
    size, changed = len(order), list(order)
    for _ in range(size):
        paid = sorted(((cost(hop), -i) for i, hop in enumerate(hops(changed))), reverse=True)
        costly = [-at for price, at in paid[:COSTLY_MAX] if price]
        ends = {i % size for at in costly for i in (at, at + 1)} - {0}  # rank 0 stays
        swaps = (
            (_swap_cost(changed, i, j, cost), i, j) for i in sorted(ends) for j in range(1, size)
        )
        change, i, j = min(swaps, default=(0, 0, 0))
        if change >= 0:
            break
        changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


def _swap_cost(order: Sequence[int], i: int, j: int, cost: Cost) -> int:
    """The additional cost of the order if the i-th and the j-th peer are swapped."""
    swapped = {i: order[j], j: order[i]}
    change = 0
    for at in {(i - 1) % len(order), i, (j - 1) % len(order), j}:
        after = (at + 1) % len(order)
        change += cost((swapped.get(at, order[at]), swapped.get(after, order[after])))
        change -= cost((order[at], order[after]))
    return change


def _order(peers: Sequence[PeerInfo], chosen: Sequence[int]) -> tuple[int, ...]:
    """The peers in the chosen order; newcomers beside peers of their machine."""
    chosen_at = {number: index for index, number in enumerate(chosen)}
    last_of: dict[tuple[str, str], int] = {}  # the last position of each machine's peers
    for peer in sorted(peers, key=lambda peer: chosen_at.get(peer.peer, -1)):
        if peer.peer in chosen_at:
            last_of[peer.machine, peer.host] = chosen_at[peer.peer]
    for index, peer in enumerate(peers):
        last_of.setdefault((peer.machine, peer.host), len(chosen) + index)

    def place(index: int) -> tuple[int, int]:
        peer = peers[index]
        if peer.peer in chosen_at:
            return chosen_at[peer.peer], -1
        return last_of[peer.machine, peer.host], index

    return tuple(peers[i].peer for i in sorted(range(len(peers)), key=place))


def successors(rings: Sequence[Ring], number: int) -> tuple[int, ...]:
    return tuple(ring.order[(ring.order.index(number) + 1) % len(ring.order)] for ring in rings)


def receivers(
    work: Spec, gives: Sequence[int], rings: Sequence[Ring], number: int
) -> frozenset[int]:
    """The peers for which a peer has rows; `gives`: the numbers of rows by rank; empty: equal."""
    order = rings[0].order
    if work.what == CollectiveKind.GATHER:
        found = {order[work.root]}
    elif work.what == CollectiveKind.SCATTER and number != order[work.root]:
        found = set()
    else:
        found = {peer for rank, peer in enumerate(order) if not gives or gives[rank]}
    return frozenset(found - {number})


@functools.lru_cache(maxsize=64)  # the same work comes again and again
def span(work: Spec) -> int:
    """The number of offsets of a collective's data: its tensors in sequence, in whole blocks.

    If members send different numbers of rows, the member that sends the most counts.
    """
    counts = [part.count for part in work.parts] or [work.count]
    rows = max(work.rows, default=1)
    return sum(-(-count * rows // ALIGNMENT) * ALIGNMENT for count in counts)


def shares(count: int, rings: Sequence[Ring]) -> list[tuple[int, int]]:
    """(begin, count) of each ring's part of `count` offsets, in proportion to weight."""
    blocks = -(-count // ALIGNMENT)
    total = sum(ring.weight for ring in rings)
    bounds, weight = [0], 0
    for ring in rings:
        weight += ring.weight
        bounds.append(min(count, ALIGNMENT * (blocks * weight // total)))
    return [(begin, end - begin) for begin, end in pairwise(bounds)]


@functools.lru_cache(maxsize=64)  # the same work comes again and again under a plan
def places(
    work: Spec, rings: tuple[Ring, ...], number: int, streams: tuple[int, ...]
) -> tuple[RingPlace, ...]:
    """A peer's place in each ring of a collective; `streams` lead to its successors.

    A rank is a position in the first of the rings.
    """
    found: list[RingPlace] = []
    of_rings = zip(streams, shares(span(work), rings), _seats(rings, number), strict=True)
    for stream, share, (position, ranks) in of_rings:
        named = ranks if found else ()
        root = ranks.index(work.root)
        found.append(RingPlace(stream, len(ranks), position, *share, root, named))
    return tuple(found)


@functools.lru_cache(maxsize=8)  # for all collectives under a plan, not for each
def _seats(rings: tuple[Ring, ...], number: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """A peer's position in each ring, and the rank of each position."""
    rank = {peer: index for index, peer in enumerate(rings[0].order)} if rings else {}
    return tuple(
        (ring.order.index(number), tuple(rank[peer] for peer in ring.order)) for ring in rings
    )
