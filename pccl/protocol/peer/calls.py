"""The calls of a peer that are one round, and its collectives, from the vote to the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import xxhash
from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    CommitOp,
    EagerOp,
    Fail,
    Fault,
    Reduced,
    RegisterOp,
    StartOp,
    Store,
)
from pccl.protocol.peer.state import OUTCOMES_KEPT, PeerContext, PeerPart
from pccl.protocol.ring import RingPlace, places, receivers
from pccl.protocol.tuning import Tuning, choose
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
    data: m.Data | None = None
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
    def why(self) -> str:
        """Why this peer votes no."""
        return self.broken[:WHY_MAX] if self.parting is None else self.parting.why

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


GONE = "its caller has left by an exception"
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


class Votes(PeerPart):
    """The calls that wait for their rounds, with their votes."""

    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
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


OTHER = m.Cause.OTHER
Outcomes: TypeAlias = tuple[tuple[int, bool], ...]  # pairs of a collective's seq and its outcome


def tag_of_send(tag: int, pair: tuple[int, ...]) -> int:
    """The tag of a send's data, different from other sends' tags except if hashes collide."""
    text = f"{tag} {pair}".encode()
    return xxhash.xxh3_64_intdigest(text)


class Collectives(PeerPart):
    """This peer's collectives, from the vote to start until their callers are answered.

    A collective goes through the states above, by the table there; its call number is also the
    engine's op number.

    A small collective does not use the engine: its contribution travels with the start vote, and
    the result comes with Started. If the result is final, the collective has committed: the master
    has sent the result to all, so every living peer gets it unless the master dies. In case the
    master dies, each peer keeps the result until it has heard that no peer lacks it. If the result
    is not final, the collective is COMPLETE, and the peers vote on it. The user's memory is written
    after the commit.

    A collective ends when its outcome is known and the engine is settled, in either order. The
    outcome is Finished, an error of the start round, or the end of the run. A settled engine no
    longer refers to the user's memory, and has restored it unless the outcome is a commit. Then the
    call is answered.
    """

    def __init__(
        self,
        context: PeerContext,
        # called with call and title if a collective has succeeded for the others after its caller
        # had left
        succeeded_without: Callable[[int, str], None],
    ) -> None:
        super().__init__(context)
        self._succeeded_without = succeeded_without
        self.by_call: dict[int, Collective] = {}
        self.started: dict[int, Collective] = {}  # started collectives without an outcome
        self._small: deque[m.Small] = deque()  # results that others may lack
        self._outcomes: deque[tuple[int, bool]] = deque(maxlen=OUTCOMES_KEPT)
        self._unvoted: set[int] = set()  # collectives that Resume reported without a vote

    def waiting(self, tag: int, pair: tuple[int, ...]) -> int | None:
        """The call with this tag and pair that waits for its start round, if any."""
        found = (one for one in self.by_call.values() if one.unstarted)
        return next((one.call for one in found if (one.tag, one.pair) == (tag, pair)), None)

    @property
    def moving(self) -> list[int]:
        return [one.call for one in self.started.values() if one.state is State.RUNNING]

    # ---- the start ----

    def enter(self, one: Collective, sent: bool) -> None:
        """A caller enters a collective; `sent`: the vote was already sent."""
        self.by_call[one.call] = one
        one.settled = one.data is not None
        if not one.settled:
            run, tag = self._knowledge.run, one.tag
            if one.pair:
                tag = tag_of_send(tag, one.pair)
            else:
                self._streams.renew()
            self._outbox.do(RegisterOp(one.call, run, tag, self._knowledge.last_seq))
            self._start_eagerly(one)
        if not sent:
            self._outbox.send(one.vote(self._knowledge.last_seq))

    def _start_eagerly(self, one: Collective) -> None:
        """Lets the engine send on the current rings: the collective probably starts on them."""
        if self._streams.ready:
            tuning = self._tuning(one)
            if tuning.eager:
                way = tuning.chunk_bytes, tuning.algorithm
                self._outbox.do(EagerOp(one.call, self._places(one), *way))

    def _tuning(self, one: Collective) -> Tuning:
        return choose(one.work, one.nbytes, self._knowledge.conditions)

    def _places(self, one: Collective) -> tuple[RingPlace, ...]:
        rings, number = self._knowledge.plan.rings, self._knowledge.number
        return places(one.work, rings, number, self._streams.ring)

    def start(self, started: m.Started) -> None:
        self._knowledge.last_seq = started.seq
        if started.data is not None:
            while self._small and self._small[0].seq <= started.stable:
                self._small.popleft()
        one = self.by_call.get(started.call)
        if one is None:
            return
        one.seq = started.seq
        one.members = one.pair or self._knowledge.members
        if started.data is None:
            self._start_op(one, started)
        elif started.final:
            self._keep(one, m.Small(started.seq, one.tag, one.members, started.data))
        else:
            self._vote_on(one, started.data)

    def _start_op(self, one: Collective, started: m.Started) -> None:
        seq = started.seq
        self.started[seq] = one
        if not one.move(Event.STARTED):
            self._outbox.send(m.FinishVote(seq, False, one.why, one.cause))
            return
        if one.impatient:  # it started while the vote was being taken back
            why = self._withdrawals[one.call]
            self.stop(one, why, m.Cause.TIMEOUT, timed_out(one.call, why))
            return
        if one.pair:
            self._start_send(one, started)
            return
        one.epoch = started.epoch
        self._streams.renew()
        places, tuning = self._places(one), self._tuning(one)
        direct: tuple[int, ...] = ()
        if tuning.direct:
            plan = self._knowledge.plan
            direct = self._streams.direct(
                receivers(one.work, one.rows[0], plan.rings, self._knowledge.number)
            )
        way = tuning.chunk_bytes, tuning.algorithm
        self._outbox.do(StartOp(one.call, seq, started.nonce, places, *way, started.calls, direct))

    def _start_send(self, one: Collective, started: m.Started) -> None:
        """Starts a send: its data goes around a ring of two, which uses only one of its links."""
        giver, taker = one.pair
        gives = self._knowledge.number == giver
        if gives:
            one.stream = self._streams.of_send(taker)
        place = RingPlace(one.stream, members=2, position=int(not gives))
        chunk_bytes = self._tuning(one).chunk_bytes
        self._outbox.do(StartOp(one.call, one.seq, started.nonce, (place,), chunk_bytes))

    def _vote_on(self, one: Collective, data: m.Data) -> None:
        """A small collective has its result, which is not final."""
        self.started[one.seq] = one
        if not one.move(Event.RESULT):
            self._outbox.send(m.FinishVote(one.seq, False, one.why))
            return
        one.data, one.whole = data, True
        self._outbox.send(m.FinishVote(one.seq, True))

    def missed(self, small: m.Small) -> None:
        """A small collective has committed, but an earlier master could not say so."""
        for one in list(self.by_call.values()):
            same = one.tag == small.tag and len(one.data or b"") == len(small.data)
            if same and one.unstarted and one.data is not None:
                one.seq = small.seq
                self._knowledge.saw(small.seq)
                one.members = small.members
                self._keep(one, small)

    def _keep(self, one: Collective, small: m.Small) -> None:
        """Keeps the result of a committed small collective, because others may lack it."""
        self._small.append(small)
        one.data, one.outcome = small.data, True
        self._knowledge.veteran = True
        if one.parting is None:
            self._store(one)
        else:
            self._succeeded_without(one.call, one.title)
        self._conclude(one)

    def _store(self, one: Collective) -> None:
        assert one.data is not None
        one.tx_bytes = one.rx_bytes = len(one.data)
        self._outbox.do(Store(one.call, one.data))

    # ---- the engine ----

    def complete(self, one: Collective, settled: bool, tx: int, rx: int) -> None:
        one.tx_bytes, one.rx_bytes, one.settled = tx, rx, settled
        if one.move(Event.HELD):
            one.whole = True
            self._outbox.send(m.FinishVote(one.seq, True))
        self._conclude(one)

    def progress(self, one: Collective, done: int) -> None:
        if one.state is State.RUNNING and one.seq in self.started:
            self._outbox.send(m.Progress(one.seq, done))

    def fail(self, one: Collective, why: str, cause: m.Cause) -> None:
        if one.state is State.COMPLETE:
            self._stall([one], why)
        elif one.state is State.VOTING and one.move(Event.BROKEN):
            one.broken, one.cause = why, cause
            self._outbox.do(AbortOp(one.call))
        else:
            self._give_up(one, Event.BROKEN, why, cause)

    def settle(self, one: Collective, tx: int, rx: int) -> None:
        one.settled = True
        one.tx_bytes, one.rx_bytes = tx, rx
        self._conclude(one)

    def stream_lost(self, stream: int, why: str, up: bool) -> None:
        """A stream is lost, perhaps with data that an op had queued there.

        If the engine has forgotten the op, only this object knows that a neighbor waits. A direct
        stream that was never `up` has carried no data, and its rows go around the rings.
        """
        if stream in self._streams.ring or (up and self._streams.is_direct(stream)):
            self._stall([one for one in self.by_call.values() if not one.pair], why)
        else:
            self._stall([one for one in self.by_call.values() if one.stream == stream], why)
        self._streams.lost(stream)

    def _stall(self, collectives: Iterable[Collective], why: str) -> None:
        """Tells the master, once, that other peers may never complete these collectives."""
        concerned = [one for one in collectives if one.passes_on and not one.stalled]
        for one in concerned:
            one.stalled = True
            if one.pair:
                self._outbox.send(m.Stalled(self._streams.epoch, one.seq, why[:WHY_MAX]))
        if any(not one.pair for one in concerned):
            self._outbox.send(m.Stalled(self._streams.epoch, 0, why[:WHY_MAX]))

    # ---- the end ----

    def interrupt(self, interrupt: m.Interrupt) -> None:
        """Another peer cannot complete a collective: this peer votes on it now."""
        one = self.started.get(interrupt.seq)
        if one is not None:
            self._give_up(one, Event.STOPPED, interrupt.why)

    def finish(self, finished: m.Finished) -> None:
        one = self.started.pop(finished.seq, None)
        if one is None:
            return
        self._outcomes.append((finished.seq, finished.ok))
        if one.epoch:
            self._streams.proven = one.epoch if finished.ok else 0
        if finished.ok:
            if not one.pair:  # all members have voted that they have it
                self._knowledge.all_saw(finished.seq)
            one.outcome = self._knowledge.veteran = True
            if one.parting is not None:
                self._succeeded_without(one.call, one.title)
            elif not one.settled:
                self._outbox.do(CommitOp(one.call))
            elif one.data is not None:
                self._store(one)
        else:
            self._abort(one, failed(one, finished))
        self._conclude(one)

    def refuse(self, fail: Fail) -> None:
        one = self.by_call[fail.call]
        self._abort(one, fail)
        self._conclude(one)

    def _give_up(self, one: Collective, event: Event, why: str, cause: m.Cause = OTHER) -> None:
        if one.move(event):
            one.cause = cause
            if not one.settled:
                self._outbox.do(AbortOp(one.call))
            self._outbox.send(m.FinishVote(one.seq, False, why[:WHY_MAX], cause))

    def _abort(self, one: Collective, outcome: Fail) -> None:
        one.outcome = outcome
        if one.move(Event.FAILED) and not one.settled:
            self._outbox.do(AbortOp(one.call))

    def _conclude(self, one: Collective) -> None:
        """Answers the call when the outcome is known and the engine is settled."""
        if one.parting is not None and one.settled and not one.answered:
            one.answered = True
            self._outbox.do(one.parting)
        if one.outcome is None or not one.settled:
            return
        del self.by_call[one.call]
        self._withdrawals.pop(one.call, None)
        if one.answered:
            self._abandoned.resolve(one.call)
        elif isinstance(one.outcome, Fail):
            self._outbox.do(one.outcome)
        else:
            end = Reduced(len(one.members), one.tx_bytes, one.rx_bytes)
            self._outbox.do(Answer(one.call, end))

    # ---- callers that leave ----

    def stop(self, one: Collective, why: str, cause: m.Cause, fail: Fail) -> None:
        """A caller leaves a running collective: votes no, so that the others stop too."""
        self._give_up(one, Event.STOPPED, why, cause)
        self.release(one, fail)

    def release(self, one: Collective, fail: Fail) -> None:
        """A caller leaves before its collective has ended."""
        self._withdrawals.pop(one.call, None)
        if one.outcome is not None:
            return
        self._abandoned.add(one.call, place(one.tag, one.pair), fail.fault is Fault.TIMEOUT)
        one.parting = replace(fail, phase=one.phase)
        if one.move(Event.LEFT) and not one.settled:
            self._outbox.do(AbortOp(one.call))
        self._conclude(one)

    def void(self, one: Collective) -> None:
        """The vote of an abandoned call was lost with an earlier master, and is void."""
        one.outcome = one.parting
        self._conclude(one)

    # ---- a restarted master, and the end of the run ----

    def report(self) -> tuple[tuple[m.Open, ...], Outcomes, tuple[m.Small, ...]]:
        open_ = tuple(one.open for _, one in sorted(self.started.items()))
        self._unvoted = {each.seq for each in open_ if each.vote is None}
        return open_, tuple(self._outcomes), tuple(self._small)

    def resume(self) -> None:
        """Casts the votes that a restarted master lacks."""
        for one in self.by_call.values():
            if one.unstarted and one.parting is None:
                self._outbox.send(one.vote(self._knowledge.last_seq))
        for seq, one in self.started.items():
            if seq in self._unvoted and one.state is not State.RUNNING:
                self._outbox.send(m.FinishVote(seq, one.state is State.COMPLETE))

    def end(self, over: Fail) -> None:
        self.started.clear()
        self._unvoted.clear()
        for one in list(self.by_call.values()):
            if one.outcome is None:
                self._abort(one, replace(over, call=one.call, phase=one.phase))
                self._conclude(one)
