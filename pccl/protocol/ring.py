"""Ring planning: who sends to whom, and which share of the data each ring carries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pccl.protocol.messages import PeerInfo, Ring

QUANTUM = 64  # elements; shares begin at its multiples, as segments and chunks do (c/pccl.h)


def plan_rings(peers: Sequence[PeerInfo]) -> tuple[Ring, ...]:
    """One ring over all peers, those of one machine side by side; none for fewer than two peers.

    Peers are in the order of acceptance, which breaks ties, so every call gives the same plan.
    """
    if len(peers) < 2:
        return ()
    first_of: dict[tuple[str, str], int] = {}
    for index, peer in enumerate(peers):
        first_of.setdefault((peer.machine, peer.host), index)
    order = sorted(range(len(peers)), key=lambda i: (first_of[peers[i].machine, peers[i].host], i))
    return (Ring(tuple(peers[i].peer for i in order), 1),)


def shares(count: int, rings: Sequence[Ring]) -> list[tuple[int, int]]:
    """(begin, count) of each ring's part of `count` elements, in proportion to weight."""
    quanta = -(-count // QUANTUM)
    total = sum(ring.weight for ring in rings)
    bounds, weight = [0], 0
    for ring in rings:
        weight += ring.weight
        bounds.append(min(count, QUANTUM * (quanta * weight // total)))
    return [(begin, end - begin) for begin, end in pairwise(bounds)]
