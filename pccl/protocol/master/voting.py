"""Rounds: peers enter them, and they commit, or fail because their votes can never match.

A peer in a PAIR (send and recv) waits for only one other peer. So it blocks only peers that wait
for it, directly or through others.

If votes differ, or peers wait in calls that exclude each other, a majority of electors decides. The
electors are the veterans (peers that have completed a collective or synchronization), or all peers
if there are no veterans. A peer that disagrees with a strict majority gets an error and is dropped,
and the others continue as after a loss. If a majority is no longer possible, all get the error, and
no peer is dropped. While a majority is still possible, the dispute waits for peers that have not
voted yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.master.collectives import (
    CollectiveTable,
    Rows,
    difference,
    form,
    outdated,
    sees_others,
)
from pccl.protocol.master.membership import NAMES_MAX
from pccl.protocol.master.topology import RunContext, RunPart
from pccl.protocol.rounds import (
    EXCLUSIVE,
    OPEN_MAX,
    PENDING,
    Kind,
    OpenRounds,
    Round,
    RoundId,
    Vote,
    keeps,
)
from pccl.types import Result

Absent = Callable[[Round], list[int]]  # the members that have not voted


def deadlock(peer: int, rounds: OpenRounds, absent: Absent) -> tuple[Round, Round] | tuple[()]:
    """Two rounds in a cycle of rounds that wait for each other's voters; empty if there is none.

    `peer`, which has just voted, waits in the first round; the second round closes the cycle.

    A round holds a peer if the peer makes no other call before the round returns. A send or recv
    that is launched but not awaited keeps its peer only from exclusive calls.
    """
    for first in rounds.of(peer).values():
        are_held = _holds(first, peer)
        if not are_held and first.id.kind is not Kind.PAIR:
            continue
        todo, seen = [first], {first.id}
        while todo:
            for other in _next(todo.pop(), peer, rounds, absent):
                pairs = Kind.PAIR in (first.id.kind, other.id.kind)
                if peer in absent(other) and pairs and (are_held or other.id.kind in EXCLUSIVE):
                    return first, other
                if other.id not in seen:
                    seen.add(other.id)
                    todo.append(other)
    return ()


def _next(round_: Round, peer: int, rounds: OpenRounds, absent: Absent) -> Iterator[Round]:
    """The rounds that hold the peers for which `round_` waits."""
    exclusive = round_.id.kind in EXCLUSIVE
    for awaited in absent(round_):
        for each in rounds.of(awaited).values() if awaited != peer else ():
            if _holds(each, awaited) or (exclusive and each.id.kind is Kind.PAIR):
                yield each


def _holds(round_: Round, peer: int) -> bool:
    return round_.votes[peer].stuck or round_.id.kind in EXCLUSIVE


def are_held(rounds: OpenRounds, absent: Absent) -> set[int]:
    """Peers that may wait for each other, and so make no other call.

    The other peers are free. A free peer waits in no round, or only in an `are_peers_pending` of
    another thread, or only in launched collectives and sends that wait only for free peers.
    """
    missing = {each.id: absent(each) for each in rounds if each.id.kind in (Kind.START, Kind.PAIR)}
    found = {number for round_ in rounds for number in round_.votes}

    def goes_on(round_: Round, peer: int) -> bool:
        launched = round_.id == PENDING or found.isdisjoint(missing.get(round_.id, found))
        return launched and not round_.votes[peer].stuck

    while free := {n for n in found if all(goes_on(one, n) for one in rounds.of(n).values())}:
        found -= free
    return found


class Stragglers:
    """Measures how long peers keep others waiting.

    Args:
        limit_s: seconds that others may wait for a peer; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._since: dict[object, float] = {}  # round or seq -> when others began to wait

    def late(
        self, now_s: float, waits: Iterable[tuple[object, Iterable[int], str]]
    ) -> Iterator[tuple[int, str]]:
        """The peers that are too late, each with the title of the waiting call."""
        if self.limit_s is None:
            return
        began, self._since = self._since, {}
        for name, missing, title in waits:
            since = self._since[name] = began.get(name, now_s)
            if now_s - since > self.limit_s:
                for number in missing:
                    yield number, title


PART_BYTES = 256  # approximate memory of one tensor in a vote, without its texts
ROW_BYTES = 40  # memory of one number of rows
Commit: TypeAlias = Callable[[Round], None]
_Pair: TypeAlias = tuple[RoundId, RoundId]
MISMATCH = m.Cause.MISMATCH
TOLD_MAX = 8  # if at most this many rounds fail together, the voters of each learn of the others
NEVER_MEET = "the peers are in calls that can never meet: "
ODD = "is the odd one out: it is dropped, and the others go on without it"


def _scope(one: Round, other: Round) -> int | None:
    """The group that both rounds wait for; None: all peers."""
    return other.id.group if one.id.group is None else one.id.group


