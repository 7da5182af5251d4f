"""What outlives a master: numbers that never repeat, what the run has agreed on, and what a
restarted master concludes from the peers that come back.

The journal only names the accepted peers. Only the peers know the rest, and what no survivor knows
cannot matter to any survivor:

- A collective whose outcome some peer knows has that outcome. In any other, members that hold the
  result have voted yes, members that gave up or never heard of its start have voted no, and members
  that are still working are interrupted.
- A call that all had made, and that some peer knows to have failed, has failed: a peer that waits
  in it has only missed that.
- A round whose result some peer knows is over: a peer that waits in it has only missed the result
  (each result carries the number of its round). A round whose result no peer knows begins anew.
- The group's revision is that of the latest synchronisation whose result some peer knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Refusal
from pccl.protocol.master.membership import in_order
from pccl.types import Result

NONCE_BYTES = 8


class Nonces:
    """The nonces of one master, each 64 bits of a keyed hash.

    Args:
        secret: known to this master alone and never used by another one; at most 64 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_epoch(self, epoch: int) -> int:
        """The nonce of an epoch: the password of streams between its peers."""
        return self._hash(b"epoch %d" % epoch)

    def of_door(self, number: int) -> int:
        """The nonce of an associate: the password of all streams to it."""
        return self._hash(b"door %d" % number)

    def of_call(self, seq: int) -> int:
        """The nonce of a sequence number, which its chunks, requests and data carry."""
        return self._hash(b"call %d" % seq)

    def _hash(self, what: bytes) -> int:
        return int.from_bytes(blake2b(what, key=self._secret, digest_size=NONCE_BYTES).digest())


WAIT_S = 5.0  # for peers to come back; they try several times a second
UNJOURNALED_WAIT_S = 1.0  # without a journal other groups are unknown, and may be slower


OTHER_RUN = Refusal(
    "the master has started another run: connect again", Result.MASTER_CONNECTION_FAILED
)
OUTNUMBERED = Refusal(
    "a master without a journal goes on with the run that most peers name who come back to it, and "
    "this is another one: connect again",
    Result.MASTER_CONNECTION_FAILED,
)
GIVEN_UP = Refusal("it was given up as lost, or did not come back in time: connect again")
CROWDED = Refusal("too much was said already by others who want to come back")

FINISHED = Refusal(
    "the run is finished: its peers have said so. For another run, start the master anew, without "
    "the journal of this one",
    Result.INVALID_USAGE,
    m.Cause.FINISHED,
)
WHOLE_RUN = 0  # in place of a peer's number
REFUSED_MAX = 256  # peers of which it is known why they were dropped: the latest ones
NUMBER_MAX = 1 << 62  # of peers and rounds: more than can ever occur
INCARNATION_MAX = 1 << 15  # of the master: epochs, which begin with it, have 32 bits
WEIGHTS_MAX = 1 << 31
INCARNATION_SHIFT = 32  # sequence numbers of an incarnation of the master begin with its number,
EPOCH_SHIFT = 16  # and epochs too: no returning peer may know the last ones
ALL_HELD_MAX = 1 << 31  # bytes, about, of all returning peers' messages
HELD_MAX = 1 << 28  # bytes, about, of the messages that name other runs than most do
_RESULTS = frozenset(result.value for result in Result)
_CALLED = frozenset(m.Called)


@dataclass(frozen=True, slots=True)
class Journal:
    """What a restarted master knows: its run, how often it was restarted, the accepted peers, and
    why others were dropped, which may not have heard of it.

    It may be incomplete, if it could not be written in the end; returning peers know more.
    """

    run: int
    incarnation: int
    next_peer: int
    accepted: frozenset[int]
    complete: bool = True
    refused: Mapping[int, Refusal] = field(default_factory=dict)


@dataclass(slots=True)
class Unresolved:
    """A collective from before the restart."""

    group: int
    tag: int
    pair: tuple[int, int] | None  # of a send: who sends to whom
    members: set[int]  # that have come back
    open: set[int]  # those that do not know the outcome
    unheard: set[int] = field(default_factory=set)  # that never heard of its start
    votes: dict[int, bool] = field(default_factory=dict)
    outcome: bool | None = None


