"""Ring planning: who sends to whom, and which share of the data each ring carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from pccl.protocol.messages import PeerInfo, Ring, Work
from pccl.protocol.orders import RingPart

QUANTUM = 64  # elements; shares begin at its multiples, as segments and chunks do (c/pccl.h)


def plan_rings(peers: Sequence[PeerInfo], chosen: Sequence[Ring] = ()) -> tuple[Ring, ...]:
    """Rings over all peers: those that were chosen, else one; none for fewer than two peers.

    Those that were chosen may also name peers that have left, and not yet name all. Peers are in
    the order of acceptance, which breaks ties, so every call gives the same plan.
    """
    if len(peers) < 2:
        return ()
    weights: Counter[tuple[int, ...]] = Counter()
    for ring in chosen or (Ring((), 1),):
        weights[_order(peers, ring.order)] += ring.weight
    return tuple(Ring(order, weight) for order, weight in weights.items())


def _order(peers: Sequence[PeerInfo], chosen: Sequence[int]) -> tuple[int, ...]:
    """The peers in the chosen order, others of them side by side with those of their machine."""
    chosen_at = {number: index for index, number in enumerate(chosen)}
    last_of: dict[tuple[str, str], int] = {}  # of a machine: where its peers end
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


def span(work: Work) -> int:
    """The offsets of a collective's data: its tensors one after the other, in whole quanta."""
    counts = [part.count for part in work.parts] or [work.count]
    return sum(-(-count // QUANTUM) * QUANTUM for count in counts)


def shares(count: int, rings: Sequence[Ring]) -> list[tuple[int, int]]:
    """(begin, count) of each ring's part of `count` offsets, in proportion to weight."""
    quanta = -(-count // QUANTUM)
    total = sum(ring.weight for ring in rings)
    bounds, weight = [0], 0
    for ring in rings:
        weight += ring.weight
        bounds.append(min(count, QUANTUM * (quanta * weight // total)))
    return [(begin, end - begin) for begin, end in pairwise(bounds)]


def places(
    work: Work, rings: Sequence[Ring], number: int, streams: Sequence[int]
) -> tuple[RingPart, ...]:
    """A peer's place in each ring of a collective, where a stream leads to its successor.

    A rank is a position in the first of the rings.
    """
    rank = {peer: index for index, peer in enumerate(rings[0].order)} if rings else {}
    parts = []
    for stream, ring, share in zip(streams, rings, shares(span(work), rings), strict=True):
        ranks = tuple(rank[peer] for peer in ring.order)
        position, root = ring.order.index(number), ranks.index(work.root)
        named = () if ring is rings[0] else ranks
        parts.append(RingPart(stream, len(ring.order), position, *share, root, named))
    return tuple(parts)
