"""The round, the only primitive of agreement: all members vote, or nothing happens.

A round is identified by its kind and key. Its scope determines the members: all accepted peers of
the run, or of one group. A peer votes by entering the call. When all members have voted, the round
commits; when a member disappears, the others decide without it. A peer waits in a round from its
vote until the round ends.

Some rounds exclude each other: a peer in an exclusive call cannot enter another call before the
first one returns. So if two peers of one scope wait in two such rounds, neither round can ever
complete. Other calls may run at the same time, because a peer may have several threads. A peer with
a single thread says that it is *stuck* in such a call. If two peers of one group are stuck in two
rounds, they can never meet either.

It is enough to consider pairs of rounds: a peer that can never enter a round is stuck in another
round, which belongs to the same group or, like the first, to the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

K = TypeVar("K")

OPEN_MAX = 4096  # rounds and collectives of one peer at the same time
HELD_MAX = 128 << 20  # approximate bytes of one peer's waiting votes
GRACE_MAX_S = 4_000_000  # fits into 32 bits as milliseconds


class Kind(StrEnum):
    """The kind of a round; the value is the name of the API call, as errors quote it."""

    TOPOLOGY = "update_topology"
    FINISH = "finish"
    PENDING = "are_peers_pending"
    OPTIMIZE = "optimize_topology"
    SYNC = "sync_shared_state"
    START = "a collective"
    PAIR = "send and recv"


# Pairs of kinds in which one peer may wait at the same time. Collectives with different tags are
# launched in any order, with send and recv between them; are_peers_pending may be called while they
# run in other threads.
COMPATIBLE = {
    frozenset((Kind.START,)),
    frozenset((Kind.START, Kind.PENDING)),
    frozenset((Kind.PAIR,)),
    frozenset((Kind.PAIR, Kind.START)),
    frozenset((Kind.PAIR, Kind.PENDING)),
}


# For each kind, the other kinds that a peer cannot enter while it waits in such a round.
EXCLUDED = {
    a: tuple(b for b in Kind if b is not a and frozenset((a, b)) not in COMPATIBLE) for a in Kind
}
# A peer in one of these makes no other call until it returns.
EXCLUSIVE = frozenset(kind for kind in Kind if len(EXCLUDED[kind]) == len(Kind) - 1)
RUN_WIDE = frozenset((Kind.TOPOLOGY, Kind.FINISH, Kind.PENDING, Kind.OPTIMIZE))


class RoundId(NamedTuple):
    """Kind, group (None: the whole run), tag of a collective; sender and receiver of a PAIR."""

    kind: Kind
    group: int | None
    tag: int | None = None
    pair: tuple[int, int] | None = None


PENDING, TOPOLOGY = RoundId(Kind.PENDING, None), RoundId(Kind.TOPOLOGY, None)
OPTIMIZE, FINISH = RoundId(Kind.OPTIMIZE, None), RoundId(Kind.FINISH, None)


@dataclass(frozen=True, slots=True)
class Grace:
    """How long a voter waits for the rest, when `enough` of its group have entered with a grace.

    `seconds` is at most GRACE_MAX_S.
    """

    enough: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Vote:
    """A peer's vote: the number of its call, what it asks for, and its data.

    `since_s` is only for the status of the run; no decision depends on it.
    """

    call: int
    payload: Any  # m.Spec, m.Manifest; in are_peers_pending: is it patient?
    data: bytes | memoryview | None = None
    stuck: bool = False
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # for each rank, and from each
    held: int = 0  # approximate bytes that it takes in memory
    since_s: float = 0.0  # when it was cast
    grace: Grace | None = None  # None: its caller waits for all


@dataclass(slots=True)
class Round:
    """The votes so far, and the peers lost meanwhile."""

    id: RoundId
    votes: dict[int, Vote] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    has_grace: bool = False  # whether any vote has had one

    @property
    def is_patient(self) -> bool:
        """True if all voters prefer to wait until a peer is pending."""
        return self.id == PENDING and all(vote.payload for vote in self.votes.values())

    @property
    def since_s(self) -> float:
        """When the last peer entered it."""
        return next(reversed(self.votes.values())).since_s

    @property
    def calls(self) -> dict[int, int]:
        return {number: vote.call for number, vote in self.votes.items()}

    def describe(self, peer: int) -> str:
        return described(self.id, self.votes[peer].payload, peer)


def described(round_id: RoundId, payload: object, peer: int) -> str:
    """A peer's call in a round, in words; `payload` is what it asks for."""
    if round_id.pair is not None:
        return paired(str(payload), round_id.pair, peer, round_id.tag)
    if round_id.kind is Kind.START:
        return f"{payload} with tag {round_id.tag}"
    return f"{round_id.kind.value}()"


def paired(send: str, pair: tuple[int, int], peer: int, tag: int | None) -> str:
    """A send or recv, in words, from the view of one of its two peers."""
    giver, taker = pair
    if peer == giver:
        return f"{send} to peer {taker} with tag {tag}"
    return f"{send.replace('send', 'recv', 1)} from peer {giver} with tag {tag}"


def keeps(round_: Round, peer: int, other: Round) -> bool:
    """True if a voter of `round_` cannot enter `other` before `round_` returns."""
    return other.id.kind in EXCLUDED[round_.id.kind] or round_.votes[peer].stuck


@dataclass(slots=True)
class _Voter:
    group: int
    rounds: dict[RoundId, Round] = field(default_factory=dict)
    kinds: dict[Kind, int] = field(default_factory=dict)  # how many of them
    held: int = 0


def _add(counts: dict[K, int], key: K, change: int) -> None:
    """Changes a count, and removes it at 0. (A Counter runs Python code for each missing key.)"""
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]