@dataclass(slots=True)
class GroupBefore:
    """A group before the restart."""

    epoch: int = 0
    syncs: int = 0
    revision: int | None = None
    last_plan: int = 0
    holders: set[int] = field(default_factory=set)
    short: int = 0
    rings: tuple[m.Ring, ...] = ()


@dataclass(slots=True)
class Before:
    """The run before the restart, as far as any survivor knows."""

    accepted: dict[int, m.PeerInfo]
    groups: dict[int, GroupBefore]
    collectives: dict[int, Unresolved]
    missed: list[tuple[int, m.Small]]
    failed: list[tuple[int, m.Failure]]
    topology: int
    pendings: int
    were_pending: bool
    optimized: int
    next_peer: int
    incarnation: int
    finished: bool
    veterans: set[int]  # that have completed a collective or synchronisation, or are told so now


def plausible(resume: m.Resume) -> bool:
    """Whether later numbers will still fit into messages, and those of plans too."""
    known = {info.peer for info in resume.known}
    numbers = [
        *msgspec.structs.astuple(msgspec.structs.replace(resume.done, revision=0)),
        resume.info.peer,
        *known,
        *(small.seq for small in resume.small),
    ]
    weights = sum(ring.weight for ring in resume.rings)  # of rings that may become one
    return (
        max(numbers) < NUMBER_MAX
        and resume.last_seq < INCARNATION_MAX << INCARNATION_SHIFT
        and resume.epoch < INCARNATION_MAX << EPOCH_SHIFT
        and weights < WEIGHTS_MAX
        and all(len({*one.members}) == 2 for one in resume.open if one.paired)
        and all(_is_failure(one, resume.last_seq) for one in resume.failed)
        and len(known) == len(resume.known)
        and resume.info.peer in known
        and all(
            len(ring.order) == len(known) == len({*ring.order} & known) for ring in resume.rings
        )
    )


def _is_failure(failure: m.Failure, last_seq: int) -> bool:
    """Whether a peer may have been told of such a failure, so that others can be."""
    return (
        failure.seq <= last_seq
        and failure.result in _RESULTS
        and failure.called in _CALLED
        and len(failure.pair) in (0, 2)
    )


class Back(NamedTuple):
    """A peer that has come back: its connection, its host, and its message."""

    conn: bytes
    host: str
    resume: m.Resume


