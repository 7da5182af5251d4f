"""Collectives between their start and their outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.master.dismissals import Dismissals
from pccl.protocol.master.groups import Groups
from pccl.protocol.master.history import History
from pccl.protocol.master.meetings import Meetings
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.numbers import Numbers
from pccl.protocol.master.outbox import Outbox, plain
from pccl.protocol.master.table import CollectiveTable, Running
from pccl.protocol.master.tally import Reason, Tally
from pccl.protocol.master.work import goes_around, misfit, outdated, predecessors
from pccl.protocol.ring import checksum
from pccl.protocol.rounds import Round
from pccl.types import Result

Combine: TypeAlias = Callable[[m.Work, Sequence[bytes]], bytes]
SMALL_BYTES_MAX = 3 << 20  # of all results that peers may lack
CAUSES = {m.Cause.TIMEOUT, m.Cause.MEMORY}  # that a peer may give for not completing
REASONS = {m.Cause.TIMEOUT: Reason.TIMEOUT, m.Cause.MEMORY: Reason.MEMORY}


class Collectives:
    """Starts collectives, interrupts them, and settles their outcome.

    Args:
        combine: reduces contributions of the work's size, in their order.

    Attributes:
        small_max: the most results that peers may lack at a time. A result is final when it is
            sent, because only the master's death can keep it from a living peer. Peers that have it
            then tell the next master, in one message: so there must not be too many.
    """

    def __init__(
        self,
        membership: Membership,
        numbers: Numbers,
        history: History,
        groups: Groups,
        meetings: Meetings,
        table: CollectiveTable,
        outbox: Outbox,
        dismissals: Dismissals,
        tally: Tally,
        combine: Combine,
    ) -> None:
        self._membership, self._numbers, self._history = membership, numbers, history
        self._groups, self._meetings, self._table = groups, meetings, table
        self._outbox, self._dismissals = outbox, dismissals
        self._tally, self._combine = tally, combine
        # by group: seqs and sizes of results that some peer may lack
        self._small: dict[int, deque[tuple[int, int]]] = {}
        self.small_max = 128

    # ---- the start ----

    def start(self, round_: Round[object]) -> None:
        """All members of a group have voted to start a collective."""
        group_number = round_.id.group
        assert group_number is not None
        # peers that know they are alone do not vote: the others have just left
        if len(round_.votes) == 1:
            lost = "; ".join(round_.lost) or "the others left before it voted"
            why = f"this peer is alone in its group: {lost}"
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why)
            return
        work = next(iter(round_.votes.values())).payload
        assert isinstance(work, m.Work)
        if work.members not in (0, len(round_.votes)):
            why = outdated(round_, len(round_.votes))
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why)
            return
        data = self._combined(work, round_)
        if data is None:
            self._groups.repair(group_number)
        group = self._groups[group_number]
        if work.ring and work.ring != checksum(group.planned[0].order):
            why = outdated(round_, len(round_.votes))
            self._refuse(round_, Result.RANK_CONNECTION_LOST, why, m.Cause.REORDERED)
            return
        why = self._misfit(round_, group.planned)
        if why:
            self._refuse(round_, Result.INVALID_ARGUMENT, why, m.Cause.MISMATCH)
            return
        if data is None and (why := self._meetings.broken(group.planned)):
            self._refuse(round_, Result.RANK_CONNECTION_FAILED, why)
            return
        seq, epoch = self._numbers.take_seq(), group.epoch
        since_s = next(reversed(round_.votes.values())).since_s
        self._tally.started(group_number)
        stable, final = 0, False
        if data is not None:
            stable, final = self._deliver(group_number, seq, len(data), round_)
        if not final:
            running = Running(seq, group_number, set(round_.votes), began_as=round_.id)
            running.since_s, running.work, running.size = since_s, work, len(round_.votes)
            even = all(vote.rows is None for vote in round_.votes.values())
            if data is None and even and goes_around(work):
                running.around = epoch, group.planned
            self._table.add(running)
        else:
            self._table.committed += 1
            self._tally.ended(group_number, work, len(round_.votes), since_s)
            for number in round_.votes:
                self._membership.peers[number].veteran = True
        # without a part for the engine, no nonce is needed
        nonce = self._numbers.nonce_of_call(seq) if data is None else 0
        calls = predecessors(round_, group.planned) if data is None else {}
        started: m.Started | None = None
        for number, vote in round_.votes.items():
            before = tuple(calls.get(number, ()))
            # most often all make the same calls: then all get the same message
            if started is None or (started.call, started.calls) != (vote.call, before):
                started = m.Started(vote.call, seq, epoch, data, final, stable, nonce, before)
            self._outbox.send(number, started)

    def pair(self, round_: Round[object]) -> None:
        """Both peers of a send have voted."""
        group_number = round_.id.group
        assert group_number is not None and round_.id.pair is not None
        if why := self._meetings.severed([round_.id.pair]):
            failed = Result.RANK_CONNECTION_FAILED
            self._refuse(round_, failed, why)
            return
        seq, epoch = self._numbers.take_seq(), self._groups[group_number].epoch
        running = Running(seq, group_number, set(round_.votes), began_as=round_.id, paired=True)
        last = next(reversed(round_.votes.values()))
        assert isinstance(last.payload, m.Work)
        running.since_s, running.work, running.size = last.since_s, last.payload, 2
        self._table.add(running)
        nonce = self._numbers.nonce_of_call(seq)
        self._outbox.answer(round_, lambda call: m.Started(call, seq, epoch, nonce=nonce))

    def _refuse(
        self, round_: Round[object], result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """All members have voted, in vain."""
        assert round_.id.group is not None
        self._history.of(round_.id.group).repeatable = True
        self._outbox.fail_all(round_.calls, round_.id, result, why, cause)

    def _misfit(self, round_: Round[object], rings: tuple[m.Ring, ...]) -> str:
        """Why the rows that members give do not fit those that others take; empty if they do."""
        votes = round_.votes
        order = [number for number in rings[0].order if votes[number].rows is not None]
        if not order:
            return ""
        rows = [vote.rows for vote in map(votes.__getitem__, order) if vote.rows is not None]
        found = misfit(rows)
        if found is None:
            return ""
        giver, taker = (order[rank] for rank in found)
        given, taken = rows[found[0]][0][found[1]], rows[found[1]][1][found[0]]
        return (
            f"in {round_.describe(giver)}, {self._membership.info(giver)} gives {given} rows to "
            f"{self._membership.info(taker)}, which takes {taken}"
        )

    def _combined(self, work: m.Work, round_: Round[object]) -> bytes | None:
        """The result, if the contributions came with the votes."""
        parts = [round_.votes[number].data for number in sorted(round_.votes)]
        given = [part for part in parts if part is not None]
        return self._combine(work, given) if given else None

    def _deliver(
        self, group: int, seq: int, nbytes: int, round_: Round[object]
    ) -> tuple[int, bool]:
        """The seq up to which all peers have all small results, by their votes; and whether this
        result is final."""
        peers = self._membership.peers
        stable = min(peers[number].heard for number in round_.votes)
        small = self._small.setdefault(group, deque())
        while small and small[0][0] <= stable:
            small.popleft()
        held = sum(size for _, size in small)
        final = len(small) < self.small_max and held + nbytes <= SMALL_BYTES_MAX
        if final:
            small.append((seq, nbytes))
        return stable, final

    # ---- the end ----

    def finish(self, number: int, vote: m.FinishVote) -> None:
        """A member reports whether it holds the whole result."""
        seq, ok = vote.seq, vote.ok
        running = self._table.get(seq)
        if running is None and self._numbers.is_old(seq):
            return  # from before a restart, and resolved since
        if running is None or number not in running.members or number in running.votes:
            why = f"it voted on collective {seq} out of turn"
            self._dismissals.dismiss(number, why, Result.INTERNAL_ERROR)
            return
        running.votes[number] = ok
        if ok or running.why:
            self._settle(running)
        else:
            why = f"{self._membership.info(number)} could not complete: {vote.why}"
            cause = m.Cause(vote.cause) if vote.cause in CAUSES else m.Cause.OTHER
            self.interrupt(self._broken(running), why, cause)

    def progress(self, number: int, progress: m.Progress) -> bool:
        """A member says how far it is. Whether it is about a collective."""
        running = self._table.get(progress.seq)
        if running is None or number not in running.members:
            return False
        running.progress[number] = min(progress.done, 1000)
        return True

    def _broken(self, running: Running) -> list[Running]:
        """What cannot go on when that one has failed: what uses the same streams."""
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
        """Tells the members that have not voted on these to do so now."""
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
        """Decides the outcome when all surviving members have voted."""
        if len(running.votes) < len(running.members):  # only members vote
            return
        # of a send, nobody else may have what one of the two had, or lacked
        ok = all(running.votes.values()) and not (running.paired and len(running.members) < 2)
        self._table.remove(running, ok)
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
        """For whoever watches the run."""
        if ok and running.work is not None:
            self._tally.ended(running.group, running.work, running.size, running.since_s)
        elif not ok:
            self._tally.aborted(
                running.group, running.reason, running.since_s, running.interrupted_s
            )

    # ---- failures ----

    def lose(self, group: int, lost: dict[int, str]) -> None:
        """Members of a group are lost; each with its name and the reason."""
        running = self._table.lose(group, lost)
        why = "lost " + "; ".join(lost.values())
        self.interrupt(running, why, reason=Reason.PEER_LOST)

    def stalled(self, number: int, stalled: m.Stalled) -> bool:
        """A member that holds the result cannot forward data that others may need; in a send, which
        it names, that it has lost what it sent. Whether it is about a collective."""
        group = self._membership.group_of(number)
        if stalled.seq:
            running = self._table.get(stalled.seq)
            if running is None or not running.paired or number not in running.members:
                return False
            why = f"{self._membership.info(number)} could not pass on its data: {stalled.why}"
            self.interrupt([running], why)
            return True
        others = [r for r in self._table.of_group(group) if not r.why and number in r.members]
        if others and stalled.epoch == self._groups[group].epoch:
            self._groups[group].broken = True
            why = f"{self._membership.info(number)} could not pass on its data: {stalled.why}"
            self.interrupt(self._table.of_group(group), why)
        return True

    def withdraw(self, number: int, seq: int) -> bool:
        """A caller withdraws from the collective with this number. Whether it was running."""
        running = self._table.get(seq)
        if running is None or number not in running.members:
            return False
        late = self._membership.names(sorted(running.missing))
        why = f"{self._membership.info(number)} waited no longer for {late}"
        self.interrupt([running], why, m.Cause.TIMEOUT)
        return True

    def resolve(self, running: Running, why: str) -> None:
        """Continues, after a restart, a collective without a known outcome: interrupts it."""
        self._table.add(running)
        self.interrupt([running], why, reason=Reason.MASTER_LOST)

    def forget(self, group: int) -> None:
        """Forgets a group that is empty."""
        self._small.pop(group, None)
