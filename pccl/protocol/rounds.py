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

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Kind(Enum):
    """What is agreed on; the value is the API call's name, as errors quote it."""

    TOPOLOGY = "update_topology"
    PENDING = "are_peers_pending"
    SYNC = "sync_shared_state"
    START = "all_reduce"


# Pairs of kinds that may be waited for at the same time: collectives with different tags are
# launched in any order, and are_peers_pending may be asked while they run in other threads.
COMPATIBLE = {
    frozenset((Kind.START,)),
    frozenset((Kind.START, Kind.PENDING)),
}


def exclude_each_other(a: Kind, b: Kind) -> bool:
    """Whether a peer that waits in a round of kind `a` cannot come to one of kind `b`."""
    return frozenset((a, b)) not in COMPATIBLE


@dataclass(frozen=True, slots=True)
class RoundId:
    """Kind, group (None: the whole run), and tag for collectives."""

    kind: Kind
    group: int | None
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Vote(Generic[T]):
    """A peer's vote: the number of its call, and what it brings."""

    call: int
    payload: T


@dataclass(slots=True)
class Round(Generic[T]):
    """The votes so far, and who was lost while the others waited."""

    id: RoundId
    votes: dict[int, Vote[T]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def complete(self, members: list[int]) -> bool:
        """Whether all of `members` have voted; a round without votes is not complete."""
        return bool(self.votes) and all(peer in self.votes for peer in members)

    def describe(self, peer: int) -> str:
        """What the peer called, in words."""
        payload = self.votes[peer].payload
        if self.id.kind is Kind.START:
            return f"{payload} with tag {self.id.tag}"
        return f"{self.id.kind.value}()"
