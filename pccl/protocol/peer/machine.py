"""The peer's state machine: its calls, its collectives, its streams. No I/O.

Theory of operation
-------------------

Three kinds of events come in: calls of the API (each with a
number, `call`, that the caller never uses twice), messages of the master, and events of the lane
engine. Actions come out, to be performed in order: messages to send, orders to the engine, and
answers to calls.

When the connection to the master breaks, nothing is said any more (`link_lost`), while the engine
works on. On the next connection `Resume` says all that the master may need (a peer that was not
accepted yet has nothing to come back to, and says `Hello` again), and when it answers
`Resumed` the calls that still wait for a round are voted on anew: votes and answers under way were
lost with the connection.

A collective goes through the states of calls.py, by the table there; its call number is also the
engine's op number.

A small one has nothing to do with the engine: its contribution travels with the start vote and the
result comes with Started. Mostly it has committed herewith: the master has sent the result to all,
so a peer that lives gets it unless the master dies. For that case each peer keeps the result until
it has heard that nobody lacks it. Else the small collective is COMPLETE now, and voted on.
The user's memory is written when it has committed.

It ends when two things are known: the outcome (Finished, an error of the start round, or the end of
the run) and that the engine is settled, that is, refers to none of the user's memory and has
restored it where the outcome is no commit. Both can come in either order. Only then is the call
answered.

A caller may go before its call ends (`abandon`, and `withdraw` while the master is away). Then its
call ends as soon as the engine is settled, and what is left of it is a ghost (ghosts.py).

Streams belong to an epoch. The first collective of a new epoch closes the old ones and opens new
ones; nothing in an old epoch still needs them, because an epoch ends only when no collective is
running or all are interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from pccl.errors import (
    KickedError,
    MasterLostError,
    PCCLError,
    PCCLTimeoutError,
)
from pccl.protocol import messages as m
from pccl.protocol.peer.calls import ENTERING, OUTCOMES_KEPT, Collective, Event, State
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    CloseStream,
    CommitOp,
    Effect,
    Fail,
    Reduced,
    RegisterOp,
    Send,
    StartOp,
    Store,
    Waits,
)
from pccl.protocol.peer.failures import failed, parting, refused
from pccl.protocol.peer.transfers import Transfers
from pccl.protocol.ring import places, successors
from pccl.types import Result

GONE = "its caller waits no longer"
LOST, OTHER = Result.RANK_CONNECTION_LOST, m.Cause.OTHER


class Peer(Transfers):
    """One peer of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.run = 0
        self.accepted = False
        self.world = m.World(0, 0, 0, 0)
        self._hello: m.Hello | None = None
        self._joining: int | None = None
        self._outcomes: deque[tuple[int, bool]] = deque(maxlen=OUTCOMES_KEPT)
        self._calls: dict[int, m.PeerMessage] = {}  # simple calls that wait, and their votes
        self._unvoted: set[int] = set()  # collectives that Resume reported without our vote
        self._collectives: dict[int, Collective] = {}
        self._by_seq: dict[int, Collective] = {}
        self._small: deque[m.Small] = deque()  # results that others may lack
        self._streams: tuple[int, ...] = ()  # to our successors, one for each ring
        self._streams_epoch = 0

    # ---- calls ----

    def join(self, call: int, hello: m.Hello) -> list[Effect]:
        """Asks to join; answered when this peer is accepted."""
        if self._dead(call):  # the connection failed before we came to say anything
            return self._take()
        self._joining, self._hello = call, hello
        self._say(hello)
        return self._take()

    def update_topology(self, call: int) -> list[Effect]:
        """Answered with the size of the group when pending peers have been accepted."""
        return self._simple(call, m.TopologyVote(call))

    def are_peers_pending(
        self, call: int, stuck: bool = False, patient: bool = False
    ) -> list[Effect]:
        """Answered with a bool. `stuck`: until then this peer makes no other call.

        `patient`: while all voters are, there is no answer before a peer is pending (`hurry`).
        """
        return self._simple(call, m.PendingVote(call, stuck, patient))

    def hurry(self, call: int) -> list[Effect]:
        """The caller of `are_peers_pending` is no longer patient."""
        vote = self._calls.get(call)
        if isinstance(vote, m.PendingVote):
            self._calls[call] = m.PendingVote(call, vote.stuck)
            self._say(m.Hurry(call))
        return self._take()

    def inquire(self, call: int) -> list[Effect]:
        """The caller has waited for long. The answer, if there is one, is a `Waits`."""
        collective = self._collectives.get(call)
        if self.over is None and self.number:
            self._say(m.Inquire(call, 0 if collective is None else collective.seq))
        return self._take()

    def collective(
        self,
        call: int,
        tag: int,
        work: m.Work,
        data: bytes | None = None,
        stuck: bool = False,
        said: bool = False,
    ) -> list[Effect]:
        """Answered with a `Reduced`. `stuck`: until then this peer makes no other call.

        With `data`, the contribution, the master reduces and the engine has no part in it.
        `said`: its vote is with the master already (`heard_if_free`).
        """
        collective = Collective(call, tag, work, data, stuck, settled=data is not None)

        def enter() -> None:
            self._collectives[call] = collective
            if not collective.settled:
                self._out.append(RegisterOp(call, self.run, tag, self._last_seq))
            if not said:
                self._say(collective.vote(self._last_seq))

        if not self._dead(call) and not self._ghosts.keeps(call, tag, enter):
            enter()
        return self._take()

    # ---- calls that are given up ----

    def withdraw(self, call: int, why: str) -> list[Effect]:
        """The caller waits no longer. The call is answered all the same, one way or the other.

        The master knows whether it is over already, and tells. It is not asked where our own vote
        decides that the call fails, and cannot be asked while it is away.
        """
        collective = self._collectives.get(call)
        if self.over is not None or call in self._ghosts:
            return self._take()
        if collective is not None and collective.state is State.RUNNING:
            self._give_up(collective, Event.STOPPED, why, m.Cause.TIMEOUT)
            self._release(call, why, PCCLTimeoutError)
        elif not self._linked:
            self._release(call, f"{why}, while the master was away", PCCLTimeoutError)
        elif self._ghosts.forget(call):
            self._out.append(Fail(call, LOST, why, PCCLTimeoutError, ENTERING))
        elif call in self._calls or collective is not None or self._in_sync(call):
            if collective is not None:
                collective.impatient = True
            self._withdrawn[call] = why
            self._say_withdraw(call)
        return self._take()

    def abandon(self, call: int) -> list[Effect]:
        """An exception has taken the caller away: answered when nothing refers to its memory."""
        collective = self._collectives.get(call)
        if self.over is None and call not in self._ghosts:
            if collective is not None and collective.state is State.RUNNING:
                self._give_up(collective, Event.STOPPED, GONE)
            else:
                self._say_withdraw(call)
            self._release(call, GONE, PCCLError)
        return self._take()

    def _release(self, call: int, why: str, error: type[PCCLError]) -> None:
        """A call ends without its outcome; what is left of it is a ghost."""
        self._withdrawn.pop(call, None)
        collective, syncing = self._collectives.get(call), self._in_sync(call)
        late = error is PCCLTimeoutError
        fail = parting(Fail(call, LOST, why, error), self._calls.get(call), collective or syncing)
        if call in self._calls:
            self._ghosts.add(call, type(self._calls[call]).__name__, late)
            self._out.append(fail)
        elif collective is not None and collective.outcome is None:
            self._ghosts.add(call, collective.tag, late)
            collective.parting = fail
            if collective.move(Event.LEFT) and not collective.settled:
                self._out.append(AbortOp(call))
            self._conclude(collective)
        elif syncing is not None:
            self._ghosts.add(call, type(syncing.vote).__name__, late)
            self._end_sync(syncing, fail)
        elif self._ghosts.forget(call):
            self._out.append(fail)

    def _succeeded_without(self, call: int, what: str) -> None:
        """A call has succeeded for the others whose caller went before it could hear that."""
        if self._ghosts.late(call) and self.over is None:
            self._out.append(Send(m.Leave()))
            why = (
                f"its time ran out in {what} while the master was away, and the others have the "
                "result: this peer is out of step with them"
            )
            self._end(LOST, why, KickedError)

    def _lay_ghosts(self, before: m.Done, done: m.Done) -> None:
        """What the master that is gone knew of calls whose callers have gone is void."""
        for call in self._ghosts.calls:
            collective = self._collectives.get(call)
            if collective is not None and collective.unstarted:
                collective.outcome = collective.parting
                self._conclude(collective)
            elif collective is None:
                what = self._ghosts.succeeded(call, before, done)
                self._calls.pop(call, None)
                if what:
                    self._succeeded_without(call, f"{what}()")
                self._ghosts.lay(call)

    def _say_withdraw(self, call: int) -> None:
        collective = self._collectives.get(call)
        if call in self._calls or self._in_sync(call):
            self._say(m.Withdraw(call))
        elif collective is not None and collective.outcome is None:
            self._say(m.Withdraw(call, collective.seq))

    def leave(self, why: str) -> list[Effect]:
        """Leaves the run; every call that waits fails."""
        if self.over is None:
            self._out.append(Send(m.Leave()))
            self._end(Result.INVALID_USAGE, why)
        return self._take()

    @property
    def idle(self) -> bool:
        """Whether no op refers to any memory."""
        return not self._collectives and self._syncing is None

    # ---- the master ----

    def lost_master(self, why: str) -> list[Effect]:
        """The connection to the master is gone."""
        if self.over is None:
            self._end(Result.MASTER_CONNECTION_FAILED, why, MasterLostError)
        return self._take()

    def broken(self, why: str) -> list[Effect]:
        """Something in this process that everything else needs has failed."""
        if self.over is None:
            self._end(Result.INTERNAL_ERROR, why)
        return self._take()

    def received(self, message: m.MasterMessage) -> list[Effect]:
        """A message of the master."""
        match message:
            case _ if self.over is not None:
                pass  # left, kicked or lost already: nothing counts any more
            case m.Started(_, _, _, None):
                self._started(message)
            case m.Started():
                self._reduced(message)
            case m.Missed(small):
                self._missed(small)
            case m.Finished():
                self._finished(message)
            case m.Interrupt(seq, why):
                collective = self._by_seq.get(seq)
                if collective is not None:
                    self._give_up(collective, Event.STOPPED, why)
            case m.Welcome(peer):
                self.number, self._linked = peer, True
            case m.Admitted(run, done):
                if not self.accepted:
                    self._done = done
                self.run, self.accepted = run, True
                if self._joining is not None:
                    self._out.append(Answer(self._joining, None))
                    self._joining = None
            case m.Plan():
                self.plan = message
            case m.Membership(world):
                self.world = world
            case m.TopologyResult(call, count):
                self._done = msgspec.structs.replace(self._done, topology=count)
                self._reply(call, self.world.local_size)
            case m.Waiting(call, why):
                self._out.append(Waits(call, why))
            case m.PendingResult(call, pending, count):
                self._done = msgspec.structs.replace(
                    self._done, pending=count, were_pending=pending
                )
                self._reply(call, pending)
            case m.SyncPlan():
                self._planned(message)
            case m.SyncResult():
                self._synced(message)
            case m.Probe(call, seq, peers, nonce):
                self._planned(m.SyncPlan(call, seq, peers, peers, (0,), (), nonce=nonce))
            case m.OptimizeResult():
                self._optimized(message)
            case m.Resumed(done):
                self._resumed(done)
            case m.CallError():
                self._refused(message)
            case m.Kicked(result, why):
                self._dropped(Result(result), f"the master dropped this peer: {why}")
            case m.Refused(result, why):
                self._dropped(Result(result), f"the master refused this peer: {why}")
        return self._take()

    # ---- the engine ----

    def engine_complete(self, op: int, settled: bool, tx: int, rx: int) -> list[Effect]:
        """An op holds its whole result. What a fetch brought is for the caller to verify."""
        collective = self._collectives.get(op)
        if collective is not None:
            collective.tx_bytes, collective.rx_bytes = tx, rx
            collective.settled = settled
            if collective.move(Event.HELD):
                collective.whole = True
                self._say(m.FinishVote(collective.seq, True))
            self._conclude(collective)
        else:
            self._transfer_complete(op, settled, rx)
        return self._take()

    def engine_failed(
        self, op: int, why: str, starved: int = 0, cause: m.Cause = OTHER
    ) -> list[Effect]:
        """An op cannot complete.

        `starved` is not 0 when the op of a transfer lives and only lacks a stream, to somebody to
        fetch from or to serve: the sequence number of the plan in which that happened.
        """
        collective = self._collectives.get(op)
        why = f"it ran out of memory: {why}" if cause is m.Cause.MEMORY else why
        if collective is None:
            self._transfer_failed(op, why, starved)
        elif collective.state is State.COMPLETE:
            self._stall([collective], why)
        elif collective.state is State.VOTING and collective.move(Event.BROKEN):
            collective.broken, collective.cause = why, cause
            self._out.append(AbortOp(op))
        else:
            self._give_up(collective, Event.BROKEN, why, cause)
        return self._take()

    def stream_lost(self, stream: int, why: str) -> list[Effect]:
        """A stream is gone. The ops that have still to use it fail (`engine_failed`).

        But what an op has given to the stream may be lost as well, and its engine may have
        forgotten the op: then only we know that the neighbour waits for something.
        """
        if stream in self._streams:
            self._stall(self._collectives.values(), why)
        return self._take()

    def _stall(self, collectives: Iterable[Collective], why: str) -> None:
        """The master is told, once, of collectives that we hold and others may never complete."""
        concerned = [c for c in collectives if c.passes_on and not c.stalled]
        for collective in concerned:
            collective.stalled = True
        if concerned:
            self._say(m.Stalled(self._streams_epoch, 0, why[:1000]))

    def unreached(self, info: m.PeerInfo, why: str) -> list[Effect]:
        """No stream to a peer could be opened. The ops that wanted it fail, as ever.

        A probe that fails so has found what it is for: a ring may have other neighbours.
        """
        if self._syncing is None or not self._syncing.optimises:
            self._say(m.Unreached(info.peer, self.plan.epoch, why[:1000]))
        return self._take()

    def engine_settled(self, op: int, tx: int, rx: int) -> list[Effect]:
        """The engine has let go of an op."""
        collective = self._collectives.get(op)
        if collective is not None:
            collective.settled = True
            collective.tx_bytes, collective.rx_bytes = tx, rx
            self._conclude(collective)
        else:
            self._transfer_settled(op, tx, rx)
        return self._take()

    # ---- collectives ----

    def _begin(self, started: m.Started) -> Collective | None:
        """The collective that starts, if it is one of ours."""
        self._last_seq = started.seq
        collective = self._collectives.get(started.call)
        if collective is not None:
            collective.seq = started.seq
            collective.members = tuple(info.peer for info in self.plan.peers)
        return collective

    def _started(self, started: m.Started) -> None:
        collective = self._begin(started)
        if collective is None:
            return
        call, seq = started.call, started.seq
        self._by_seq[seq] = collective
        if not collective.move(Event.STARTED):
            why = collective.broken[:1000] if collective.parting is None else GONE
            self._say(m.FinishVote(seq, False, why, collective.cause))
            return
        if collective.impatient:  # it started while the vote was being withdrawn
            self._give_up(collective, Event.STOPPED, GONE, m.Cause.TIMEOUT)
            self._release(call, self._withdrawn.get(call, GONE), PCCLTimeoutError)
            return
        self._renew_streams(started.epoch)
        parts = places(collective.work, self.plan.rings, self.number, self._streams)
        self._out.append(StartOp(call, seq, started.nonce, parts))

    def _reduced(self, started: m.Started) -> None:
        """A small collective has its result, final or to be voted on."""
        while self._small and self._small[0].seq <= started.stable:
            self._small.popleft()
        collective = self._begin(started)
        if collective is None or started.data is None:
            return
        if started.final:
            self._keep(
                collective, m.Small(started.seq, collective.tag, collective.members, started.data)
            )
            return
        self._by_seq[started.seq] = collective
        if not collective.move(Event.RESULT):
            self._say(m.FinishVote(started.seq, False, GONE))
            return
        collective.data = started.data
        collective.whole = True
        self._say(m.FinishVote(started.seq, True))

    def _missed(self, small: m.Small) -> None:
        for collective in list(self._collectives.values()):
            same = collective.tag == small.tag and len(collective.data or b"") == len(small.data)
            if same and collective.unstarted and collective.data is not None:
                collective.seq = self._last_seq = small.seq
                collective.members = small.members
                self._keep(collective, small)

    def _keep(self, collective: Collective, small: m.Small) -> None:
        """It has committed: but others may have to hear of it from us."""
        self._small.append(small)
        collective.data, collective.outcome = small.data, True
        if collective.parting is None:
            self._store(collective)
        else:
            self._succeeded_without(collective.call, collective.title)
        self._conclude(collective)

    def _store(self, collective: Collective) -> None:
        assert collective.data is not None
        collective.tx_bytes = collective.rx_bytes = len(collective.data)
        self._out.append(Store(collective.call, collective.data))

    def _renew_streams(self, epoch: int) -> None:
        if self._streams_epoch == epoch:
            return
        for stream in self._streams:
            self._out.append(CloseStream(stream))
        infos = {info.peer: info for info in self.plan.peers}
        to = successors(self.plan.rings, self.number)
        self._streams, self._streams_epoch = tuple(self._open(infos[n]) for n in to), epoch

    def _give_up(self, one: Collective, event: Event, why: str, cause: m.Cause = OTHER) -> None:
        if one.move(event):
            one.cause = cause
            if not one.settled:
                self._out.append(AbortOp(one.call))
            self._say(m.FinishVote(one.seq, False, why[:1000], cause))

    def _finished(self, finished: m.Finished) -> None:
        collective = self._by_seq.pop(finished.seq, None)
        if collective is None:
            return
        self._outcomes.append((finished.seq, finished.ok))
        if finished.ok:
            collective.outcome = True
            if collective.parting is not None:
                self._succeeded_without(collective.call, collective.title)
            elif not collective.settled:
                self._out.append(CommitOp(collective.call))
            elif collective.data is not None:
                self._store(collective)
        else:
            self._abort(collective, failed(collective, finished))
        self._conclude(collective)

    def _abort(self, collective: Collective, outcome: Fail) -> None:
        collective.outcome = outcome
        if collective.move(Event.FAILED) and not collective.settled:
            self._out.append(AbortOp(collective.call))

    def _conclude(self, collective: Collective) -> None:
        """Answers the call once outcome and settlement are both there."""
        if collective.parting is not None and collective.settled and not collective.told:
            collective.told = True
            self._out.append(collective.parting)
        if collective.outcome is None or not collective.settled:
            return
        del self._collectives[collective.call]
        self._withdrawn.pop(collective.call, None)
        if collective.told:
            self._ghosts.lay(collective.call)
        elif isinstance(collective.outcome, Fail):
            self._out.append(collective.outcome)
        else:
            end = Reduced(len(collective.members), collective.tx_bytes, collective.rx_bytes)
            self._out.append(Answer(collective.call, end))

    # ---- the link to the master ----

    def link_lost(self, why: str) -> list[Effect]:
        """The connection to the master broke; another will be tried (`linked`, `lost_master`)."""
        self._linked = False
        for call, late in list(self._withdrawn.items()):
            self._release(call, f"{late}, while the master was away", PCCLTimeoutError)
        if self.number == 0 and self.over is None:  # not even registered: nothing to come back to
            self._end(Result.MASTER_CONNECTION_FAILED, why, MasterLostError)
        return self._take()

    def linked(self) -> list[Effect]:
        """There is a connection again: says all that the master may need to know."""
        if self.over is not None or self._hello is None:
            return self._take()
        hello = self._hello
        if not self.accepted:  # and so it knows nothing of the run
            self.plan, self.world = m.Plan(0, (), (), 0), m.World(0, 0, 0, 0)
            self._out.append(Send(hello))
            return self._take()
        own = next(info for info in self.plan.peers if info.peer == self.number)
        open_ = tuple(collective.open for _, collective in sorted(self._by_seq.items()))
        self._unvoted = {o.seq for o in open_ if o.vote is None}
        done = msgspec.structs.replace(
            self._done, topology=max(self._done.topology, self.plan.topology)
        )
        resume = m.Resume(
            hello.protocol,
            hello.version,
            hello.arithmetic,
            self.run,
            own,
            self.plan.peers,
            self.plan.epoch,
            self._last_seq,
            done,
            open_,
            tuple(self._outcomes),
            tuple(self._small),
            self.plan.rings,
            hello.dial,
        )
        self._out.append(Send(resume))
        return self._take()

    def _resumed(self, done: m.Done) -> None:
        """Answers the rounds whose result was missed, and votes anew in the others."""
        self._linked = True
        missed = self._done
        self._done = msgspec.structs.replace(
            missed,
            topology=done.topology,
            pending=done.pending,
            were_pending=done.were_pending,
        )
        if self._syncing is None or self._syncing.outcome is not None:
            self._missed_sync(done)
        for call, vote in list(self._calls.items()):
            if call in self._ghosts:
                continue
            if isinstance(vote, m.TopologyVote) and missed.topology < done.topology:
                self._reply(call, self.world.local_size)
            elif isinstance(vote, m.PendingVote) and missed.pending < done.pending:
                self._reply(call, done.were_pending)
            else:
                self._say(vote)
        if self._syncing is not None and self._syncing.outcome is None:
            self._resume_sync(self._syncing, missed, done)
        for collective in self._collectives.values():
            if collective.unstarted and collective.parting is None:
                self._say(collective.vote(self._last_seq))
        for seq, collective in self._by_seq.items():
            if seq in self._unvoted and collective.state is not State.RUNNING:
                self._say(m.FinishVote(seq, collective.state is State.COMPLETE))
        self._lay_ghosts(missed, done)

    # ---- simple calls, and the end ----

    def _simple(self, call: int, message: m.PeerMessage) -> list[Effect]:
        def enter() -> None:
            self._calls[call] = message
            self._say(message)

        if not self._dead(call) and not self._ghosts.keeps(call, type(message).__name__, enter):
            enter()
        return self._take()

    def _reply(self, call: int, value: object) -> None:
        if call in self._calls:
            self._over(call, Answer(call, value))

    def _over(self, call: int, end: Answer | Fail) -> None:
        """A simple call ends; if its caller has gone, nobody is told."""
        del self._calls[call]
        self._withdrawn.pop(call, None)
        if call in self._ghosts:
            self._ghosts.lay(call)
        else:
            self._out.append(end)

    def _refused(self, refusal: m.CallError) -> None:
        """A call failed before anything happened."""
        call, fail = refusal.call, refused(refusal)
        self._last_seq = max(self._last_seq, refusal.seq)  # or another master would tell us again
        if call in self._calls:
            self._over(call, fail)
        elif call in self._collectives:
            self._abort(self._collectives[call], fail)
            self._conclude(self._collectives[call])
        elif call in self._ghosts:
            self._ghosts.lay(call)
        elif self._syncing is not None and self._syncing.call == call:
            self._end_sync(self._syncing, replace(fail, phase=self._syncing.phase))

    def _dropped(self, result: Result, why: str) -> None:
        gone = result is Result.MASTER_CONNECTION_FAILED
        self._end(result, why, MasterLostError if gone else KickedError)

    def _end(self, result: Result, why: str, error: type[PCCLError] = PCCLError) -> None:
        """Out of the run, for whatever reason: nothing that waits can be answered any more."""
        self.over = over = Fail(0, result, why, error)
        self.world = m.World(0, 0, 0, 0)
        if self._joining is not None:
            self._out.append(replace(over, call=self._joining))
            self._joining = None
        waiting = self._calls.keys() - set(self._ghosts.calls)
        for call in sorted(waiting | set(self._ghosts.clear())):
            self._out.append(replace(over, call=call, phase=ENTERING))
        self._calls.clear()
        self._by_seq.clear()
        self._withdrawn.clear()
        for collective in list(self._collectives.values()):
            if collective.outcome is None:
                phase = collective.phase
                self._abort(collective, replace(over, call=collective.call, phase=phase))
                self._conclude(collective)
        if self._syncing is not None:
            syncing = self._syncing
            self._end_sync(syncing, replace(over, call=syncing.call, phase=syncing.phase))
        for stream in self._streams:
            self._out.append(CloseStream(stream))
        self._streams = ()