class OpenRounds:
    """The rounds in which peers wait.

    The indices keep the cost of a vote independent of the number of peers and rounds: comparing two
    counts shows whether any voter stands in the way.
    """

    def __init__(self) -> None:
        self._rounds: dict[RoundId, Round] = {}
        self._voters: dict[int, _Voter] = {}
        # votes of each kind by the peers of a group; under None, by all
        self._waiting: dict[tuple[int | None, Kind], int] = {}
        self._stuck: dict[int, dict[RoundId, int]] = {}  # by group: how many peers in which rounds

    def __iter__(self) -> Iterator[Round]:
        return iter(list(self._rounds.values()))

    def __len__(self) -> int:
        return len(self._rounds)

    def __contains__(self, round_: Round) -> bool:
        return self._rounds.get(round_.id) is round_

    def get(self, round_id: RoundId) -> Round | None:
        return self._rounds.get(round_id)

    def of(self, peer: int) -> Mapping[RoundId, Round]:
        return self._voters[peer].rounds if peer in self._voters else {}

    def held(self, peer: int) -> int:
        return self._voters[peer].held if peer in self._voters else 0

    def too_much(self, peer: int, vote: Vote, running: int) -> str:
        """Why a peer with `running` collectives may not vote once more; empty if it may."""
        if len(self.of(peer)) + running >= OPEN_MAX:
            return f"{OPEN_MAX} calls wait already"
        if self.held(peer) + vote.held > HELD_MAX:
            return (
                "the small arrays and lists of tensors of its calls that wait take more than "
                f"{HELD_MAX >> 20} MiB of the master's memory: fewer calls at the same time, or "
                "fewer and larger tensors"
            )
        return ""

    def vote(self, peer: int, group: int, round_id: RoundId, vote: Vote) -> Round:
        """A peer enters a round, which is opened if necessary. It must not have entered before."""
        round_ = self._rounds.get(round_id)
        if round_ is None:
            round_ = self._rounds[round_id] = Round(round_id)
        assert peer not in round_.votes
        round_.votes[peer] = vote
        round_.has_grace |= vote.grace is not None
        voter = self._voters.get(peer)
        if voter is None:
            voter = self._voters[peer] = _Voter(group)
        voter.rounds[round_id] = round_
        voter.held += vote.held
        self._count(voter, round_id.kind, 1)
        if vote.stuck and round_id.pair is None:
            _add(self._stuck.setdefault(group, {}), round_id, 1)
        return round_

    def take_back(self, peer: int, round_: Round) -> None:
        """Removes a peer's vote from an open round. A round without votes is closed."""
        self._forget(peer, round_)
        del round_.votes[peer]
        if not round_.votes:
            del self._rounds[round_.id]

    @property
    def any_pair(self) -> bool:
        return (None, Kind.PAIR) in self._waiting

    def hurry(self, peer: int, call: int) -> Round | None:
        """A peer is no longer patient. Returns the round in which that call waits."""
        round_ = self.of(peer).get(PENDING)
        if round_ is None or round_.votes[peer].call != call:
            return None  # its answer is on the way already
        round_.votes[peer] = replace(round_.votes[peer], payload=False)
        return round_

    def close(self, round_: Round) -> None:
        """Closes a round, which keeps its votes."""
        del self._rounds[round_.id]
        for peer in round_.votes:
            self._forget(peer, round_)

    def in_the_way(self, peer: int, mine: Round) -> Iterator[Round]:
        """Open rounds with a voter that will never enter `mine`, and that `peer` will never enter.

        `peer` has just entered `mine`. The members of both rounds are all peers, or all peers of a
        group. In a PAIR, a peer waits for one peer only (see `deadlock` in master/voting.py).
        """
        if mine.id.kind is Kind.PAIR:
            return
        voter = self._voters[peer]
        for kind in EXCLUDED[mine.id.kind]:
            if kind is Kind.PAIR:
                continue
            scope = None if mine.id.group is None and kind in RUN_WIDE else voter.group
            if self._waiting.get((scope, kind), 0) > voter.kinds.get(kind, 0):
                for other in self._rounds.values():
                    if other.id.kind is kind and self._others(peer, scope, other):
                        yield other
        if mine.votes[peer].stuck:
            yield from self._stuck_elsewhere(peer, voter.group, mine)

    def _stuck_elsewhere(self, peer: int, group: int, mine: Round) -> Iterator[Round]:
        """Rounds without `peer`, in which another peer of its group is stuck, not in `mine`."""
        for round_id in self._stuck[group]:
            other = self._rounds[round_id]
            if peer not in other.votes and any(
                vote.stuck and voter not in mine.votes and self._voters[voter].group == group
                for voter, vote in other.votes.items()
            ):
                yield other

    def _others(self, peer: int, scope: int | None, round_: Round) -> bool:
        voters = (self._voters[other].group for other in round_.votes if other != peer)
        return any(scope is None or group == scope for group in voters)

    def _forget(self, peer: int, round_: Round) -> None:
        voter = self._voters[peer]
        if round_.votes[peer].stuck and round_.id.pair is None:
            stuck = self._stuck[voter.group]
            _add(stuck, round_.id, -1)
            if not stuck:
                del self._stuck[voter.group]
        del voter.rounds[round_.id]
        voter.held -= round_.votes[peer].held
        self._count(voter, round_.id.kind, -1)
        if not voter.rounds:
            del self._voters[peer]

    def _count(self, voter: _Voter, kind: Kind, change: int) -> None:
        _add(voter.kinds, kind, change)
        _add(self._waiting, (voter.group, kind), change)
        _add(self._waiting, (None, kind), change)