class Recovery:
    """The time after a restart in which the master waits for its peers.

    A master with a journal knows its run and peers, and trusts no others. One without a journal
    continues the run that most of the returning peers name, so that a stranger that comes first
    cannot take over; if only one peer comes back, the master waits longer.

    Args:
        run: the journal's run; None: there is no journal.
        expected: the accepted peers in the journal.
        complete: whether the journal is complete.
        refused: peers that were dropped, and why.
    """

    def __init__(
        self,
        run: int | None,
        expected: Iterable[int] = (),
        complete: bool = False,
        refused: Mapping[int, Refusal] | None = None,
    ) -> None:
        self._run, self._expected, self._complete = run, frozenset(expected), complete
        self._refused = refused or {}
        self._back: dict[int, dict[int, Back]] = {}  # by run and number, in order
        self._conns: dict[bytes, tuple[int, int]] = {}
        self._held: Counter[int] = Counter()  # by run
        self._began_s: float | None = None

    def __contains__(self, conn: bytes) -> bool:
        """Whether a peer has come back on this connection."""
        return conn in self._conns

    def conn_of(self, resume: m.Resume) -> bytes | None:
        """The connection on which this peer has come back already, if it has."""
        found = self._back.get(resume.run, {}).get(resume.info.peer)
        return None if found is None else found.conn

    def again(self, incarnation: int, next_peer: int) -> Journal | None:
        """The journal for another restart; None if there is no journal."""
        if self._run is None:
            return None
        known = self._expected, self._complete, self._refused
        return Journal(self._run, incarnation, next_peer, *known)

    def refusal(self, conn: bytes, resume: m.Resume) -> Refusal | None:
        """Why a peer cannot come back; None if it can."""
        number = resume.info.peer
        if self._run not in (None, resume.run):
            return OTHER_RUN
        if number in self._refused:
            return self._refused[number]
        if number in self._back.get(resume.run, ()) or conn in self._conns:
            return GIVEN_UP
        if self._complete and number not in self._expected:
            return GIVEN_UP
        others = sum(held for run, held in self._held.items() if run != self.run)
        crowded = resume.run != self.run and others + weight(resume) > HELD_MAX
        full = self._held.total() + weight(resume) > ALL_HELD_MAX
        return CROWDED if crowded or full else None

    def add(self, conn: bytes, host: str, resume: m.Resume) -> None:
        """A peer has come back."""
        number = resume.info.peer
        self._held[resume.run] += weight(resume)
        self._conns[conn] = resume.run, number
        self._back.setdefault(resume.run, {})[number] = Back(conn, host, resume)

    def gone(self, conns: Iterable[bytes]) -> None:
        """Connections are lost: peers that came back on them must come back again."""
        for conn in conns:
            if conn in self._conns:
                run, number = self._conns.pop(conn)
                self._held[run] -= weight(self._back[run].pop(number).resume)
                if not self._back[run]:
                    del self._back[run], self._held[run]

    @property
    def run(self) -> int | None:
        """The run to continue; None if no run is known. Among equals, the one named last, because
        an attacker that waits for a restart comes first."""
        if self._run is not None or not self._back:
            return self._run
        return max(reversed(self._back), key=lambda run: len(self._back[run]))

    @property
    def back(self) -> dict[int, Back]:
        """The peers of this run that have come back."""
        return self._back.get(self.run or 0, {})

    @property
    def outnumbered(self) -> list[Back]:
        """The peers of other runs that have come back."""
        return [one for run, back in self._back.items() if run != self.run for one in back.values()]

    @property
    def missing(self) -> set[int]:
        """The peers that have not come back yet."""
        named = {info.peer for one in self.back.values() for info in one.resume.known}
        expected = self._expected if self._complete else self._expected | named
        return {*expected} - self.back.keys()

    @property
    def certain(self) -> bool:
        """Whether all peers are back, and no other can come."""
        return self._complete and not self.missing

    def over(self, now_s: float) -> bool:
        """Whether the master has waited long enough."""
        self._began_s = now_s if self._began_s is None else self._began_s
        waited_s = now_s - self._began_s
        if waited_s > WAIT_S or self.certain:
            return True
        alone = self._run is None and len(self.back) < 2
        return waited_s > UNJOURNALED_WAIT_S and not self.missing and not alone


def weight(resume: m.Resume) -> int:
    """The bytes, about, that a peer's message takes in memory."""
    numbers = sum(len(one.members) for one in resume.open)
    numbers += sum(len(one.members) for one in resume.small)
    numbers += sum(len(ring.order) for ring in resume.rings)
    data = sum(len(small.data) for small in resume.small)
    data += sum(200 + 4 * len(failure.why) for failure in resume.failed)
    return 1000 + 400 * len(resume.known) + 200 * len(resume.finished) + 40 * numbers + data


def reconstruct(resumes: Mapping[int, m.Resume]) -> Before:
    """The run before the restart, from the messages of the peers that are back."""
    known = {info.peer for resume in resumes.values() for info in resume.known}
    asked = max((resume.done for resume in resumes.values()), key=lambda done: done.pending)
    groups, collectives, missed = _groups(resumes), _collectives(resumes), _missed(resumes)
    veterans = {number for number, resume in resumes.items() if resume.veteran}
    veterans.update(number for number, _ in missed)
    veterans.update(*(group.holders for group in groups.values()))
    veterans.update(*(each.open for each in collectives.values() if each.outcome))
    return Before(
        in_order({number: resumes[number].info for number in sorted(resumes)}),
        groups,
        collectives,
        missed,
        _failed(resumes),
        topology=max(resume.done.topology for resume in resumes.values()),
        pendings=asked.pending,
        were_pending=asked.were_pending,
        optimized=max(resume.done.optimized for resume in resumes.values()),
        next_peer=max(known | resumes.keys()) + 1,
        incarnation=max(
            max(resume.last_seq >> INCARNATION_SHIFT, resume.epoch >> EPOCH_SHIFT)
            for resume in resumes.values()
        ),
        finished=any(resume.done.finished for resume in resumes.values()),
        veterans=veterans,
    )


