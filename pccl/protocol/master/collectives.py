"""Collectives from start to outcome, and their peers that cannot reach each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.effects import Dial, plain
from pccl.protocol.master.tally import SIZES, Reason
from pccl.protocol.master.topology import Group, RunContext, RunPart
from pccl.protocol.ring import checksum, uses
from pccl.protocol.rounds import Round, RoundId, Vote, described
from pccl.protocol.topology import hops
from pccl.types import TRAITS, CollectiveKind, ReduceOp, Result

Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # to each rank, and from each

_REDOPS = {op.value for op in ReduceOp}


def fits(work: m.Spec, data: m.Data) -> bool:
    """True if the bytes are a valid contribution for the master to reduce."""
    return (
        TRAITS[work.what].inline
        and not work.parts
        and work.redop in _REDOPS
        and len(data) == work.count * SIZES.get(work.dtype, -1)
    )


def goes_around(work: m.Spec) -> bool:
    """True if the collective's data uses every hop of its rings."""
    carries = work.count or any(part.count for part in work.parts)
    if work.rows and sum(rows > 0 for rows in work.rows) < 2:
        return False  # only one member gives rows, and it receives none
    return bool(carries) and TRAITS[work.what].every_hop


def are_rows(work: m.Spec, rows: Rows) -> bool:
    """True if these can be the numbers of rows to and from each member of the collective."""
    gives, takes = rows
    return work.what == CollectiveKind.ALL_TO_ALL and len(gives) == len(takes) == work.members


def is_pair(number: int, vote: m.StartVote) -> bool:
    """True if the vote's pair is valid: this peer and another one in a send, otherwise empty."""
    if vote.work.what != CollectiveKind.SEND:
        return not vote.pair
    return len(vote.pair) == 2 and len({*vote.pair}) == 2 and number in vote.pair


def mismatch(rows: Sequence[Rows]) -> tuple[int, int] | None:
    """The first two ranks whose numbers of given and taken rows differ."""
    taken = list(zip(*(takes for _, takes in rows), strict=True))  # by giver and taker
    for rank, (gives, _) in enumerate(rows):
        if gives != taken[rank]:
            pairs = enumerate(zip(gives, taken[rank], strict=True))
            return rank, next(other for other, (given, took) in pairs if given != took)
    return None


def predecessors(round_: Round, rings: Sequence[m.Ring]) -> defaultdict[int, list[int]]:
    """For each member, the call of its predecessor in each ring."""
    calls: defaultdict[int, list[int]] = defaultdict(list)
    for ring in rings:
        for before, number in hops(ring.order):
            calls[number].append(round_.votes[before].call)
    return calls


def form(vote: Vote) -> object:
    """The part of a vote that all members must agree on."""
    return vote.payload, vote.data is None, vote.rows is None


def sees_others(one: Vote, other: Vote) -> bool:
    """True if the votes are for the same call by peers that disagree on ranks or members."""
    asked: m.Spec = one.payload
    return asked.sees_others_than(other.payload)


def difference(round_: Round, one: int, other: int, who: str) -> str:
    """The difference between the votes of two peers, in words; `who` names the peers' calls."""
    asked: m.Spec = round_.votes[one].payload
    mine: m.Spec = round_.votes[other].payload
    alike = (round_.votes[one].data is None) == (round_.votes[other].data is None)
    if asked == mine and alike:
        return f"some say how many rows they give and take, and some do not: {who}"
    if replace(asked, members=0) == replace(mine, members=0):
        return f"PCCL_INLINE_BYTES is not the same for all: {who}"
    return f"the peers do not ask for the same: {who}{asked.difference(mine)}"


def outdated(round_: Round, size: int) -> str:
    """The error of a start round in which some peers do not know the current ranks.

    `size` is the size of the group.
    """
    lost = "".join(f"; {title}" for title in round_.lost)
    return f"the group has {size} peers by now, and ranks have changed: call again{lost}"


