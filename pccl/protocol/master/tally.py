"""Counters and durations for `status` and metrics. No decision depends on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct, field

from pccl.protocol import messages as m
from pccl.protocol.rounds import EXCLUSIVE, PENDING, Kind, Round
from pccl.types import TRAITS, CollectiveKind, DataType, QuantizationAlgorithm

K = TypeVar("K")
# bounds of histograms, from a round on one machine to a wait that needs an operator
BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


COUNT_MAX = (1 << 63) - 1  # peers may claim any sizes, and JSON has no greater integers
SIZES = {kind.value: kind.itemsize for kind in DataType}
ENCODINGS = {kind.value: kind.name.lower() for kind in QuantizationAlgorithm}


class Loss(StrEnum):
    LEFT = "left"
    DISCONNECTED = "disconnected"
    DISMISSED = "dismissed"


class Reason(StrEnum):
    PEER_LOST = "peer_lost"
    LINK = "link"  # a peer could not complete it, or could not forward data
    TIMEOUT = "timeout"  # a caller's time was up
    MEMORY = "memory"  # a peer ran out of memory
    MASTER_LOST = "master_lost"  # the master was restarted meanwhile


class Histogram(Struct):
    """Durations: a count for each interval of BOUNDS_S, one above the last bound, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


def _histograms(kinds: Iterable[K]) -> dict[K, Histogram]:
    return {kind: Histogram() for kind in kinds}


class Counts(Struct):
    """Counters since the master began. Durations are histograms with the bounds tally.BOUNDS_S."""

    joined: int = 0  # peers that were accepted
    # accepted peers that were lost, by how
    lost: dict[Loss, int] = field(default_factory=lambda: dict.fromkeys(Loss, 0))
    committed: int = 0  # collectives that committed
    aborted: int = 0  # collectives that were aborted
    # how long the first peer waited for the last one to vote, by the kind of the vote
    votes: dict[Kind, Histogram] = field(default_factory=lambda: _histograms(Kind))
    # how long committed collectives took once all had entered them, by kind
    collectives: dict[CollectiveKind, Histogram] = field(
        default_factory=lambda: _histograms(CollectiveKind)
    )
    # bytes that each member gave to these, before quantization, by encoding
    carried: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENCODINGS.values(), 0))
    # collectives that were aborted, by reason
    retries: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    # how long synchronizations took once all had entered them
    syncs: Histogram = field(default_factory=Histogram)
    synced_bytes: int = 0  # bytes of shared state that peers lacked and received
    resynced_bytes: int = 0  # the part of these that went to peers of the previous synchronization
    parity_failures: int = 0  # peers that had other content at the elected revision
    # how long a group had no collective after one was interrupted
    recoveries: Histogram = field(default_factory=Histogram)


class Course:
    """The bandwidth and goodput of a group's collectives.

    An aborted collective loses the time since its start, and the recovery: the time until the next
    collective starts. Time is also lost while a member waits for others to enter a call.
    """

    def __init__(self) -> None:
        # bytes per second that each link of the ring carried in the last collective around it; None
        # before the first
        self.bus_rate: float | None = None
        self._began_s: float | None = None  # when the first collective started
        self._lost_s = 0.0
        self._lost_until_s = 0.0  # time lost before this is counted in `_lost_s`
        self._lost_since_s: float | None = None  # in a recovery: the start of what was aborted
        self._interrupted_s = 0.0

    def started(self, now_s: float) -> float | None:
        """Notes that a collective starts. Returns the duration of the recovery that this ends."""
        if self._began_s is None:
            self._began_s = now_s
        if self._lost_since_s is None:
            return None
        self.lost(self._lost_since_s, now_s)
        self._lost_since_s = None
        return now_s - self._interrupted_s

    def lost(self, since_s: float, until_s: float) -> None:
        """Counts lost time, except for parts that were counted before."""
        if self._began_s is not None:
            since_s = max(since_s, self._began_s, self._lost_until_s)
            self._lost_s += max(0.0, until_s - since_s)
            self._lost_until_s = max(self._lost_until_s, until_s)

    def aborted(self, since_s: float, interrupted_s: float) -> None:
        """Notes that a collective that had started at `since_s` was aborted."""
        if self._lost_since_s is None:
            self._lost_since_s, self._interrupted_s = since_s, interrupted_s
        else:
            self._lost_since_s = min(self._lost_since_s, since_s)

    def goodput(self, now_s: float, stuck_since_s: float | None = None) -> float | None:
        """The share of the time since the first collective that was not lost; None before that.

        Args:
            now_s: the time.
            stuck_since_s: since when a member has waited for others to enter a call.
        """
        if self._began_s is None or now_s <= self._began_s:
            return None
        since_s = [each for each in (self._lost_since_s, stuck_since_s) if each is not None]
        since_s = [max(each, self._began_s, self._lost_until_s) for each in since_s]
        lost_s = self._lost_s + now_s - min(since_s, default=now_s)
        return max(0.0, 1.0 - lost_s / (now_s - self._began_s))