def _missed(resumes: Mapping[int, m.Resume]) -> list[tuple[int, m.Small]]:
    """Small results that some peers have and others lack: which to send to whom, in order."""
    found: dict[int, tuple[int, m.Small]] = {}
    for number in sorted(resumes):
        for small in resumes[number].small:
            if number in small.members:
                found.setdefault(small.seq, (resumes[number].info.group, small))
    return [
        (number, small)
        for _, (group, small) in sorted(found.items())
        for number in sorted(set(small.members) & resumes.keys())
        if resumes[number].last_seq < small.seq and resumes[number].info.group == group
    ]


def _failed(resumes: Mapping[int, m.Resume]) -> list[tuple[int, m.Failure]]:
    """Failures that some peers know and others lack: which to tell whom, in order."""
    found: dict[int, tuple[int, m.Failure]] = {}
    for resume in resumes.values():
        for failure in resume.failed:
            found.setdefault(failure.seq, (resume.info.group, failure))
    return [
        (number, failure)
        for _, (group, failure) in sorted(found.items())
        for number in sorted(set(failure.pair) & resumes.keys() if failure.pair else resumes)
        if resumes[number].last_seq < failure.seq
        and (failure.is_run_wide or resumes[number].info.group == group)
    ]


def outdated(resumes: Mapping[int, m.Resume]) -> set[int]:
    """Peers without which the run has continued: the latest plan of their group lacks them."""
    latest: dict[int, m.Resume] = {}
    for resume in resumes.values():
        group = resume.info.group
        if group not in latest or resume.epoch > latest[group].epoch:
            latest[group] = resume
    return {
        number
        for number, resume in resumes.items()
        if number not in {info.peer for info in latest[resume.info.group].known}
    }


def _groups(resumes: Mapping[int, m.Resume]) -> dict[int, GroupBefore]:
    groups: dict[int, GroupBefore] = {}
    for resume in resumes.values():
        group = groups.setdefault(resume.info.group, GroupBefore())
        if resume.epoch >= group.epoch:
            group.epoch, group.rings = resume.epoch, resume.rings
        group.syncs = max(group.syncs, resume.done.sync)
    for number, resume in resumes.items():
        group, done = groups[resume.info.group], resume.done
        if done.sync == group.syncs and group.syncs:
            group.revision, group.last_plan, group.short = done.revision, done.plan, done.short
        # A peer that does not know the last one waits in it: it missed the result.
        if done.holds or done.sync < group.syncs:
            group.holders.add(number)
    for group in groups.values():
        if group.short:
            group.holders.clear()
        if not group.holders:
            group.revision = None
    return groups


def _collectives(resumes: Mapping[int, m.Resume]) -> dict[int, Unresolved]:
    found: dict[int, Unresolved] = {}
    for number, resume in resumes.items():
        group = resume.info.group
        for open_ in resume.open:
            pair = (open_.members[0], open_.members[-1]) if open_.paired else None
            first = Unresolved(group, open_.tag, pair, set(), set())
            unresolved = found.setdefault(open_.seq, first)
            if number not in open_.members or unresolved.group != group or unresolved.pair != pair:
                continue  # impossible
            members = set(open_.members) & resumes.keys()
            unresolved.members |= {n for n in members if resumes[n].info.group == group}
            unresolved.open.add(number)
            if open_.vote is not None:
                unresolved.votes[number] = open_.vote
    for resume in resumes.values():
        for seq, ok in resume.finished:
            if seq in found:
                found[seq].outcome = ok
    for seq, unresolved in found.items():
        for number in unresolved.members - unresolved.open:
            unresolved.votes[number] = False
            if resumes[number].last_seq < seq:
                unresolved.unheard.add(number)
    return found