@dataclass(slots=True)
class Running:
    """A collective between its start and its outcome, with the votes on its end."""

    seq: int
    group: int
    members: set[int]
    votes: dict[int, bool] = field(default_factory=dict)
    began_as: RoundId | None = None  # its start round; None if it began before a restart
    around: tuple[int, tuple[m.Ring, ...]] | None = None  # its epoch and rings, if it uses all hops
    why: str = ""
    cause: m.Cause = m.Cause.OTHER
    since_s: float = 0.0  # when the last peer entered it
    paired: bool = False  # a send: the loss of other peers does not matter
    work: m.Spec | None = None  # None if it began before a restart
    size: int = 0  # its members at its start
    reason: Reason = Reason.LINK  # why it was interrupted
    interrupted_s: float = 0.0  # when it was interrupted
    progress: dict[int, int] = field(default_factory=dict)  # thousandths, by member

    @property
    def title(self) -> str:
        if self.began_as is None:
            return f"collective {self.seq}"
        giver, _ = self.began_as.pair or (0, 0)
        return described(self.began_as, self.work, giver)

    @property
    def missing(self) -> set[int]:
        """The members that have not voted on its end."""
        return self.members - self.votes.keys()


class CollectiveTable:
    """Running collectives by their sequence numbers."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._counts: dict[int, int] = {}  # by peer: the number of its collectives

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def __len__(self) -> int:
        return len(self._running)

    def get(self, seq: int) -> Running | None:
        return self._running.get(seq)

    def of_group(self, group: int) -> list[Running]:
        """The collectives of a group, without sends, in the order of their starts."""
        return [
            running
            for running in self._running.values()
            if running.group == group and not running.paired
        ]

    def running(self, number: int) -> int:
        return self._counts.get(number, 0)

    def add(self, running: Running) -> None:
        self._running[running.seq] = running
        counts = self._counts
        for number in running.members:
            counts[number] = counts.get(number, 0) + 1

    def remove(self, running: Running) -> None:
        del self._running[running.seq]
        counts = self._counts
        for number in running.members:
            if counts[number] == 1:
                del counts[number]
            else:
                counts[number] -= 1

    def lose(self, group: int, lost: Collection[int]) -> list[Running]:
        """Removes lost peers of a group. Returns the collectives that this affects."""
        lost = set(lost)
        running = self.of_group(group)
        running += [one for one in self._running.values() if one.paired and one.members & lost]
        for one in running:
            one.members.difference_update(lost)
            for number in lost:
                one.votes.pop(number, None)
        for number in lost:
            self._counts.pop(number, None)
        return running

    def waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        for running in self._running.values():
            if running.votes:
                yield running.seq, running.missing, running.title


Combine: TypeAlias = Callable[[m.Spec, Sequence[m.Data]], m.Data]
SMALL_BYTES_MAX = 3 << 20  # bytes of all results that peers may lack
CAUSES = {m.Cause.TIMEOUT, m.Cause.MEMORY}  # the causes that a peer may give for a failure
REASONS = {m.Cause.TIMEOUT: Reason.TIMEOUT, m.Cause.MEMORY: Reason.MEMORY}


class Collectives(RunPart):
    """Starts collectives, interrupts them, and settles their outcome."""

    def __init__(self, context: RunContext, table: CollectiveTable, combine: Combine) -> None:
        super().__init__(context)
        self._table, self._combine = table, combine
        # the most small results that peers may lack at a time. A small result is final when it is
        # sent: only the master's death can keep it from a living peer, and then another peer
        # reports it to the next master. All such results must fit into one message.
        self.small_max = 128

    # ---- the start ----

    def start(self, round_: Round) -> None:
        group_number = round_.id.group
        assert group_number is not None
        # a peer does not vote if it knows that it is alone, so the others have just left
        if len(round_.votes) == 1:
            lost = "; ".join(round_.lost) or "the others left before it voted"
            why = f"this peer is alone in its group: {lost}"
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why)
            return
        work: m.Spec = next(iter(round_.votes.values())).payload
        if work.members not in (0, len(round_.votes)):
            why = outdated(round_, len(round_.votes))
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why)
            return
        parts = [round_.votes[number].data for number in sorted(round_.votes)]
        given = [part for part in parts if part is not None]
        data = self._combine(work, given) if given else None  # the result, if all came with votes
        if data is None:
            self._groups.repair(group_number)
        group = self._groups[group_number]
        if work.ring and work.ring != checksum(group.planned[0].order):
            why = outdated(round_, len(round_.votes))
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why, m.Cause.REORDERED)
            return
        why = self._mismatch(round_, group.planned)
        if why:
            self._refuse(round_, Result.INVALID_ARGUMENT, why, m.Cause.MISMATCH)
            return
        if data is None and (why := self._rendezvous.broken(group.planned)):
            self._refuse(round_, Result.RANK_CONNECTION_FAILED, why)
            return
        seq, epoch = self._numbers.take_seq(), group.epoch
        self._tally.started(group_number)
        stable, final = 0, False
        if data is not None:
            stable, final = self._deliver(group_number, seq, len(data), round_)
        if not final:
            running = self._run(seq, round_)
            even = all(vote.rows is None for vote in round_.votes.values())
            if data is None and even and goes_around(work):
                running.around = epoch, group.planned
        else:
            self._tally.ended(group_number, work, len(round_.votes), round_.since_s)
            for number in round_.votes:
                self._membership.peers[number].veteran = True
        # the nonce is for engines, which have nothing to do if the data came with the votes
        nonce = self._numbers.nonce("call", seq) if data is None else 0
        calls = predecessors(round_, group.planned) if data is None else {}
        started: m.Started | None = None
        for number, vote in round_.votes.items():
            before = tuple(calls.get(number, ()))
            # usually the calls of all peers have the same number: then all get the same message
            if started is None or (started.call, started.calls) != (vote.call, before):
                started = m.Started(vote.call, seq, epoch, data, final, stable, nonce, before)
            self._outbox.send(number, started)

    def pair(self, round_: Round) -> None:
        group_number = round_.id.group
        assert group_number is not None and round_.id.pair is not None
        if why := self._rendezvous.severed([round_.id.pair]):
            self._refuse(round_, Result.RANK_CONNECTION_FAILED, why)
            return
        seq, epoch = self._numbers.take_seq(), self._groups[group_number].epoch
        self._run(seq, round_)
        nonce = self._numbers.nonce("call", seq)
        self._outbox.answer(round_, lambda call: m.Started(call, seq, epoch, nonce=nonce))

    def _run(self, seq: int, round_: Round) -> Running:
        assert round_.id.group is not None
        running = Running(
            seq,
            round_.id.group,
            set(round_.votes),
            began_as=round_.id,
            since_s=round_.since_s,
            paired=round_.id.pair is not None,
            work=next(reversed(round_.votes.values())).payload,
            size=len(round_.votes),
        )
        self._table.add(running)
        return running

    def _refuse(
        self, round_: Round, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Fails a round after all members have voted."""
        assert round_.id.group is not None
        self._history.of(round_.id.group).repeatable = True
        self._outbox.fail_all(round_.calls, round_.id, result, why, cause)

    def _mismatch(self, round_: Round, rings: tuple[m.Ring, ...]) -> str:
        """Describes members that give other numbers of rows than others take; else empty."""
        votes = round_.votes
        order = [number for number in rings[0].order if votes[number].rows is not None]
        if not order:
            return ""
        rows = [vote.rows for vote in map(votes.__getitem__, order) if vote.rows is not None]
        found = mismatch(rows)
        if found is None:
            return ""
        giver, taker = (order[rank] for rank in found)
        given, taken = rows[found[0]][0][found[1]], rows[found[1]][1][found[0]]
        return (
            f"in {round_.describe(giver)}, {self._membership.info(giver)} gives {given} rows to "
            f"{self._membership.info(taker)}, which takes {taken}"
        )

    def _deliver(self, group: int, seq: int, nbytes: int, round_: Round) -> tuple[int, bool]:
        """The last seq up to which all peers have all small results; whether this one is final."""
        peers = self._membership.peers
        stable = min(peers[number].heard for number in round_.votes)
        small = self._groups[group].small
        while small and small[0][0] <= stable:
            small.popleft()
        held = sum(size for _, size in small)
        final = len(small) < self.small_max and held + nbytes <= SMALL_BYTES_MAX
        if final:
            small.append((seq, nbytes))
        return stable, final

    # ---- the end ----

    def finish(self, number: int, vote: m.FinishVote) -> None:
        """Handles a member's vote on whether it holds the whole result."""
        seq, ok = vote.seq, vote.ok
        running = self._table.get(seq)
        if running is None and self._numbers.is_old(seq):
            return  # it began before a restart, and is resolved by now
        if running is None or number not in running.members or number in running.votes:
            self._dismissals.out_of_turn(number, vote)
            return
        running.votes[number] = ok
        if ok or running.why:
            self._settle(running)
        else:
            why = f"{self._membership.info(number)} could not complete: {vote.why}"
            cause = m.Cause(vote.cause) if vote.cause in CAUSES else m.Cause.OTHER
            self.interrupt(self._broken(running), why, cause)

    def _broken(self, running: Running) -> list[Running]:
        """All running collectives that share streams with the failed one."""
        if running.paired:
            return [running]
        self._groups[running.group].broken = True
        return self._table.of_group(running.group)

    def interrupt(
        self,
        collectives: list[Running],
        why: str,
        cause: m.Cause = m.Cause.OTHER,
        reason: Reason = Reason.LINK,
    ) -> None:
        why = plain(why)
        for running in collectives:
            if not running.why:
                running.why, running.cause = why, cause
                running.reason = REASONS.get(cause, reason)
                running.interrupted_s = self._tally.now_s
                for number in running.missing:
                    self._outbox.send(number, m.Interrupt(running.seq, why))
            self._settle(running)

    def _settle(self, running: Running) -> None:
        """Decides the outcome after the votes of all surviving members."""
        if len(running.votes) < len(running.members):  # only members vote
            return
        # when one of the two peers of a send is lost, nobody knows whether it had the result
        ok = all(running.votes.values()) and not (running.paired and len(running.members) < 2)
        self._table.remove(running)
        self._note_end(running, ok)
        if ok and running.around is not None:
            epoch, rings = running.around
            self._groups[running.group].blame.worked(rings, epoch)
        finished = m.Finished(running.seq, True)
        if not ok:
            self._history.of(running.group).repeatable = True
            self._groups.repair(running.group)
            finished = m.Finished(running.seq, False, running.why, running.cause)
        for number in sorted(running.members):
            peer = self._membership.peers[number]
            peer.proven |= ok and running.around is not None
            peer.veteran |= ok
            self._outbox.send(number, finished)

    def _note_end(self, running: Running, ok: bool) -> None:
        group, since_s = running.group, running.since_s
        if not ok:
            self._tally.aborted(group, running.reason, since_s, running.interrupted_s)
        elif running.work is None:
            self._tally.counts.committed += 1
        else:
            self._tally.ended(group, running.work, running.size, since_s)

    # ---- failures ----

    def lose(self, group: int, lost: dict[int, str]) -> None:
        """Handles the loss of members of a group; `lost` has the name and reason of each."""
        running = self._table.lose(group, lost)
        why = "lost " + "; ".join(lost.values())
        self.interrupt(running, why, reason=Reason.PEER_LOST)

    def stalled(self, number: int, stalled: m.Stalled) -> bool:
        """Handles a member that holds the result, but cannot forward data that others may need.

        For a send, the message has its seq. Returns False if it is about a synchronization.
        """
        group = self._membership.group_of(number)
        why = f"{self._membership.info(number)} could not pass on its data: {stalled.why}"
        if stalled.seq:
            running = self._table.get(stalled.seq)
            if running is None or not running.paired or number not in running.members:
                return False
            self.interrupt([running], why)
            return True
        others = [r for r in self._table.of_group(group) if not r.why and number in r.members]
        if others and stalled.epoch == self._groups[group].epoch:
            self._groups[group].broken = True
            self.interrupt(self._table.of_group(group), why)
        return True

    def withdraw(self, number: int, withdraw: m.Withdraw) -> bool:
        """Withdraws a caller from a collective. Returns False if the collective does not run."""
        running = self._table.get(withdraw.seq)
        if running is None or number not in running.members:
            return False
        _, why, cause = withdraw.failure(self._membership.info(number))
        late = self._membership.names(sorted(running.missing))
        self.interrupt([running], f"{why} for {late}", cause)
        return True

    def resolve(self, running: Running, why: str) -> None:
        """Interrupts a collective from before a restart whose outcome is unknown."""
        self._table.add(running)
        self.interrupt([running], why, reason=Reason.MASTER_LOST)


