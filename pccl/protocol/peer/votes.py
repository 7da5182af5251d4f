"""Calls that consist of one round: `update_topology`, `finish` and `are_peers_pending`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.peer.calls import ENTERING
from pccl.protocol.peer.effects import Answer, Fail, Fault
from pccl.protocol.peer.ghosts import Ghosts, Withdrawals
from pccl.protocol.peer.knowledge import Knowledge
from pccl.protocol.peer.outbox import Outbox
from pccl.protocol.rounds import WITHDRAWN, Kind

Vote: TypeAlias = m.TopologyVote | m.PendingVote
KINDS = {
    m.Called.TOPOLOGY: Kind.TOPOLOGY,
    m.Called.FINISH: Kind.FINISH,
    m.Called.PENDING: Kind.PENDING,
}


def _called(vote: Vote) -> m.Called:
    if isinstance(vote, m.PendingVote):
        return m.Called.PENDING
    return m.Called.FINISH if vote.finish else m.Called.TOPOLOGY


class Votes:
    """The calls that wait for their rounds, with their votes."""

    def __init__(
        self, knowledge: Knowledge, outbox: Outbox, ghosts: Ghosts, withdrawals: Withdrawals
    ) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._ghosts, self._withdrawals = ghosts, withdrawals
        self._waiting: dict[int, Vote] = {}

    def __contains__(self, call: int) -> bool:
        return call in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, called: int) -> int | None:
        """The call that waits in a round of this kind, if one does."""
        waiting = (call for call, vote in self._waiting.items() if _called(vote) == called)
        return next(waiting, None)

    def enter(self, call: int, vote: Vote) -> None:
        """A caller enters its round."""
        self._waiting[call] = vote
        self._outbox.say(vote)

    def hurry(self, call: int) -> None:
        """The caller of `are_peers_pending` is no longer patient."""
        vote = self._waiting.get(call)
        if isinstance(vote, m.PendingVote):
            self._waiting[call] = msgspec.structs.replace(vote, patient=False)
            self._outbox.say(m.Hurry(call))

    # ---- results ----

    def topology(self, result: m.TopologyResult) -> None:
        """A round of `update_topology` or `finish` has ended."""
        vote = self._waiting.get(result.call)
        finished = isinstance(vote, m.TopologyVote) and vote.finish
        self._knowledge.learn(
            topology=result.round, finished=finished or self._knowledge.done.finished
        )
        self._reply(result.call, self._knowledge.world.local_size)

    def pending(self, result: m.PendingResult) -> None:
        """A round of `are_peers_pending` has ended."""
        self._knowledge.learn(pending=result.round, were_pending=result.pending)
        self._reply(result.call, result.pending)

    def refuse(self, fail: Fail) -> None:
        """A call has failed."""
        self._end(fail.call, fail)

    def _reply(self, call: int, value: object) -> None:
        if call in self._waiting:
            self._end(call, Answer(call, value))

    def _end(self, call: int, end: Answer | Fail) -> None:
        """Ends a call; its caller is told unless it has left."""
        del self._waiting[call]
        self._withdrawals.forget(call)
        if call in self._ghosts:
            self._ghosts.lay(call)
        else:
            self._outbox.do(end)

    # ---- callers that leave, and a restarted master ----

    def release(self, call: int, fail: Fail) -> None:
        """A caller leaves before its round has ended."""
        vote = self._waiting[call]
        self._withdrawals.forget(call)
        self._ghosts.add(call, type(vote).__name__, fail.fault is Fault.TIMEOUT)
        self._outbox.do(replace(fail, result=WITHDRAWN[KINDS[_called(vote)]], phase=ENTERING))

    def resume(self, before: m.Done, done: m.Done) -> None:
        """Answers calls whose results were missed, and votes anew in the other rounds."""
        for call, vote in list(self._waiting.items()):
            if call in self._ghosts:
                continue
            if isinstance(vote, m.TopologyVote) and before.topology < done.topology:
                self._reply(call, self._knowledge.world.local_size)
            elif isinstance(vote, m.PendingVote) and before.pending < done.pending:
                self._reply(call, done.were_pending)
            else:
                self._outbox.say(vote)

    def forget(self, call: int) -> None:
        """The vote of a ghost is void."""
        self._waiting.pop(call, None)

    def end(self) -> list[int]:
        """Forgets all calls. Returns those that waited, without ghosts."""
        waiting = [call for call in self._waiting if call not in self._ghosts]
        self._waiting.clear()
        return waiting
