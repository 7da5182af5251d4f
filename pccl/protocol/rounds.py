"""The round: the one primitive of agreement. All members vote, or nobody moves.

A round is identified by its kind and key; its scope says who the members are: all accepted peers of
the run, or those of one group. A peer votes by entering the call. When all members have voted the
round commits; when a member disappears the rest decide without it. A peer waits in a round from its
vote until the round ends.

Some rounds exclude each other: a peer that stands in an exclusive call cannot enter another call
before that returns, so when two peers of one scope wait in two such rounds, neither round can ever
complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Kind(Enum):
    """What is agreed on; the value is the API call's name, as errors quote it."""

    TOPOLOGY = "update_topology"
    PENDING = "are_peers_pending"
    SYNC = "sync_shared_state"
    START = "a collective"


# Pairs of kinds that may be waited for at the same time: collectives with different tags are
# launched in any order, and are_peers_pending may be asked while they run in other threads.
COMPATIBLE = {
    frozenset((Kind.START,)),
    frozenset((Kind.START, Kind.PENDING)),
}


# Of each kind: the other kinds that a peer which waits in such a round cannot come to.
EXCLUDED = {
    a: tuple(b for b in Kind if b is not a and frozenset((a, b)) not in COMPATIBLE) for a in Kind
}
RUN_WIDE = frozenset((Kind.TOPOLOGY, Kind.PENDING))


@dataclass(frozen=True, slots=True)
class RoundId:
    """Kind, group (None: the whole run), and tag for collectives."""

    kind: Kind
    group: int | None
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Vote(Generic[T]):
    """A peer's vote: the number of its call, what it asks for, and the data it brings."""

    call: int
    payload: T
    data: bytes | None = None


@dataclass(slots=True)
class Round(Generic[T]):
    """The votes so far, and who was lost while the others waited."""

    id: RoundId
    votes: dict[int, Vote[T]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def describe(self, peer: int) -> str:
        """What the peer called, in words."""
        payload = self.votes[peer].payload
        if self.id.kind is Kind.START:
            return f"{payload} with tag {self.id.tag}"
        return f"{self.id.kind.value}()"


@dataclass(slots=True)
class _Voter:
    """A peer that waits: its group, and in which rounds."""

    group: int
    rounds: dict[RoundId, Round[object]] = field(default_factory=dict)
    kinds: Counter[Kind] = field(default_factory=Counter)


class OpenRounds:
    """The rounds in which somebody waits.

    Indexed such that no vote costs more when there are more peers or more rounds: who asks whether
    somebody stands in the way compares two counters.
    """

    def __init__(self) -> None:
        self._rounds: dict[RoundId, Round[object]] = {}
        self._voters: dict[int, _Voter] = {}
        # votes of each kind by the peers of a group, and under None by all
        self._waiting: Counter[tuple[int | None, Kind]] = Counter()

    def __iter__(self) -> Iterator[Round[object]]:
        return iter(list(self._rounds.values()))

    def __len__(self) -> int:
        return len(self._rounds)

    def __contains__(self, round_: Round[object]) -> bool:
        return self._rounds.get(round_.id) is round_

    def of(self, peer: int) -> Mapping[RoundId, Round[object]]:
        """The rounds in which a peer waits."""
        return self._voters[peer].rounds if peer in self._voters else {}

    def vote(self, peer: int, group: int, round_id: RoundId, vote: Vote[object]) -> Round[object]:
        """A peer enters a round, which is opened if need be. It must not be in it already."""
        round_ = self._rounds.setdefault(round_id, Round(round_id))
        assert peer not in round_.votes
        round_.votes[peer] = vote
        voter = self._voters.setdefault(peer, _Voter(group))
        voter.rounds[round_id] = round_
        self._count(voter, round_id.kind, 1)
        return round_

    def take_back(self, peer: int, round_: Round[object]) -> None:
        """A peer no longer waits in an open round. A round in which nobody waits is closed."""
        del round_.votes[peer]
        self._forget(peer, round_)
        if not round_.votes:
            del self._rounds[round_.id]

    def close(self, round_: Round[object]) -> None:
        """A round ends; it keeps its votes."""
        del self._rounds[round_.id]
        for peer in round_.votes:
            self._forget(peer, round_)

    def in_the_way(self, peer: int, mine: Round[object]) -> Round[object] | None:
        """An open round with a voter that will never come to `mine`, nor `peer` there.

        `peer` has just entered `mine`.
        """
        voter = self._voters[peer]
        for kind in EXCLUDED[mine.id.kind]:
            scope = None if mine.id.group is None and kind in RUN_WIDE else voter.group
            if self._waiting[scope, kind] > voter.kinds[kind]:
                return next(
                    other
                    for other in self._rounds.values()
                    if other.id.kind is kind and self._others(peer, scope, other)
                )
        return None

    def _others(self, peer: int, scope: int | None, round_: Round[object]) -> bool:
        voters = (self._voters[other].group for other in round_.votes if other != peer)
        return any(scope is None or group == scope for group in voters)

    def _forget(self, peer: int, round_: Round[object]) -> None:
        voter = self._voters[peer]
        del voter.rounds[round_.id]
        self._count(voter, round_.id.kind, -1)
        if not voter.rounds:
            del self._voters[peer]

    def _count(self, voter: _Voter, kind: Kind, change: int) -> None:
        voter.kinds[kind] += change
        for scope in (voter.group, None):
            self._waiting[scope, kind] += change
            if not self._waiting[scope, kind]:
                del self._waiting[scope, kind]