class Accusations(RunPart):
    """Collects reports of streams that failed to open, and acts on the verdicts."""

    def __init__(
        self,
        context: RunContext,
        table: CollectiveTable,
        collectives: Collectives,
        # groups with a synchronization; it belongs to the group's epoch but has its own streams
        synchronizing: Container[int],
    ) -> None:
        super().__init__(context)
        self._table, self._collectives = table, collectives
        self._synchronizing = synchronizing

    def unreached(self, number: int, unreached: m.Unreached) -> None:
        peers, accused = self._membership.peers, unreached.peer
        group_number = peers[number].info.group
        group = self._groups[group_number]
        other = peers.get(accused)
        if other is None or not other.accepted or other.info.group != group_number:
            return  # it has gone meanwhile
        if accused == number or unreached.epoch > group.epoch:
            return
        if self._rendezvous.give_up(number, accused, unreached.epoch):
            if unreached.epoch == group.epoch:
                self._renew(group_number, number, accused, plain(unreached.why))
            return
        if group.blame.accuse(number, accused, unreached.epoch, plain(unreached.why)):
            if other.info.outgoing:  # no dial can reach it
                group.blame.dialled(accused, None)
            else:
                self._outbox.do(Dial(other.info, other.dial))
        self._act_on_blame(group_number)

    def dialled(self, number: int, why: str | None) -> None:
        """Handles the end of a dial: "": the peer was reached; None: not made; else why not."""
        peer = self._membership.peers.get(number)
        if peer is None or peer.info.group not in self._groups:
            return  # it has gone meanwhile
        blame = self._groups[peer.info.group].blame
        accusers = [self._membership.info(one) for one, other in blame.blocked if other == number]
        if why and not reach.matters(peer.info, peer.seen, accusers):
            why = None
        blame.dialled(number, plain(why) if why else why)
        self._act_on_blame(peer.info.group)

    def _act_on_blame(self, group_number: int) -> None:
        """Drops the peer that is at fault, or plans rings that avoid the link."""
        while group_number in self._groups:
            group = self._groups[group_number]
            if not group.blame.blocked:
                return
            verdict = group.blame.verdict(self._membership.size(group_number))
            if verdict is None and not self._go_around(group_number, group):
                verdict = group.blame.last_resort(self._groups.proven(group_number))
            if verdict is None:
                return
            self._dismissals.drop_for(group_number, verdict)

    def _go_around(self, group_number: int, group: Group) -> bool:
        """Plans rings that avoid the blocked links.

        If there are no such rings, links that were blocked before the last success may be used
        again. Returns False if this does not help either.
        """
        blame = group.blame
        if uses(self._groups.plan(group_number), blame.blocked):
            blame.forgive()
            if uses(self._groups.plan(group_number), blame.blocked):
                return False
        used = [link for link in blame.blocked if uses(group.planned, (link,))]
        if used:
            self._renew(group_number, *used[0], blame.blocked[used[0]])
        return True

    def _renew(self, group_number: int, accuser: int, accused: int, why: str) -> None:
        """Gives a group new streams, which go another way."""
        if group_number not in self._synchronizing:
            what = f"{self._membership.info(accuser)} could not reach "
            what += f"{self._membership.info(accused)}"
            self._outbox.note(f"{what} ({why}): the rings go another way")
            self._groups.renew(group_number)
            self._collectives.interrupt(self._table.of_group(group_number), what)