def held(payload: m.Spec | m.Manifest, rows: Rows | None = None, data: m.Data | None = None) -> int:
    """The approximate bytes of a vote in memory: many times its size in a message."""
    parts = payload.parts if isinstance(payload, m.Spec) else payload.entries
    own = len(payload.rows) if isinstance(payload, m.Spec) else 0
    numbers = own + sum(map(len, rows)) if rows else own
    return _listed(parts) + ROW_BYTES * numbers + len(data or b"")


def _listed(parts: Sequence[m.Part] | Sequence[m.Entry]) -> int:
    """The memory of a list of tensors; most votes have none."""
    if not parts:
        return 0
    texts = sum(len(part.name) + len(part.layout) for part in parts)
    width = 1 if all(part.name.isascii() and part.layout.isascii() for part in parts) else 4
    return PART_BYTES * len(parts) + width * texts


class Voting(RunPart):
    """The rounds in which peers wait.

    Args:
        context: what all parts use.
        table: the running collectives; each counts like a round for the limits of a peer.
        commit: called with a round when all members have voted and it is closed.
    """

    def __init__(self, context: RunContext, table: CollectiveTable, commit: Commit) -> None:
        super().__init__(context)
        self._table, self._commit = table, commit
        # by peer: failures of rounds that ended together; a peer that enters one gets its failure
        self._rejections: dict[int, list[Mapping[RoundId, m.Failure]]] = {}
        # unsettled disputes: rounds whose votes differ, and pairs of rounds that exclude each other
        self._mixed: dict[RoundId, None] = {}
        self._barred: dict[_Pair, None] = {}
        self.open = OpenRounds()  # the open rounds

    def enter(self, number: int, round_id: RoundId, vote: Vote) -> None:
        if number in self._rejections and self._reject(number, round_id, vote):
            return
        stands_in = self.open.of(number)
        if round_id in stands_in:
            why = f"it entered {stands_in[round_id].describe(number)} twice"
            self._dismissals.dismiss(number, why, Result.INVALID_USAGE)
            return
        if round_id.pair is not None:
            gone = [n for n in round_id.pair if not self._membership.has(n, round_id.group)]
            if gone:
                why = f"peer {gone[0]} is not in this peer's group, or has left it"
                self._outbox.fail(number, vote.call, Result.RANK_CONNECTION_LOST, why)
                return
        why = self.open.too_much(number, vote, self._table.running(number))
        if why:
            self._outbox.fail(number, vote.call, Result.INVALID_USAGE, why)
            return
        self._compare(
            number, self.open.vote(number, self._membership.group_of(number), round_id, vote)
        )
        self.evaluate(self.open.get(round_id))
        self._settle()

    def evaluate(self, round_: Round | None) -> None:
        """Commits a round if all members have voted alike and wait for no newcomer."""
        if (
            round_ is not None
            and len(round_.votes) == self._size(round_)
            and round_.id not in self._mixed
            and (not round_.is_patient or self._membership.any_pending)
        ):
            self.open.close(round_)
            self._commit(round_)

    def hurry(self, number: int, call: int) -> None:
        self.evaluate(self.open.hurry(number, call))

    def newcomer(self) -> None:
        """Handles a newcomer: patient callers wait for it."""
        self.evaluate(self.open.get(PENDING))

    def withdraw(self, number: int, call: int) -> None:
        """Withdraws a peer's vote. Does nothing if its answer is already on the way."""
        own = self.open.of(number).values()
        round_ = next((one for one in own if one.votes[number].call == call), None)
        if round_ is None:
            return
        why = f"waited for {self._membership.names(self.absent(round_))}"
        self.open.take_back(number, round_)
        self._outbox.fail(number, call, Result.TIMEOUT, why, m.Cause.TIMEOUT)
        for other in self.open.of(number).values():
            self._dispute(number, other)  # it may have waited for this peer
        self._settle()

    def absent(self, round_: Round) -> list[int]:
        return [number for number in self._members(round_) if number not in round_.votes]

    def _members(self, round_: Round) -> Sequence[int]:
        return round_.id.pair or self._membership.accepted(round_.id.group)

    def _size(self, round_: Round) -> int:
        return 2 if round_.id.pair else self._membership.size(round_.id.group)

    def waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        """The rounds that wait: a key, the missing peers, and a title."""
        for round_ in self.open:
            yield round_.id, self.absent(round_), round_.describe(next(iter(round_.votes)))

    # ---- peers that leave ----

    def forget(self, number: int) -> None:
        """Forgets the errors meant for a peer that has left."""
        self._rejections.pop(number, None)

    def take_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for round_ in list(self.open.of(number).values()):
                self.open.take_back(number, round_)

    def go_on_without(self, lost: Mapping[int, Mapping[int, str]]) -> None:
        """Commits the rounds that waited only for lost peers.

        `lost` has the name and reason of each, by group and number.
        """
        for round_ in self.open:
            groups = lost if round_.id.group is None else {round_.id.group} & lost.keys()
            if round_.id.pair is not None:
                self._part(round_, [lost[group] for group in groups])
            else:
                round_.lost += [title for group in groups for title in lost[group].values()]
        self._settle()
        for round_ in self.open:
            if round_ in self.open:  # it may have ended since
                self.evaluate(round_)

    def _part(self, round_: Round, lost: Iterable[Mapping[int, str]]) -> None:
        titles = [all_[one] for all_ in lost for one in round_.id.pair or () if one in all_]
        if titles:
            self.open.close(round_)
            why = "lost " + "; ".join(titles)
            self._outbox.fail_voters(round_, Result.RANK_CONNECTION_LOST, why)

    # ---- disputes: votes that can never match ----

    def _compare(self, number: int, round_: Round) -> None:
        """Notes the disputes that a peer's new vote begins."""
        if round_.id.kind in (Kind.START, Kind.PAIR) and len(round_.votes) > 1:
            mine, first = round_.votes[number], next(iter(round_.votes.values()))
            others = round_.votes.values() if round_.id in self._mixed else (first,)
            if any(sees_others(other, mine) for other in others):
                self.open.close(round_)
                why = outdated(round_, self._membership.size(round_.id.group))
                members = {vote.payload.members for vote in (mine, *others)}
                cause = m.Cause.REORDERED if len(members) == 1 else m.Cause.OTHER
                self._outbox.fail_voters(round_, Result.RANK_CONNECTION_LOST, why, cause)
            elif any(form(other) != form(mine) for other in others):
                self._mixed[round_.id] = None
        if len(self.open) > 1 and round_ in self.open:
            self._dispute(number, round_)
            if self.open.any_pair and (ends := deadlock(number, self.open, self.absent)):
                self._never_meet(ends)

    def _dispute(self, number: int, round_: Round) -> None:
        """Notes the rounds that wait for a voter of this round that cannot enter them now."""
        for other in self.open.in_the_way(number, round_):
            self._barred[round_.id, other.id] = None

    def _settle(self) -> None:
        """Ends the disputes whose outcome is certain, and forgets those that are over.

        The other disputes wait for members that can still vote.
        """
        while self._mixed or self._barred:  # the end of one dispute may decide others
            mixed, barred = list(self._mixed), list(self._barred)
            if not (any(map(self._settle_mixed, mixed)) or any(map(self._settle_barred, barred))):
                return

    def _settle_mixed(self, round_id: RoundId) -> bool:
        """Ends the dispute of a round whose votes differ, if possible. True if it did."""
        round_ = self.open.get(round_id)
        votes = {} if round_ is None else round_.votes
        forms = {number: form(vote) for number, vote in votes.items()}
        if round_ is None or len({*forms.values()}) < 2:
            self._mixed.pop(round_id, None)
            return False
        electors = self._membership.electors(self._members(round_))
        counts = Counter(forms[number] for number in electors & votes.keys())
        first = forms[next(iter(votes))]
        agreed, most = max(counts.items(), key=lambda one: one[1], default=(first, 0))
        is_decided = 2 * most > len(electors)
        if not is_decided and 2 * (most + self._coming(round_, electors)) > len(electors):
            return False
        model = agreed if is_decided else first
        like = [number for number in votes if forms[number] == model]
        unlike = [number for number in votes if forms[number] != model]
        if is_decided:
            calls = {n: self._calls(round_, [n, *like]) for n in unlike}
            whys = {n: difference(round_, like[0], n, who) for n, who in calls.items()}
            self._drop(whys, Result.INVALID_ARGUMENT)
        else:
            why = difference(round_, like[0], unlike[0], self._who([round_]))
            self._end([round_], Result.INVALID_ARGUMENT, why)
        return True

    def _settle_barred(self, pair: _Pair) -> bool:
        """Ends the dispute of two rounds that wait for each other's voters, if possible. True if it
        did."""
        rounds = self._opponents(pair)
        if not rounds:
            self._barred.pop(pair, None)
            return False
        electors = self._electors_between(*rounds)
        for mine, theirs in (rounds, rounds[::-1]):
            if 2 * self._agreed(mine, theirs, electors) > len(electors):
                like = self._calls(mine, list(mine.votes))
                odd = {n: self._calls(theirs, [n]) for n in self._bound(theirs, mine)}
                whys = {n: f"{NEVER_MEET}{call}; {like}" for n, call in odd.items()}
                self._drop(whys, Result.INVALID_USAGE)
                return True
        near = [
            each
            for each in map(self._opponents, list(self._barred))
            if {one.id for one in each} & {*pair}
        ]
        if any(self._is_open(*each) for each in near):
            return False
        ends = {one.id: one for one in (*rounds, *(one for each in near for one in each))}
        self._never_meet([*ends.values()])
        return True

    def _opponents(self, pair: _Pair) -> tuple[Round, ...]:
        """The pair's rounds if they still wait for each other's voters; else empty."""
        one, other = map(self.open.get, pair)
        if one is None or other is None:
            return ()
        return (one, other) if self._bound(one, other) and self._bound(other, one) else ()

    def _electors_between(self, one: Round, other: Round) -> Set[int]:
        return self._membership.electors(self._membership.accepted(_scope(one, other)))

    def _is_open(self, one: Round, other: Round) -> bool:
        """True if a majority of the electors may still agree on one of two rounds."""
        electors = self._electors_between(one, other)
        for mine, theirs in ((one, other), (other, one)):
            agreed = self._agreed(mine, theirs, electors)
            if 2 * (agreed + self._coming(mine, electors)) > len(electors):
                return True
        return False

    def _coming(self, round_: Round, electors: Set[int]) -> int:
        beside = round_.id.kind in (Kind.START, Kind.PAIR)
        free = electors - round_.votes.keys() - are_held(self.open, self.absent)
        return sum(beside or PENDING not in self.open.of(number) for number in free)

    def _agreed(self, mine: Round, theirs: Round, electors: Set[int]) -> int:
        """The largest number of electors that agree in one round and are not in the other."""
        there = (electors & mine.votes.keys()) - theirs.votes.keys()
        if mine.id not in self._mixed:
            return len(there)
        return max(Counter(form(mine.votes[n]) for n in there).values(), default=0)

    def _bound(self, mine: Round, theirs: Round) -> list[int]:
        """The voters of `mine` for which `theirs` waits, and which cannot enter it before `mine`
        returns."""
        group = _scope(mine, theirs)
        return [
            number
            for number in mine.votes
            if number not in theirs.votes
            and self._membership.has(number, group)
            and keeps(mine, number, theirs)
        ]

    def _never_meet(self, rounds: Sequence[Round]) -> None:
        """Fails rounds that can never commit because they wait for each other's voters."""
        self._end(rounds, Result.INVALID_USAGE, NEVER_MEET + self._who(rounds))

    def _drop(self, whys: Mapping[int, str], result: Result) -> None:
        """Drops the odd ones out; their rounds go on without them."""
        info = self._membership.info
        texts = {number: f"{why}; {info(number)} {ODD}" for number, why in whys.items()}
        self._dismissals.dismiss_all(texts, result, MISMATCH)

    def _who(self, rounds: Iterable[Round]) -> str:
        """The calls of the first and the last voter of each round, in words."""
        return "; ".join(self._calls(round_, list(round_.votes)) for round_ in rounds)

    def _calls(self, round_: Round, voters: Sequence[int]) -> str:
        """The calls of voters of a round, in words; if many, the first and the last."""
        named = voters if len(voters) <= NAMES_MAX else [*voters[: NAMES_MAX - 1], voters[-1]]
        calls = [f"{self._membership.info(n)} called {round_.describe(n)}" for n in named]
        if len(voters) > len(named):
            calls.append(f"so did {len(voters) - len(named)} more")
        return "; ".join(calls)

    def _end(self, rounds: Sequence[Round], result: Result, why: str) -> None:
        """Fails rounds: voters get the error now, other members when they enter.

        The voters of each round also learn of the other rounds, so that they can tell a restarted
        master.
        """
        self._outbox.note(why)
        failures = {one.id: self._outbox.failure(one.id, result, why, MISMATCH) for one in rounds}
        voters = sorted({number for round_ in rounds for number in round_.votes})
        for round_ in rounds:
            self.open.close(round_)
        for round_ in rounds:
            failure, known = failures[round_.id], len(failures) <= TOLD_MAX
            for number in voters:
                if number in round_.votes:
                    self._outbox.refuse(number, round_.votes[number].call, failure)
                elif known and self._membership.has(number, round_.id.group):
                    self._outbox.send(number, m.Failed(failure))
            for number in self._members(round_):
                if number not in voters:
                    self.reject_later(number, failures)

    def reject_later(self, number: int, failures: Mapping[RoundId, m.Failure]) -> None:
        """Keeps errors for a peer. It gets one of them, once, if it enters that round."""
        pending = self._rejections.setdefault(number, [])
        pending[:] = [old for old in pending if old.keys() != failures.keys()][-OPEN_MAX:]
        pending.append(failures)

    def _reject(self, number: int, round_id: RoundId, vote: Vote) -> bool:
        """If the round failed before this peer entered it, sends the error and returns True."""
        pending = self._rejections[number]
        found = next((one for one in pending if round_id in one), None)
        if found is not None:
            pending.remove(found)
            self._outbox.refuse(number, vote.call, found[round_id])
        return found is not None
