"""Counts of what has happened, for `status` and metrics. No decision depends on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct, field

from pccl.protocol import messages as m
from pccl.protocol.messages import CollectiveKind
from pccl.protocol.rounds import EXCLUSIVE, PENDING, Kind, Round
from pccl.types import DataType, QuantizationAlgorithm

K = TypeVar("K")
# seconds: from what a round takes on one machine to what makes an operator look
BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


COUNT_MAX = (1 << 63) - 1  # peers may claim any sizes, and JSON has no greater integers
SIZES = {kind.value: kind.itemsize for kind in DataType}
ENCODINGS = {kind.value: kind.name.lower() for kind in QuantizationAlgorithm}


class Loss(StrEnum):
    """How an accepted peer went."""

    LEFT = "left"
    DISCONNECTED = "disconnected"
    DISMISSED = "dismissed"


class Reason(StrEnum):
    """Why a collective was aborted."""

    PEER_LOST = "peer_lost"
    LINK = "link"  # a peer could not complete it, or not pass on its data
    TIMEOUT = "timeout"  # a caller did not wait longer
    MEMORY = "memory"  # a peer ran out of it
    MASTER_LOST = "master_lost"  # it was restarted meanwhile


class Histogram(Struct):
    """Durations: how many were at most as long as each of BOUNDS_S but longer than the one before,
    and last those that were longer than all; and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, duration_s: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s


def _histograms(kinds: Iterable[K]) -> dict[K, Histogram]:
    return {kind: Histogram() for kind in kinds}


class Counts(Struct):
    """Since the master began. Durations are histograms in the bounds of tally.BOUNDS_S.

    Attributes:
        joined: peers that were accepted.
        lost: peers that have gone, by how.
        committed: collectives.
        aborted: collectives, as `retries` has them by the reason.
        votes: by what was voted on, how long the first peer waited for the last one.
        collectives: those that committed: how long they took once all had entered them.
        carried: bytes that each member gave to these, before quantization, by the encoding.
        retries: collectives that were aborted.
        syncs: synchronizations: how long they took once all had entered them.
        synced_bytes: payload that peers lacked and received.
        resynced_bytes: of which those who had taken part in the synchronization before.
        parity_failures: peers that had other content at the elected revision.
        recoveries: how long a group had no collective after one was interrupted.
    """

    joined: int = 0
    lost: dict[Loss, int] = field(default_factory=lambda: dict.fromkeys(Loss, 0))
    committed: int = 0
    aborted: int = 0
    votes: dict[Kind, Histogram] = field(default_factory=lambda: _histograms(Kind))
    collectives: dict[CollectiveKind, Histogram] = field(
        default_factory=lambda: _histograms(CollectiveKind)
    )
    carried: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENCODINGS.values(), 0))
    retries: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    syncs: Histogram = field(default_factory=Histogram)
    synced_bytes: int = 0
    resynced_bytes: int = 0
    parity_failures: int = 0
    recoveries: Histogram = field(default_factory=Histogram)


