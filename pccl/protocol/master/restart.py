"""The recovery of a restarted master from what returning peers report.

The journal has only the accepted peers. The peers know the rest, and a fact that no survivor knows
cannot matter. docs/internals/protocol.md ("A restarted master") has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import astuple, replace

from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.collectives import Running
from pccl.protocol.master.effects import Adopt, Refusal, Remember
from pccl.protocol.master.history import (
    CROWDED,
    EPOCH_SHIFT,
    GIVEN_UP,
    INCARNATION_SHIFT,
    OTHER_RUN,
    History,
    Journal,
)
from pccl.protocol.master.membership import PeerRecord, in_order
from pccl.protocol.master.run import Run
from pccl.protocol.master.topology import Group
from pccl.types import Result

WAIT_S = 5.0  # time for peers to come back; they try several times a second
UNJOURNALED_WAIT_S = 1.0  # without a journal, other groups are unknown and may be slower
BACKLOG_MAX = 4  # messages of one connection kept during a recovery; peers send two
NUMBER_MAX = 1 << 62  # numbers of peers and rounds: more than can ever occur
INCARNATION_MAX = 1 << 15  # incarnations of the master: epochs begin with them and have 32 bits
WEIGHTS_MAX = 1 << 31
ALL_HELD_MAX = 1 << 31  # approximate bytes of all returning peers' messages
HELD_MAX = 1 << 28  # approximate bytes of the messages that name a run of the minority
RESTARTED = "the master was restarted"
_RESULTS = frozenset(result.value for result in Result)
_CALLED = frozenset(m.Called)
Postponed: TypeAlias = inputs.Hello | inputs.Received | inputs.Rejected


@dataclass(slots=True)
class Unresolved:
    group: int
    tag: int
    pair: tuple[int, int] | None  # sender and receiver of a send
    members: set[int]  # the members that have come back
    open: set[int]  # members that do not know the outcome
    unheard: set[int] = field(default_factory=set)  # members that never heard of its start
    votes: dict[int, bool] = field(default_factory=dict)
    outcome: bool | None = None


def plausible(resume: m.Resume) -> bool:
    """True if the numbers are consistent, and later numbers will still fit into messages."""
    known = {info.peer for info in resume.known}
    numbers = [
        *astuple(replace(resume.done, revision=0)),
        resume.info.peer,
        *known,
        *(small.seq for small in resume.small),
    ]
    weights = sum(ring.weight for ring in resume.rings)  # the rings may become one
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
    """True if a peer may have received this failure, so that others may receive it, too."""
    return (
        failure.seq <= last_seq
        and failure.result in _RESULTS
        and failure.called in _CALLED
        and len(failure.pair) in (0, 2)
    )


class Recovery:
    """The time after a restart in which the master waits for its peers.

    A master with a journal knows its run and peers, and trusts no others. A master without a
    journal continues the run that most of the returning peers name, so that a stranger that comes
    first cannot take over. If only one peer comes back, the master waits longer.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._complete = journal is not None and journal.complete
        self._expected: Set[int] = frozenset() if journal is None else journal.accepted
        # other events that arrive meanwhile, to be handled afterwards
        self.backlog: list[Postponed | inputs.Disconnected] = []
        self._back: dict[int, dict[int, inputs.Resume]] = {}  # by run and number, in order
        self._conns: dict[bytes, tuple[int, int]] = {}
        self._held: Counter[int] = Counter()  # bytes of messages, by run
        self._began_s: float | None = None
        self._counts: Counter[bytes] = Counter()  # messages in the backlog, by connection

    def has_heard(self, conn: bytes) -> bool:
        return conn in self._counts or conn in self._conns

    def postpone(self, event: Postponed) -> bool:
        """Keeps a message for later. Returns False, once, if its connection has sent too many."""
        self._counts[event.conn] += 1
        if self._counts[event.conn] <= BACKLOG_MAX:
            self.backlog.append(event)
        return self._counts[event.conn] != BACKLOG_MAX + 1

    def conn_of(self, resume: m.Resume) -> bytes | None:
        found = self._back.get(resume.run, {}).get(resume.info.peer)
        return None if found is None else found.conn

    def again(self, incarnation: int, next_peer: int) -> Journal | None:
        """The journal for another restart; None if there is no journal."""
        if self._journal is None:
            return None
        return replace(self._journal, incarnation=incarnation, next_peer=next_peer)

    def refusal(self, conn: bytes, resume: m.Resume) -> Refusal | None:
        number = resume.info.peer
        if self._journal is not None:
            if self._journal.run != resume.run:
                return OTHER_RUN
            if number in self._journal.refused:
                return self._journal.refused[number]
        if number in self._back.get(resume.run, ()) or conn in self._conns:
            return GIVEN_UP
        if self._complete and number not in self._expected:
            return GIVEN_UP
        others = sum(held for run, held in self._held.items() if run != self.run)
        crowded = resume.run != self.run and others + weight(resume) > HELD_MAX
        full = self._held.total() + weight(resume) > ALL_HELD_MAX
        return CROWDED if crowded or full else None

    def add(self, event: inputs.Resume) -> None:
        resume, number = event.message, event.message.info.peer
        self._held[resume.run] += weight(resume)
        self._conns[event.conn] = resume.run, number
        self._back.setdefault(resume.run, {})[number] = event

    def gone(self, conns: Iterable[bytes]) -> None:
        """Removes peers whose connections are lost. They must come back again."""
        for conn in conns:
            if conn in self._conns:
                run, number = self._conns.pop(conn)
                self._held[run] -= weight(self._back[run].pop(number).message)
                if not self._back[run]:
                    del self._back[run], self._held[run]

    @property
    def run(self) -> int | None:
        """The run to continue; None if no run is known.

        If several runs have the most peers, the run named last wins, because an attacker that waits
        for a restart comes first.
        """
        if self._journal is not None:
            return self._journal.run
        if not self._back:
            return None
        return max(reversed(self._back), key=lambda run: len(self._back[run]))

    @property
    def back(self) -> dict[int, inputs.Resume]:
        """The peers of the run to continue that have come back."""
        return self._back.get(self.run or 0, {})

    @property
    def outnumbered(self) -> list[inputs.Resume]:
        """The peers of other runs that have come back."""
        return [one for run, back in self._back.items() if run != self.run for one in back.values()]

    @property
    def missing(self) -> set[int]:
        named = {info.peer for one in self.back.values() for info in one.message.known}
        expected = self._expected if self._complete else self._expected | named
        return {*expected} - self.back.keys()

    @property
    def certain(self) -> bool:
        """True if all peers are back, and no others can come."""
        return self._complete and not self.missing

    def over(self, now_s: float) -> bool:
        self._began_s = now_s if self._began_s is None else self._began_s
        waited_s = now_s - self._began_s
        if waited_s > WAIT_S or self.certain:
            return True
        alone = self._journal is None and len(self.back) < 2
        return waited_s > UNJOURNALED_WAIT_S and not self.missing and not alone


