"""Collectives between their start and their one outcome."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.effects import Dial, Effect
from pccl.protocol.master.ledger import Group, Ledger, Running, plain
from pccl.protocol.ring import plan_rings, uses
from pccl.protocol.rounds import Round
from pccl.types import DataType, ReduceOp, Result

_ITEM_BYTES = {dtype.value: dtype.itemsize for dtype in DataType}
_REDOPS = {op.value for op in ReduceOp}
CAUSES = {m.Cause.TIMEOUT, m.Cause.MEMORY}  # that a peer may give for not completing


def fits(work: m.Work, data: bytes) -> bool:
    """Whether these can be the bytes of a contribution that the master is to reduce."""
    return (
        work.what in ("all_reduce", "barrier")
        and not work.parts
        and work.redop in _REDOPS
        and len(data) == work.count * _ITEM_BYTES.get(work.dtype, -1)
    )


def goes_around(work: m.Work) -> bool:
    """Whether a collective's data uses every hop of the rings that it goes over."""
    carries = work.count or any(part.count for part in work.parts)
    return bool(carries) and work.what in ("all_reduce", "reduce_scatter", "all_gather")


class Collectives(Ledger):
    """Starts collectives, interrupts them, and settles their outcome.

    Attributes:
        small_max: results on the way at once. A result is final when it is sent, for only a
            master's death can keep it from a peer that lives. Those that have it then tell it to
            the next master, in one message: so there must not be too many.
    """

    small_max = 128

    def _start(self, round_: Round[object]) -> None:
        group_number = round_.id.group
        assert group_number is not None
        # peers that know they are alone do not vote: it has just happened
        if len(round_.votes) == 1:
            lost = "; ".join(round_.lost) or "the others left before it voted"
            why = f"this peer is alone in its group: {lost}"
            for number, vote in round_.votes.items():
                self._fail(number, vote.call, Result.RANK_CONNECTION_LOST, why)
            return
        work = next(iter(round_.votes.values())).payload
        assert isinstance(work, m.Work)
        if work.members not in (0, len(round_.votes)):
            self._fail_outdated(round_)
            return
        data = self._combined(round_)
        group = self._groups[group_number]
        seq, epoch = self._take_seq(), group.epoch
        stable = self._stable(group, round_) if data is not None else 0
        nonce = self._nonces.of_call(seq) if data is None else 0  # which no engine needs then
        final = data is not None and len(group.small) < self.small_max
        if final:
            group.small.append(seq)
        else:
            title = round_.describe(next(iter(round_.votes)))
            running = Running(seq, group_number, set(round_.votes), title)
            if data is None and goes_around(work):
                running.around = epoch, group.planned
            self._run(running)
        self._answer(round_, lambda call: m.Started(call, seq, epoch, data, final, stable, nonce))

    def _stable(self, group: Group, round_: Round[object]) -> int:
        """Up to where nobody lacks a small result: everyone has just said what it has heard."""
        stable = min(self.peers[number].heard for number in round_.votes)
        while group.small and group.small[0] <= stable:
            group.small.popleft()
        return stable

    def _combined(self, round_: Round[object]) -> bytes | None:
        """The result, where the contributions came with the votes."""
        work = next(iter(round_.votes.values())).payload
        assert isinstance(work, m.Work)
        parts = [round_.votes[number].data for number in sorted(round_.votes)]
        given = [part for part in parts if part is not None]
        return self._combine(work, given) if given else None

    def _fail_outdated(self, round_: Round[object]) -> None:
        """Ends a start round in which ranks matter, and not all know who has which by now."""
        size = self._size(round_.id.group)
        lost = "".join(f"; {title}" for title in round_.lost)
        why = f"the group has {size} peers by now, and ranks have changed: call again{lost}"
        for number, vote in round_.votes.items():
            self._fail(number, vote.call, Result.RANK_CONNECTION_LOST, why)

    def _run(self, running: Running) -> None:
        self._running[running.seq] = running
        for number in running.members:
            self.peers[number].running += 1

    def _of_group(self, group_number: int) -> list[Running]:
        return [running for running in self._running.values() if running.group == group_number]

    def _finish(self, number: int, vote: m.FinishVote) -> None:
        seq, ok = vote.seq, vote.ok
        running = self._running.get(seq)
        if running is None and seq < self._first_seq:
            return  # of the time before a restart, and resolved since
        if running is None or number not in running.members or number in running.votes:
            self._remove(number, f"it voted on collective {seq} out of turn", Result.INTERNAL_ERROR)
            return
        running.votes[number] = ok
        if ok or running.why:
            self._settle(running)
        else:
            self._new_epoch(running.group)
            why = f"{self.peers[number].info} could not complete: {vote.why}"
            cause = m.Cause(vote.cause) if vote.cause in CAUSES else m.Cause.OTHER
            self._interrupt(self._of_group(running.group), why, cause)

    def _interrupt(
        self, collectives: list[Running], why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Whoever has not voted on these must do so now."""
        why = plain(why)
        for running in collectives:
            if not running.why:
                running.why, running.cause = why, cause
                for number in running.members - running.votes.keys():
                    self._send(number, m.Interrupt(running.seq, why))
            self._settle(running)

    def _stalled(self, number: int, stalled: m.Stalled) -> None:
        """A member cannot pass on what others may need, although it holds the result itself."""
        group_number = self.peers[number].info.group
        running = [r for r in self._of_group(group_number) if not r.why and number in r.members]
        if stalled.seq:
            self._stalled_sync(number, stalled)
        elif running and stalled.epoch == self._groups[group_number].epoch:
            self._new_epoch(group_number)
            why = f"{self.peers[number].info} could not pass on its data: {stalled.why}"
            self._interrupt(self._of_group(group_number), why)

    # ---- peers that cannot reach each other ----

    def _unreached(self, number: int, unreached: m.Unreached) -> None:
        """No stream from one peer to another could be opened; blame.py has what follows."""
        group_number, accused = self.peers[number].info.group, unreached.peer
        group = self._groups[group_number]
        others = self._accepted_in[group_number].keys() - {number}
        if accused not in others or unreached.epoch > group.epoch:
            return  # it has gone meanwhile
        if group.blame.accuse(number, accused, unreached.epoch, plain(unreached.why)):
            self._out.append(Dial(self.peers[accused].info, self.peers[accused].dial))
        self._judge(group_number)

    def dialled(self, number: int, why: str | None) -> list[Effect]:
        """A dial has ended: "" where it got through to the peer, None where it was not made."""
        peer = self.peers.get(number)
        if peer is None or peer.info.group not in self._groups:
            return self._take()  # it has gone meanwhile
        group = self._groups[peer.info.group]
        accusers = [self.peers[one].info for one, other in group.blame.blocked if other == number]
        if why and not reach.matters(peer.info, peer.seen, accusers):
            why = None
        group.blame.dialled(number, plain(why) if why else why)
        self._judge(peer.info.group)
        return self._take()

    def _judge(self, group_number: int) -> None:
        """Who cannot be reached, or reaches nobody, goes; or the rings go around the trouble."""
        while (group := self._groups.get(group_number)) is not None and group.blame.blocked:
            verdict = group.blame.verdict(self._size(group_number))
            if verdict is None and not self._go_around(group_number, group):
                verdict = group.blame.last_resort(self._proven(group_number))
            if verdict is None:
                return
            self._convict(group, verdict)

    def _go_around(self, group_number: int, group: Group) -> bool:
        """Has the rings go around what is blocked, if that can be; if need be, over links that were
        blocked some time ago."""
        blame = group.blame
        if uses(self._plan_rings(group_number, group), blame.blocked):
            blame.forgive()
            if uses(self._plan_rings(group_number, group), blame.blocked):
                return False
        used = [link for link in blame.blocked if uses(group.planned, (link,))]
        if used and group.sync is None:  # its plan is of this epoch, and goes over other streams
            a, b = used[0]
            why = f"{self.peers[a].info} could not reach {self.peers[b].info}"
            self._note(f"{why} ({blame.blocked[a, b]}): the rings go another way")
            self._new_epoch(group_number)
            self._interrupt(self._of_group(group_number), why)
        return True

    def _plan_rings(self, group_number: int, group: Group) -> tuple[m.Ring, ...]:
        """The rings that a group is to have."""
        infos = [self.peers[number].info for number in self._accepted(group_number)]
        return plan_rings(infos, group.rings, group.blame.cost())

    def _settle(self, running: Running) -> None:
        """The one outcome, once all surviving members have voted."""
        if len(running.votes) == len(running.members):  # only members vote
            del self._running[running.seq]
            ok = all(running.votes.values())
            if ok and running.around is not None:
                epoch, rings = running.around
                self._groups[running.group].blame.worked(rings, epoch)
            finished = m.Finished(running.seq, True)
            if not ok:
                finished = m.Finished(running.seq, False, running.why, running.cause)
            for number in sorted(running.members):
                self.peers[number].running -= 1
                self.peers[number].proven |= ok and running.around is not None
                self._send(number, finished)