LAUNCHED_S = 10.0  # a caller that has launched a call is assumed to compute for this long


def stuck_since_s(round_: Round) -> float | None:
    """Since when a member has only waited in a round; None: no member has."""
    first = next(iter(round_.votes.values()))
    if first.stuck or round_.id.kind in EXCLUSIVE:
        return first.since_s
    if round_.id == PENDING:
        return None  # a separate thread waits for newcomers
    stuck = (vote.since_s for vote in round_.votes.values() if vote.stuck)
    return min(next(stuck, math.inf), first.since_s + LAUNCHED_S)


class Tally:
    """The counters of a master, and the course of each group's collectives."""

    def __init__(self) -> None:
        self.now_s = 0.0  # the time, set by the caller
        self.counts = Counts()  # the counters
        self.courses: defaultdict[int, Course] = defaultdict(Course)  # by group

    def committed(self, round_: Round) -> None:
        first, last = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        self.counts.votes[round_.id.kind].add(last.since_s - first.since_s)
        if last.since_s <= first.since_s or (since_s := stuck_since_s(round_)) is None:
            return
        group = round_.id.group
        for number in self.courses if group is None else self.courses.keys() & {group}:
            self.courses[number].lost(since_s, last.since_s)

    def started(self, group: int) -> None:
        recovery_s = self.courses[group].started(self.now_s)
        if recovery_s is not None:
            self.counts.recoveries.add(recovery_s)

    def ended(self, group: int, work: m.Spec, members: int, since_s: float) -> None:
        """Counts the commit of a collective that all had entered at `since_s`."""
        taken_s = self.now_s - since_s
        counts, given = self.counts, size(work)
        counts.committed += 1
        counts.collectives[work.what].add(taken_s)
        encoding = ENCODINGS.get(work.algorithm, "unknown")
        counts.carried[encoding] = min(counts.carried.get(encoding, 0) + given, COUNT_MAX)
        on_link = given * TRAITS[work.what].link_bytes(members)
        if on_link and taken_s > 0:
            self.courses[group].bus_rate = on_link / taken_s

    def aborted(self, group: int, reason: Reason, since_s: float, interrupted_s: float) -> None:
        self.counts.aborted += 1
        self.counts.retries[reason] += 1
        self.courses[group].aborted(since_s, interrupted_s)

    def synchronized(self, since_s: float, nbytes: Iterable[tuple[int, bool]]) -> None:
        """Counts a synchronization. `nbytes` has, for each receiver, the bytes that it lacked, and
        whether it took part in the previous synchronization."""
        counts = self.counts
        counts.syncs.add(self.now_s - since_s)
        for number, again in nbytes:
            counts.synced_bytes = min(counts.synced_bytes + number, COUNT_MAX)
            counts.resynced_bytes = min(counts.resynced_bytes + number * again, COUNT_MAX)


def size(work: m.Spec) -> int:
    """Bytes that each member gives before quantization; in reduce_scatter and scatter, receives."""
    if not work.parts:
        return SIZES.get(work.dtype, 0) * work.count
    return sum(SIZES.get(part.dtype, 0) * part.count for part in work.parts)
