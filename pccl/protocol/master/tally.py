"""Counts of what has happened, for whoever watches a run. Nothing is decided by them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum

from msgspec import Struct

from pccl.protocol.rounds import Kind, Round

# seconds: from what a round takes on one machine to what makes an operator look
BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class Loss(StrEnum):
    """How an accepted peer went."""

    LEFT = "left"
    DISCONNECTED = "disconnected"
    DISMISSED = "dismissed"


class Histogram(Struct):
    """Durations: how many were at most as long as each of BOUNDS_S but longer than the one before,
    and last those that were longer than all; and their sum."""

    counts: list[int]
    total_s: float = 0.0

    def add(self, duration_s: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


class Tally:
    """What a master has seen since it began.

    Attributes:
        joined: peers that were accepted.
        lost: peers that had been accepted.
        vote_waits: of each kind of round that committed, how long the first voter waited for the
            last one.
    """

    def __init__(self) -> None:
        self.joined = 0
        self.lost = Counter(dict.fromkeys(Loss, 0))
        self.vote_waits = {kind: Histogram([0] * (len(BOUNDS_S) + 1)) for kind in Kind}

    def committed(self, round_: Round[object]) -> None:
        """All have voted."""
        first, last = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        self.vote_waits[round_.id.kind].add(last.since_s - first.since_s)
