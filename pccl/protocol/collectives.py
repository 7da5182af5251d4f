"""Collectives between their start and their one outcome."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.ledger import Ledger, Running, plain
from pccl.protocol.rounds import Round
from pccl.types import Result


class Collectives(Ledger):
    """Starts collectives, interrupts them, and settles their outcome."""

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
        seq, epoch = self._take_seq(), self._groups[group_number].epoch
        title = round_.describe(next(iter(round_.votes)))
        self._run(Running(seq, group_number, set(round_.votes), title))
        self._answer(round_, lambda call: m.Started(call, seq, epoch))

    def _run(self, running: Running) -> None:
        self._running[running.seq] = running
        for number in running.members:
            self.peers[number].running += 1

    def _of_group(self, group_number: int) -> list[Running]:
        return [running for running in self._running.values() if running.group == group_number]

    def _finish(self, number: int, seq: int, ok: bool, why: str) -> None:
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
            why = f"{self.peers[number].info} could not complete: {why}"
            self._interrupt(self._of_group(running.group), why)

    def _interrupt(self, collectives: list[Running], why: str) -> None:
        """Whoever has not voted on these must do so now."""
        why = plain(why)
        for running in collectives:
            if not running.why:
                running.why = why
                for number in running.members - running.votes.keys():
                    self._send(number, m.Interrupt(running.seq, why))
            self._settle(running)

    def _settle(self, running: Running) -> None:
        """The one outcome, once all surviving members have voted."""
        if len(running.votes) == len(running.members):  # only members vote
            del self._running[running.seq]
            ok = all(running.votes.values())
            finished = m.Finished(running.seq, ok, "" if ok else running.why)
            for number in sorted(running.members):
                self.peers[number].running -= 1
                self._send(number, finished)