def weight(resume: m.Resume) -> int:
    """The approximate bytes that a peer's message takes in memory."""
    numbers = sum(len(one.members) for one in resume.open)
    numbers += sum(len(one.members) for one in resume.small)
    numbers += sum(len(ring.order) for ring in resume.rings)
    data = sum(len(small.data) for small in resume.small)
    data += sum(200 + 4 * len(failure.why) for failure in resume.failed)
    return 1000 + 400 * len(resume.known) + 200 * len(resume.finished) + 40 * numbers + data


Lacked: TypeAlias = tuple[int, int, m.MasterMessage]  # its seq, the peer that lacks it, a message


def _missed(resumes: Mapping[int, m.Resume]) -> list[Lacked]:
    """Small results that some peers have and others lack."""
    found: dict[int, tuple[int, m.Small]] = {}
    for number in sorted(resumes):
        for small in resumes[number].small:
            if number in small.members:
                found.setdefault(small.seq, (resumes[number].info.group, small))
    return [
        (seq, number, m.Missed(small))
        for seq, (group, small) in found.items()
        for number in set(small.members) & resumes.keys()
        if resumes[number].last_seq < seq and resumes[number].info.group == group
    ]


def _failed(resumes: Mapping[int, m.Resume]) -> list[Lacked]:
    """Failures that some peers know and others do not."""
    found: dict[int, tuple[int, m.Failure]] = {}
    for resume in resumes.values():
        for failure in resume.failed:
            found.setdefault(failure.seq, (resume.info.group, failure))
    return [
        (seq, number, m.Failed(failure))
        for seq, (group, failure) in found.items()
        for number in (set(failure.pair) & resumes.keys() if failure.pair else resumes)
        if resumes[number].last_seq < seq
        and (failure.is_run_wide or resumes[number].info.group == group)
    ]