class Course:
    """How the collectives of a group went.

    A collective that is aborted has cost the time since its start; then nothing of the group goes
    on until another one starts, in most cases the same once more. That is a recovery. Time is lost
    too while a member stands in a call, and waits for others to enter it.

    Attributes:
        bus_rate: bytes per second that each link of the ring carried in the last collective around
            it; None before the first.
    """

    def __init__(self) -> None:
        self.bus_rate: float | None = None
        self._began_s: float | None = None  # when the first collective started
        self._lost_s = 0.0
        self._lost_until_s = 0.0  # what was lost before is counted
        self._lost_since_s: float | None = None  # when the first of those now aborted started
        self._interrupted_s = 0.0

    def started(self, now_s: float) -> float | None:
        """A collective has started. Returns how long a recovery has lasted that ends with this."""
        if self._began_s is None:
            self._began_s = now_s
        if self._lost_since_s is None:
            return None
        self.lost(self._lost_since_s, now_s)
        self._lost_since_s = None
        return now_s - self._interrupted_s

    def lost(self, since_s: float, until_s: float) -> None:
        """Time was lost, of which a part may have been counted already."""
        if self._began_s is not None:
            since_s = max(since_s, self._began_s, self._lost_until_s)
            self._lost_s += max(0.0, until_s - since_s)
            self._lost_until_s = max(self._lost_until_s, until_s)

    def aborted(self, since_s: float, interrupted_s: float) -> None:
        """A collective that had started at `since_s` was aborted."""
        if self._lost_since_s is None:
            self._lost_since_s, self._interrupted_s = since_s, interrupted_s
        else:
            self._lost_since_s = min(self._lost_since_s, since_s)

    def goodput(self, now_s: float, stuck_since_s: float | None = None) -> float | None:
        """The share of the time since the first collective in which nothing was lost; None before
        that one, or at once.

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


LAUNCHED_S = 10.0  # a caller that has only launched a call may well compute for so long


def stuck_since_s(round_: Round[object]) -> float | None:
    """Since when a member has stood in a round, and done nothing else; None: none does yet."""
    first = next(iter(round_.votes.values()))
    if first.stuck or round_.id.kind in EXCLUSIVE:
        return first.since_s
    if round_.id == PENDING:
        return None  # who asks in a thread of its own waits for newcomers
    stuck = (vote.since_s for vote in round_.votes.values() if vote.stuck)
    return min(next(stuck, math.inf), first.since_s + LAUNCHED_S)


class Tally:
    """Counts of all that a master has seen since it began, and the state of each group's
    collectives.

    Attributes:
        now_s: the time.
        counts: what it has seen.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.counts = Counts()
        self._courses: dict[int, Course] = {}

    def committed(self, round_: Round[object]) -> None:
        """All have voted."""
        first, last = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        self.counts.votes[round_.id.kind].add(last.since_s - first.since_s)
        if last.since_s <= first.since_s or (since_s := stuck_since_s(round_)) is None:
            return
        group = round_.id.group
        for number in self._courses if group is None else self._courses.keys() & {group}:
            self._courses[number].lost(since_s, last.since_s)

    def course(self, group: int) -> Course:
        """How the collectives of a group went."""
        course = self._courses.get(group)
        if course is None:
            course = self._courses[group] = Course()
        return course

    def forget(self, group: int) -> None:
        """A group is empty."""
        self._courses.pop(group, None)

    def started(self, group: int) -> None:
        """A collective has started."""
        recovery_s = self.course(group).started(self.now_s)
        if recovery_s is not None:
            self.counts.recoveries.add(recovery_s)

    def ended(self, group: int, work: m.Spec, members: int, since_s: float) -> None:
        """A collective, which all had entered at `since_s`, has committed."""
        taken_s = self.now_s - since_s
        counts, given = self.counts, size(work)
        counts.committed += 1
        counts.collectives[work.what].add(taken_s)
        encoding = ENCODINGS.get(work.algorithm, "unknown")
        counts.carried[encoding] = min(counts.carried.get(encoding, 0) + given, COUNT_MAX)
        around = factor(work.what, members)
        if around and given and taken_s > 0:
            self.course(group).bus_rate = around * given / taken_s

    def aborted(self, group: int, reason: Reason, since_s: float, interrupted_s: float) -> None:
        """A collective has been aborted."""
        self.counts.aborted += 1
        self.counts.retries[reason] += 1
        self.course(group).aborted(since_s, interrupted_s)

    def synchronized(self, since_s: float, nbytes: Iterable[tuple[int, bool]]) -> None:
        """A synchronization has succeeded: what each receiver lacked, and whether it had taken part
        in the one before."""
        counts = self.counts
        counts.syncs.add(self.now_s - since_s)
        for number, again in nbytes:
            counts.synced_bytes = min(counts.synced_bytes + number, COUNT_MAX)
            counts.resynced_bytes = min(counts.resynced_bytes + number * again, COUNT_MAX)


def size(work: m.Spec) -> int:
    """Bytes that each member gives, before quantization; of some collectives, receives."""
    if not work.parts:
        return SIZES.get(work.dtype, 0) * work.count
    return sum(SIZES.get(part.dtype, 0) * part.count for part in work.parts)


def factor(what: CollectiveKind, members: int) -> float:
    """Bytes that a link of the ring carries for each that a member gives, as nccl-tests counts
    them; 0 for what does not go around the ring."""
    match what:
        case CollectiveKind.ALL_REDUCE:
            return 2 * (members - 1) / members
        case CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_GATHER:
            return float(members - 1)
        case CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            return 1.0
        case _:
            return 0.0
