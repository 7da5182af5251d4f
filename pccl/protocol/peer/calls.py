"""The calls of a peer: their states, the votes for them, and how they fail."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Answer, Fail, Fault
from pccl.protocol.peer.streams import Common, Part
from pccl.types import Result

ENTERING = "while peers were still entering it"
MOVING = "while its data was under way"
CONFIRMING = "when its result was here, but not yet on all peers"

Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # for each rank, and from each
NO_ROWS: Rows = ((), ())


class State(Enum):
    __hash__ = object.__hash__  # each is one object; Enum hashes names, in Python

    VOTING = "registered with the engine, start vote sent"
    RUNNING = "Started was received; the engine works"
    COMPLETE = "this peer holds the whole result, and has voted so"
    ABORTING = "this peer cannot or must not complete: what it has overwritten is restored"


class Event(Enum):
    __hash__ = object.__hash__

    STARTED = "Started"
    RESULT = "Started, with a result that is not final"
    HELD = "the engine holds the whole result"
    BROKEN = "the engine cannot complete it"
    STOPPED = "Interrupt, or the caller's time is up"
    FAILED = "Finished(no), CallError, or the end of the run"
    LEFT = "its caller has gone"


# Events that are not in the table change nothing: an earlier event has overtaken them.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.VOTING: {
        Event.STARTED: State.RUNNING,
        Event.RESULT: State.COMPLETE,
        Event.BROKEN: State.ABORTING,  # an impossible chunk came early: votes no after Started
        Event.FAILED: State.ABORTING,
        Event.LEFT: State.ABORTING,  # votes no after Started
    },
    State.RUNNING: {
        Event.HELD: State.COMPLETE,
        Event.BROKEN: State.ABORTING,
        Event.STOPPED: State.ABORTING,
        Event.FAILED: State.ABORTING,
    },
    State.COMPLETE: {
        Event.FAILED: State.ABORTING,
        Event.LEFT: State.ABORTING,
    },
    State.ABORTING: {},
}


def place(tag: int, pair: tuple[int, ...]) -> int | str:
    """A key that no two collectives of a peer may share at the same time."""
    return f"{tag} from peer {pair[0]} to peer {pair[1]}" if pair else tag


@dataclass(slots=True)
class Collective:
    call: int
    tag: int
    work: m.Spec
    # the contribution, if it travels with the vote and the engine takes no part; later the result
    data: bytes | None = None
    stuck: bool = False  # whether this peer makes no other call before the answer
    rows: Rows = NO_ROWS  # the numbers of rows for each rank and from each rank; NO_ROWS: one each
    pair: tuple[int, ...] = ()  # in a send: the sender and the receiver
    nbytes: int = 0  # as in `tuning.choose`
    state: State = State.VOTING
    seq: int = 0
    members: tuple[int, ...] = ()
    settled: bool = False  # whether the engine does not (or no longer) refer to the memory
    outcome: Fail | bool | None = None
    impatient: bool = False  # the caller has withdrawn
    parting: Fail | None = None  # the answer to a caller that leaves before the outcome
    answered: bool = False  # whether that answer was given
    cause: m.Cause = m.Cause.OTHER  # why it could not complete here
    whole: bool = False  # this peer holds, or held, the whole result
    broken: str = ""  # why it could not start here
    stalled: bool = False  # the master knows that others may lack data from this peer
    stream: int = 0  # in a send: the stream on which it sends
    epoch: int = 0  # the epoch of its rings; 0: it is not on rings
    tx_bytes: int = 0
    rx_bytes: int = 0

    def move(self, event: Event) -> bool:
        """Changes the state as the table says. Returns whether the table has this event."""
        after = TRANSITIONS[self.state].get(event)
        self.state = after or self.state
        return after is not None

    @property
    def passes_on(self) -> bool:
        """True if this peer holds the result, and others may still need data from it."""
        return self.state is State.COMPLETE and self.outcome is None and self.data is None

    def vote(self, heard: int) -> m.StartVote:
        what = self.tag, self.work, self.data
        return m.StartVote(self.call, *what, heard, self.stuck, *self.rows, self.pair)

    @property
    def title(self) -> str:
        return f"{self.work} with tag {self.tag}"

    @property
    def open(self) -> m.Open:
        votes = {State.RUNNING: None, State.COMPLETE: True, State.ABORTING: False}
        members = self.pair or self.members
        return m.Open(self.seq, members, votes[self.state], self.tag, bool(self.pair))

    @property
    def unstarted(self) -> bool:
        return self.seq == 0 and self.outcome is None

    @property
    def phase(self) -> str:
        if self.seq == 0:
            return ENTERING
        if self.whole:
            return CONFIRMING
        return MOVING if self.pair else "while its data went around the ring"


GONE = "its caller waits no longer"
WHY_MAX = 1000  # characters of a reason that is sent to the master

_FAULTS: dict[int, Fault] = {
    m.Cause.MISMATCH: Fault.MISMATCH,
    m.Cause.TIMEOUT: Fault.TIMEOUT,
    m.Cause.DIVERGENCE: Fault.DIVERGENCE,
    m.Cause.MEMORY: Fault.OTHER,
    m.Cause.REORDERED: Fault.REORDERED,
}


def refused(call: int, refusal: m.CallError | m.Failure) -> Fail:
    result = Result(refusal.result)
    lost = Fault.PEER_LOST if result is Result.RANK_CONNECTION_LOST else Fault.OTHER
    fault = _FAULTS.get(refusal.cause, lost)
    return Fail(
        call, result, refusal.why, fault, ENTERING, fault in (Fault.PEER_LOST, Fault.REORDERED)
    )


def failed(collective: Collective, finished: m.Finished) -> Fail:
    """The failure of a collective that had started."""
    own = collective.impatient or collective.cause is not m.Cause.OTHER
    cause = m.Cause.TIMEOUT if collective.impatient else finished.cause
    fault = _FAULTS.get(cause, Fault.PEER_LOST)
    result = Result.TIMEOUT if fault is Fault.TIMEOUT else Result.RANK_CONNECTION_LOST
    return Fail(collective.call, result, finished.why, fault, collective.phase, again=not own)


def timed_out(call: int, why: str) -> Fail:
    return Fail(call, Result.TIMEOUT, why, Fault.TIMEOUT, ENTERING)


def abandoned(call: int) -> Fail:
    """The failure of a call whose caller left by an exception."""
    return Fail(call, Result.RANK_CONNECTION_LOST, GONE, phase=ENTERING)


Vote: TypeAlias = m.TopologyVote | m.PendingVote


def _called(vote: Vote) -> m.Called:
    if isinstance(vote, m.PendingVote):
        return m.Called.PENDING
    return m.Called.FINISH if vote.finish else m.Called.TOPOLOGY


class Votes(Part):
    """The calls that wait for their rounds, with their votes."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._waiting: dict[int, Vote] = {}

    def __contains__(self, call: int) -> bool:
        return call in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, called: int) -> int | None:
        waiting = (call for call, vote in self._waiting.items() if _called(vote) == called)
        return next(waiting, None)

    def enter(self, call: int, vote: Vote) -> None:
        self._waiting[call] = vote
        self._outbox.send(vote)

    def hurry(self, call: int) -> None:
        vote = self._waiting.get(call)
        if isinstance(vote, m.PendingVote):
            self._waiting[call] = replace(vote, patient=False)
            self._outbox.send(m.Hurry(call))

    # ---- results ----

    def topology(self, result: m.TopologyResult) -> None:
        vote = self._waiting.get(result.call)
        finished = isinstance(vote, m.TopologyVote) and vote.finish
        self._knowledge.learn(
            topology=result.round, finished=finished or self._knowledge.done.finished
        )
        self._reply(result.call, self._knowledge.world.local_size)

    def pending(self, result: m.PendingResult) -> None:
        self._knowledge.learn(pending=result.round, were_pending=result.pending)
        self._reply(result.call, result.pending)

    def refuse(self, fail: Fail) -> None:
        self._end(fail.call, fail)

    def _reply(self, call: int, value: object) -> None:
        if call in self._waiting:
            self._end(call, Answer(call, value))

    def _end(self, call: int, end: Answer | Fail) -> None:
        """Ends a call; its caller is told unless it has left."""
        del self._waiting[call]
        self._withdrawals.pop(call, None)
        if call in self._abandoned:
            self._abandoned.resolve(call)
        else:
            self._outbox.do(end)

    # ---- callers that leave, and a restarted master ----

    def release(self, call: int, fail: Fail) -> None:
        """A caller leaves before its round has ended."""
        vote = self._waiting[call]
        self._withdrawals.pop(call, None)
        self._abandoned.add(call, type(vote).__name__, fail.fault is Fault.TIMEOUT)
        self._outbox.do(replace(fail, phase=ENTERING))

    def resume(self, before: m.Done, done: m.Done) -> None:
        """Answers calls whose results were missed, and votes again in the other rounds."""
        for call, vote in list(self._waiting.items()):
            if call in self._abandoned:
                continue
            if isinstance(vote, m.TopologyVote) and before.topology < done.topology:
                self._reply(call, self._knowledge.world.local_size)
            elif isinstance(vote, m.PendingVote) and before.pending < done.pending:
                self._reply(call, done.were_pending)
            else:
                self._outbox.send(vote)

    def forget(self, call: int) -> None:
        self._waiting.pop(call, None)

    def end(self) -> list[int]:
        """Forgets all calls. Returns those that waited, without abandoned ones."""
        waiting = [call for call in self._waiting if call not in self._abandoned]
        self._waiting.clear()
        return waiting
