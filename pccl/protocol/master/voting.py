"""Rounds: peers enter them, and they commit, or fail because votes can never meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.master.circles import circle
from pccl.protocol.master.dismissals import Dismissals
from pccl.protocol.master.membership import NAMES_MAX, Membership
from pccl.protocol.master.outbox import Outbox, plain
from pccl.protocol.master.table import CollectiveTable
from pccl.protocol.master.work import Rows, outdated
from pccl.protocol.rounds import (
    OPEN_MAX,
    PENDING,
    WITHDRAWN,
    Kind,
    OpenRounds,
    Round,
    RoundId,
    Vote,
)
from pccl.types import Result

PART_BYTES = 256  # memory that one tensor in a vote takes, about, without its texts
ROW_BYTES = 40  # and one number of rows
Commit: TypeAlias = Callable[[Round[object]], None]


def held(payload: m.Work | m.Offer, rows: Rows | None = None, data: bytes | None = None) -> int:
    """The bytes, about, that a vote takes in memory: many times its size in a message."""
    parts = payload.parts if isinstance(payload, m.Work) else payload.entries
    own = len(payload.rows) if isinstance(payload, m.Work) else 0
    numbers = own + sum(map(len, rows)) if rows else own
    return _listed(parts) + ROW_BYTES * numbers + len(data or b"")


def _listed(parts: Sequence[m.Part] | Sequence[m.Entry]) -> int:
    """The same of a list of tensors, which most votes do not have."""
    if not parts:
        return 0
    texts = sum(len(part.name) + len(part.layout) for part in parts)
    width = 1 if all(part.name.isascii() and part.layout.isascii() for part in parts) else 4
    return PART_BYTES * len(parts) + width * texts


@dataclass(frozen=True, slots=True)
class PendingRejection:
    """The error that a peer gets, once, if it enters one of these rounds after their end."""

    rounds: frozenset[RoundId]
    result: Result
    why: str
    cause: m.Cause


class Voting:
    """The rounds in which peers wait.

    Args:
        table: the running collectives, which count like rounds in which a peer waits.
        commit: called with a round in which all members have voted; it has already ended.

    Attributes:
        open: the rounds themselves.
    """

    def __init__(
        self,
        membership: Membership,
        table: CollectiveTable,
        outbox: Outbox,
        dismissals: Dismissals,
        commit: Commit,
    ) -> None:
        self._membership, self._table = membership, table
        self._outbox, self._dismissals = outbox, dismissals
        self._commit = commit
        self._rejections: dict[int, list[PendingRejection]] = {}  # by peer
        self.open = OpenRounds()

    def enter(self, number: int, round_id: RoundId, vote: Vote[object]) -> None:
        """A peer votes."""
        if number in self._rejections and self._reject(number, round_id, vote):
            return
        stands_in = self.open.of(number)
        if round_id in stands_in:
            why = f"it entered {stands_in[round_id].describe(number)} twice"
            self._dismissals.dismiss(number, why, Result.INVALID_USAGE)
            return
        gone = [one for one in round_id.pair or () if not self._membership.has(one, round_id.group)]
        if gone:
            why = f"peer {gone[0]} is not in this peer's group, or no more"
            self._outbox.fail(number, vote.call, Result.RANK_CONNECTION_LOST, why)
            return
        why = self.open.too_much(number, vote, self._table.running(number))
        if why:
            self._outbox.fail(number, vote.call, Result.INVALID_USAGE, why)
            return
        round_ = self.open.vote(number, self._membership.group_of(number), round_id, vote)
        if not (self._mismatch(round_) or self._conflict(number, round_)):
            self.evaluate(round_)

    def evaluate(self, round_: Round[object] | None) -> None:
        """Commits a round if all members have voted, unless they wait for a newcomer."""
        if (
            round_ is not None
            and len(round_.votes) == self._size(round_)
            and (not round_.is_patient or self._membership.any_pending)
        ):
            self.open.close(round_)
            self._commit(round_)

    def hurry(self, number: int, call: int) -> None:
        """A caller is no longer patient."""
        self.evaluate(self.open.hurry(number, call))

    def newcomer(self) -> None:
        """A peer has registered, for which patient callers wait."""
        self.evaluate(self.open.get(PENDING))

    def withdraw(self, number: int, call: int) -> None:
        """A caller withdraws. Nothing happens if its answer is on the way already."""
        for round_ in list(self.open.of(number).values()):
            if round_.votes[number].call == call:
                why = f"waited for {self._membership.names(self.absent(round_))}"
                self.open.take_back(number, round_)
                self._outbox.fail(number, call, WITHDRAWN[round_.id.kind], why, m.Cause.TIMEOUT)

    def absent(self, round_: Round[object]) -> list[int]:
        """The members that have not voted."""
        return [number for number in self._members(round_) if number not in round_.votes]

    def _members(self, round_: Round[object]) -> Sequence[int]:
        return round_.id.pair or self._membership.accepted(round_.id.group)

    def _size(self, round_: Round[object]) -> int:
        return 2 if round_.id.pair else self._membership.size(round_.id.group)

    def waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        """Everything that peers wait for: its name, the missing peers, and a title."""
        for round_ in self.open:
            yield round_.id, self.absent(round_), round_.describe(next(iter(round_.votes)))

    # ---- peers that leave ----

    def forget(self, number: int) -> None:
        """A peer has left: forgets the errors meant for it."""
        self._rejections.pop(number, None)

    def take_back(self, numbers: Iterable[int]) -> None:
        """Peers are lost: their votes do not count."""
        for number in numbers:
            for round_ in list(self.open.of(number).values()):
                self.open.take_back(number, round_)

    def go_on_without(self, lost: Mapping[int, Mapping[int, str]]) -> None:
        """Peers are lost, by group and number, each with its name and reason: commits the rounds
        that waited only for them."""
        for round_ in self.open:
            groups = lost if round_.id.group is None else {round_.id.group} & lost.keys()
            if round_.id.pair is not None:
                self._part(round_, [lost[group] for group in groups])
                continue
            round_.lost += [title for group in groups for title in lost[group].values()]
            if round_ in self.open:  # it may have ended since
                self.evaluate(round_)

    def _part(self, round_: Round[object], lost: Iterable[Mapping[int, str]]) -> None:
        """Fails a PAIR if one of the two is lost; the loss of others is nothing to it."""
        titles = [all_[one] for all_ in lost for one in round_.id.pair or () if one in all_]
        if titles:
            self.open.close(round_)
            why = "lost " + "; ".join(titles)
            self._outbox.fail_voters(round_, Result.RANK_CONNECTION_LOST, why)

    # ---- votes that can never meet ----

    def _mismatch(self, round_: Round[object]) -> bool:
        """Fails a start round whose votes ask for different work, or assume different ranks."""
        if round_.id.kind not in (Kind.START, Kind.PAIR):
            return False
        first, mine = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        asked, requested = first.payload, mine.payload
        assert isinstance(asked, m.Work) and isinstance(requested, m.Work)
        alike = (first.data is None) == (mine.data is None)
        if asked == requested and alike and (first.rows is None) == (mine.rows is None):
            return False
        if asked.sees_others_than(requested):
            self.open.close(round_)
            why = outdated(round_, self._membership.size(round_.id.group))
            self._outbox.fail_voters(round_, Result.RANK_CONNECTION_LOST, why)
            return True
        if asked == requested and alike:
            why = "some say how many rows they give and take, and some do not: "
            why += self._who([round_])
        elif replace(asked, members=0) == replace(requested, members=0):
            why = "PCCL_INLINE_BYTES is not the same for all: " + self._who([round_])
        else:
            why = "the peers do not ask for the same: " + self._who([round_])
            why += asked.difference(requested)
        self._end([round_], Result.INVALID_ARGUMENT, why)
        return True

    def _conflict(self, number: int, mine: Round[object]) -> bool:
        """Fails two rounds that wait for each other's voters, and so can never commit."""
        if len(self.open) == 1:
            return False
        rounds = [mine, self.open.in_the_way(number, mine)]
        if rounds[1] is None and self.open.any_pair:
            rounds = [*circle(number, self.open, self.absent)]
        ends = [round_ for round_ in rounds if round_ is not None]
        if len(ends) < 2:
            return False
        why = "the peers stand in calls that can never meet: " + self._who(ends)
        self._end(ends, Result.INVALID_USAGE, why)
        return True

    def _who(self, rounds: Iterable[Round[object]]) -> str:
        """Which peer called what: the first and the last voter of each round."""
        calls = []
        for round_ in rounds:
            voters = list(round_.votes)
            named = voters if len(voters) <= NAMES_MAX else [*voters[: NAMES_MAX - 1], voters[-1]]
            calls += [f"{self._membership.info(n)} called {round_.describe(n)}" for n in named]
            if len(voters) > len(named):
                calls.append(f"so did {len(voters) - len(named)} more")
        return "; ".join(calls)

    def _end(self, rounds: list[Round[object]], result: Result, why: str) -> None:
        """Ends rounds with an error: for all voters now, for other members when they enter."""
        why = plain(why)
        self._outbox.note(why)
        ids = frozenset(round_.id for round_ in rounds)
        rejection = PendingRejection(ids, result, why, m.Cause.MISMATCH)
        voters = {number for round_ in rounds for number in round_.votes}
        for round_ in rounds:
            self.open.close(round_)
            self._outbox.fail_voters(round_, result, why, m.Cause.MISMATCH)
            for number in self._members(round_):
                if number not in voters:
                    self.reject_later(number, rejection)

    def reject_later(self, number: int, rejection: PendingRejection) -> None:
        """A peer gets this error when it enters the round."""
        pending = self._rejections.setdefault(number, [])
        pending[:] = [old for old in pending if old.rounds != rejection.rounds][-OPEN_MAX:]
        pending.append(rejection)

    def _reject(self, number: int, round_id: RoundId, vote: Vote[object]) -> bool:
        """Whether the round ended before this peer entered it; if so, sends the error."""
        pending = self._rejections[number]
        found = next((one for one in pending if round_id in one.rounds), None)
        if found is not None:
            pending.remove(found)
            self._outbox.fail(number, vote.call, found.result, found.why, found.cause)
        return found is not None