def _unheard(collectives: Mapping[int, Unresolved]) -> Iterator[Lacked]:
    """Starts that some members never received. Their votes are void: the collectives fail."""
    lost = Result.RANK_CONNECTION_LOST.value
    for seq, was in collectives.items():
        called = m.Called.COLLECTIVE, was.tag, was.pair or ()
        for number in was.unheard:
            failure = m.Failure(seq, *called, lost, RESTARTED, m.Cause.OTHER)
            yield seq, number, m.Failed(failure)


def outdated(resumes: Mapping[int, m.Resume]) -> set[int]:
    """The peers that the run has left behind: the latest plan of their group lacks them."""
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


def _history(resumes: Mapping[int, m.Resume]) -> tuple[History, dict[int, m.Rings]]:
    history = History()
    epochs: dict[int, int] = {}
    rings: dict[int, m.Rings] = {}
    for resume in resumes.values():
        group, done = resume.info.group, resume.done
        if resume.epoch >= epochs.get(group, 0):
            epochs[group], rings[group] = resume.epoch, resume.rings
        state = history.of(group)
        state.syncs = max(state.syncs, done.sync)
        history.topology = max(history.topology, done.topology)
        history.optimized = max(history.optimized, done.optimized)
        history.finished |= done.finished
        if done.pending > history.pending:
            history.pending, history.were_pending = done.pending, done.were_pending
    for number, resume in resumes.items():
        done, state = resume.done, history.of(resume.info.group)
        if done.sync == state.syncs and state.syncs:
            state.revision, state.last_plan, state.short = done.revision, done.plan, done.short
        # a peer that does not know the last synchronization waits in it, and missed its result
        if done.holds or done.sync < state.syncs:
            state.holders.add(number)
    for state in map(history.of, rings):
        state.repeatable = True  # the fact is unknown, and a refusal would be worse
        if state.short:
            state.holders.clear()
        if not state.holders:
            state.revision = None
    return history, rings


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


def restore(run: Run, back: Mapping[int, inputs.Resume], now_s: float) -> None:
    """Restores the run from what the returned peers report, and sends them what they lack.

    `now_s` is only for `status`.
    """
    resumes = {number: one.message for number, one in back.items()}
    history, rings = _history(resumes)
    collectives, missed = _collectives(resumes), _missed(resumes)
    veterans = {number for number, resume in resumes.items() if resume.veteran}
    veterans.update(number for _, number, _ in missed)
    veterans.update(*(history.of(group).holders for group in rings))
    veterans.update(*(each.open for each in collectives.values() if each.outcome))
    known = {info.peer for resume in resumes.values() for info in resume.known}
    membership, numbers = run.membership, run.numbers
    membership.next_number = max(membership.next_number, *(n + 1 for n in known | resumes.keys()))
    incarnations = (
        max(r.last_seq >> INCARNATION_SHIFT, r.epoch >> EPOCH_SHIFT) for r in resumes.values()
    )
    numbers.begin(max(numbers.incarnation, max(incarnations) + 1))
    run.outbox.do(Adopt(run.number, numbers.incarnation))
    accepted = in_order({number: resume.info for number, resume in resumes.items()})
    for number, info in accepted.items():
        its = back[number]
        peer = PeerRecord(its.conn, info, seen=its.host, dial=its.message.dial)
        peer.since_s = peer.spoke_s = now_s
        peer.veteran = number in veterans
        membership.bring_back(peer, its.message.arithmetic)
        run.outbox.do(Remember(info))
    run.history.restore(history)
    if run.history.finished:
        run.finish()
    for group, its_rings in rings.items():
        run.groups[group] = Group(rings=its_rings)
        if not run.history.of(group).holders:
            run.outbox.note(f"the last holder of group {group}'s shared state is gone")
    run.publish_world()
    for group in rings:
        run.groups.renew(group)
    for number, info in accepted.items():
        run.outbox.send(number, m.Admitted(run.number, run.history.done(info.group)))
    for seq, was in sorted(collectives.items()):
        if was.outcome is None:
            paired = was.pair is not None
            running = Running(seq, was.group, was.members, was.votes, since_s=now_s, paired=paired)
            run.collectives.resolve(running, RESTARTED)
            continue
        for number in sorted(was.open):
            why = "" if was.outcome else RESTARTED
            run.outbox.send(number, m.Finished(seq, was.outcome, why))
    # by seq: the next restart assumes that a peer with a seq knows all earlier ones
    lacked = [*missed, *_failed(resumes), *_unheard(collectives)]
    for _, number, message in sorted(lacked, key=lambda one: one[:2]):
        run.outbox.send(number, message)
    for number, peer in membership.peers.items():
        run.outbox.send(number, m.Resumed(run.history.done(peer.info.group)))