class Numbers:
    """The numbers that one master gives.

    Args:
        nonces: of this master.
        incarnation: how often the run's master was restarted; all numbers begin with it.
    """

    def __init__(self, nonces: Nonces, incarnation: int = 0) -> None:
        self._nonces = nonces
        self._first_seq = self._next_seq = self._epoch = 0
        self.begin(incarnation)

    def begin(self, incarnation: int) -> None:
        """Begins the numbers of an incarnation; peers may know those of earlier ones."""
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._epoch = incarnation << EPOCH_SHIFT

    @property
    def incarnation(self) -> int:
        """How often the run's master was restarted."""
        return self._next_seq >> INCARNATION_SHIFT

    @property
    def next_seq(self) -> int:
        """The next sequence number, which is not taken."""
        return self._next_seq

    @property
    def epoch(self) -> int:
        """The latest epoch of any group."""
        return self._epoch

    def take_seq(self) -> int:
        """Takes the next sequence number."""
        self._next_seq += 1
        return self._next_seq - 1

    def take_epoch(self) -> int:
        """Takes the next epoch."""
        self._epoch += 1
        return self._epoch

    def is_old(self, seq: int) -> bool:
        """Whether a sequence number belongs to an earlier incarnation."""
        return seq < self._first_seq

    def is_unknown(self, seq: int) -> bool:
        """Whether a sequence number was never given."""
        return seq >= self._next_seq

    def nonce_of_call(self, seq: int) -> int:
        """The nonce that identifies the bulk data of a sequence number."""
        return self._nonces.of_call(seq)

    def nonce_of_epoch(self, epoch: int) -> int:
        """The nonce by which peers admit each other's streams."""
        return self._nonces.of_epoch(epoch)

    def nonce_of_door(self, number: int) -> int:
        """The nonce by which an associate admits streams."""
        return self._nonces.of_door(number)


@dataclass(slots=True)
class StateHistory:
    """The history of a group's shared state."""

    revision: int | None = None
    syncs: int = 0  # number of its last synchronisation, counted over all groups
    last_plan: int = 0  # seq of the last plan of the last synchronisation
    holders: set[int] = field(default_factory=set)
    short: int = 0  # peers that the last synchronisation lacked to begin with
    # whether the last revision may be synchronised again: a peer joined or was lost, or a
    # collective failed, since then
    repeatable: bool = False


class History:
    """Numbers of completed rounds, and their latest results.

    Attributes:
        topology: rounds of `update_topology`.
        pending: rounds of `are_peers_pending`.
        were_pending: the result of the latest of these.
        optimized: rounds of `optimize_topology`.
        finished: whether the run is finished.
    """

    def __init__(self) -> None:
        self.topology = self.pending = self.optimized = 0
        self.were_pending = self.finished = False
        self._syncs = 0  # over all groups, so that a group that begins again repeats no number
        self._groups: dict[int, StateHistory] = {}

    def restore(self, before: Before) -> None:
        """Restores the state before a restart."""
        self.topology, self.pending = before.topology, before.pendings
        self.were_pending, self.optimized = before.were_pending, before.optimized
        self.finished |= before.finished
        self._syncs = max((was.syncs for was in before.groups.values()), default=0)
        self._groups = {number: _state_of(was) for number, was in before.groups.items()}

    def of(self, group: int) -> StateHistory:
        """The history of a group's shared state."""
        if group not in self._groups:
            self._groups[group] = StateHistory()
        return self._groups[group]

    def count_sync(self, group: int) -> StateHistory:
        """Numbers a synchronisation that has a result."""
        self._syncs += 1
        state = self.of(group)
        state.syncs = self._syncs
        return state

    def lose(self, group: int, numbers: Set[int]) -> bool:
        """Peers are lost. Whether the group's shared state is lost with them."""
        state = self.of(group)
        state.holders -= numbers
        if state.holders or state.revision is None:
            return False
        state.revision = None
        return True

    def forget(self, group: int) -> None:
        """Forgets a group that is empty."""
        self._groups.pop(group, None)

    def done(self, group: int) -> m.Done:
        """What a peer of a group may have missed; the group of a pending peer may not exist."""
        state = self._groups.get(group) or StateHistory()
        return m.Done(
            self.topology,
            self.pending,
            self.were_pending,
            state.syncs,
            state.revision or 0,
            state.last_plan,
            optimized=self.optimized,
            short=state.short,
            finished=self.finished,
        )


def _state_of(was: GroupBefore) -> StateHistory:
    return StateHistory(
        was.revision,
        was.syncs,
        was.last_plan,
        was.holders,
        was.short,
        repeatable=True,  # if in doubt
    )
