"""The peer's state machine: its calls, its collectives, its streams. No I/O.

Theory of operation
-------------------

Three kinds of events come in: API calls (each with a number, `call`, that the caller never uses
twice), messages of the master, and events of the lane engine. Effects come out, to be
performed in order: messages to send, commands to the engine, and answers to calls.

When the connection to the master breaks (`disconnected`), the peer sends no messages, while the
engine continues. On the next connection, `Resume` tells the master everything that it may need (a
peer that was not accepted yet sends `Hello` again). When the master answers `Resumed`, the peer
votes again in all rounds in which calls still wait, because votes and answers in transit were lost
with the connection.

A caller may leave before its call ends (`cancel`, and `time_out` while the master is away). Then
the call ends when the engine is settled, and may remain as an abandoned call (state.py).

Parts
-----

`Peer` passes each event to the part that handles it: `Votes` for calls that are one round,
`Collectives`, and `Transfers`. These share the objects in `PeerContext` (state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.calls import (
    ENTERING,
    GONE,
    WHY_MAX,
    Collective,
    Collectives,
    State,
    Vote,
    Votes,
    abandoned,
    place,
    refused,
    timed_out,
)
from pccl.protocol.peer.effects import (
    Answer,
    Arrange,
    Effect,
    Expect,
    Fail,
    Fault,
    MembersChanged,
    Send,
    Waits,
)
from pccl.protocol.peer.state import NO_PLAN, NO_WORLD, Knowledge, PeerContext
from pccl.protocol.peer.transfers import Transfer, Transfers
from pccl.protocol.rounds import GRACE_MAX_S, Grace
from pccl.protocol.tuning import DEFAULTS, Settings
from pccl.types import Result

LOST = Result.RANK_CONNECTION_LOST


class Peer:
    """One peer of a run; `master` is the `host:port` of its master, for messages."""

    def __init__(self, master: str = "", settings: Settings = DEFAULTS) -> None:
        self._away = f"while the master{f' at {master}' if master else ''} was away"
        self.knowledge = Knowledge(settings=settings)  # what this peer knows of the run
        context = PeerContext(self.knowledge)
        self._outbox, self._streams = context.outbox, context.streams
        self._abandoned, self._withdrawals = context.abandoned, context.withdrawals
        self.votes = Votes(context)
        self.collectives = Collectives(context, self._succeeded_without)
        self.transfers = Transfers(context)
        self._hello: m.Hello | None = None
        self._joining: int | None = None
        self.over: Fail | None = None  # why it is no longer in the run; None while it is
        self._by_type: dict[type, Callable[[Any], None]] = {
            m.Started: self.collectives.start,
            m.Finished: self.collectives.finish,
            m.Interrupt: self.collectives.interrupt,
            m.Missed: lambda message: self.collectives.missed(message.small),
            m.Failed: lambda message: self._failed(message.failure),
            m.Welcome: self._welcomed,
            m.Admitted: self._admitted,
            m.Plan: self._planned,
            m.WorldSizes: self._counted,
            m.TopologyResult: self.votes.topology,
            m.PendingResult: self.votes.pending,
            m.Waiting: lambda message: self._outbox.do(Waits(message.call, message.why)),
            **dict.fromkeys(get_args(m.Rendezvous), lambda one: self._outbox.do(Arrange(one))),
            m.SyncPlan: self.transfers.planned,
            m.SyncResult: self.transfers.synced,
            m.Probe: self.transfers.probed,
            m.OptimizeResult: self.transfers.optimized,
            m.Resumed: self._resumed,
            m.CallError: self._refused,
            m.Kicked: self._dropped,
            m.Refused: self._dropped,
        }

    # ---- what is known ----

    @property
    def number(self) -> int:
        return self.knowledge.number

    @property
    def idle(self) -> bool:
        return not self.collectives.by_call and self.transfers.current is None

    @property
    def heard_if_free(self) -> int | None:
        """The `heard` of a vote for a small collective; None if the call cannot vote at once.

        If it can, the call would send only this vote.
        """
        free = self._outbox.known and self.over is None and not self._abandoned
        return self.knowledge.last_seq if free else None

    def awaits_withdrawal(self, call: int) -> bool:
        """True until the master confirms that it has taken back the vote of a call."""
        return call in self._abandoned and self._outbox.known

    # ---- calls ----

    def join(self, call: int, hello: m.Hello) -> list[Effect]:
        """Asks to join; answered when this peer is accepted."""

        def enter() -> None:
            self._joining, self._hello = call, hello
            self._outbox.send(hello)

        return self._enter(call, type(hello).__name__, enter)

    def update_topology(self, call: int) -> list[Effect]:
        """Answered with the size of the group when pending peers have been accepted."""
        return self._vote(call, m.TopologyVote(call))

    def finish(self, call: int) -> list[Effect]:
        """Answered with the size of the group when all peers of the run have finished."""
        return self._vote(call, m.TopologyVote(call, finish=True))

    def are_peers_pending(
        self, call: int, stuck: bool = False, patient: bool = False, grace: Grace | None = None
    ) -> list[Effect]:
        """Answered with a bool. `stuck`: until then this peer makes no other call.

        `patient`: while all voters are patient, the answer False is held back (see `hurry`).
        `grace`: members that have not voted at its end are dropped; None: this peer waits for all
        members.
        """
        vote = m.PendingVote(call, stuck, patient)
        if grace is not None:
            grace_ms = round(1000 * min(grace.seconds, GRACE_MAX_S))
            vote = m.PendingVote(call, stuck, patient, grace.enough, grace_ms)
        return self._vote(call, vote)

    def hurry(self, call: int) -> list[Effect]:
        self.votes.hurry(call)
        self._abandoned.follow(call, lambda: self.votes.hurry(call))
        return self._outbox.take()

    def inquire(self, call: int) -> list[Effect]:
        """Asks what a call waits for. The answer, if any, is a `Waits`."""
        one = self.collectives.by_call.get(call)
        if self.number:
            self._outbox.send(m.Inquire(call, 0 if one is None else one.seq))
        return self._outbox.take()

    def collective(self, one: Collective, sent: bool = False) -> list[Effect]:
        """Answered with a `Reduced`. `sent`: its vote was already sent (`heard_if_free`)."""
        enter = partial(self.collectives.enter, one, sent)
        return self._enter(one.call, place(one.tag, one.pair), enter)

    def sync(self, call: int, serve_op: int, manifest: m.Manifest) -> list[Effect]:
        """Answered with a `Synced`; zero or more `Follow` effects come before.

        `serve_op` is a fresh op number, which serves the offered content.
        """
        return self._transfer(Transfer(call, serve_op, m.SyncVote(call, manifest)))

    def optimize(self, call: int, serve_op: int) -> list[Effect]:
        """Answered with None; zero or more `Measure` effects come before.

        `serve_op` is a fresh op number, which serves the bytes that others fetch.
        """
        return self._transfer(Transfer(call, serve_op, m.OptimizeVote(call)))

    def fetch(self, op: int, seq: int) -> list[Effect]:
        """Starts fetching by a plan or probe; the caller knows the memory of `op`.

        Does nothing if a newer plan or probe, or the end, came in between.
        """
        self.transfers.fetch(op, seq)
        return self._outbox.take()

    def fetched(
        self, seq: int, ok: bool, why: str, differences: tuple[m.Difference, ...] = ()
    ) -> list[Effect]:
        self.transfers.fetched(seq, ok, why, differences)
        return self._outbox.take()

    def measured(self, seq: int, rate: int, delay_us: int) -> list[Effect]:
        self.transfers.measured(seq, rate, delay_us)
        return self._outbox.take()

    def _vote(self, call: int, vote: Vote) -> list[Effect]:
        return self._enter(call, type(vote).__name__, lambda: self.votes.enter(call, vote))

    def _transfer(self, one: Transfer) -> list[Effect]:
        place = type(one.vote).__name__
        return self._enter(one.call, place, lambda: self.transfers.enter(one))

    def _enter(self, call: int, place: int | str, enter: Callable[[], None]) -> list[Effect]:
        """A call enters when there is no abandoned call in its place."""
        if self.over is not None:  # before it joined, the connection may have failed
            self._outbox.do(replace(self.over, call=call))
        elif not self._abandoned.keeps(call, place, enter):
            enter()
        return self._outbox.take()

    # ---- callers that leave ----

    def time_out(self, call: int, why: str) -> list[Effect]:
        """The caller's time is up. The call is still answered, with its result or a failure.

        Only the master knows whether the call has already ended. The peer does not ask the master
        if its own vote makes the call fail, and cannot ask while the master is away.
        """
        one = self.collectives.by_call.get(call)
        if self.over is not None or call in self._abandoned:
            return self._outbox.take()
        if one is not None and one.state is State.RUNNING:
            self.collectives.stop(one, why, m.Cause.TIMEOUT, timed_out(call, why))
        elif not self._outbox.known:
            self._release(timed_out(call, f"{why}, {self._away}"))
        elif self._abandoned.forget(call):
            self._outbox.do(timed_out(call, why))
        elif call in self.votes or one is not None or self.transfers.of(call):
            if one is not None:
                one.impatient = True
            self._withdrawals[call] = why
            self._send_withdraw(call, abandoned=False)
        return self._outbox.take()

    def cancel(self, call: int) -> list[Effect]:
        """The caller has left by an exception: answered when nothing refers to its memory."""
        one = self.collectives.by_call.get(call)
        if self.over is None and call not in self._abandoned:
            if one is not None and one.state is State.RUNNING:
                self.collectives.stop(one, GONE, m.Cause.OTHER, abandoned(call))
            else:
                self._send_withdraw(call, abandoned=True)
                self._release(abandoned(call))
        return self._outbox.take()

    def _release(self, fail: Fail) -> None:
        """Ends a call without its outcome; an abandoned call may remain."""
        call = fail.call
        collective, transfer = self.collectives.by_call.get(call), self.transfers.of(call)
        if call in self.votes:
            self.votes.release(call, fail)
        elif collective is not None:
            self.collectives.release(collective, fail)
        elif transfer is not None:
            self.transfers.release(transfer, fail)
        elif self._abandoned.forget(call):
            self._outbox.do(fail)

    def _send_withdraw(self, call: int, abandoned: bool) -> None:
        one = self.collectives.by_call.get(call)
        if call in self.votes or self.transfers.of(call):
            self._outbox.send(m.Withdraw(call, abandoned=abandoned))
        elif one is not None and one.outcome is None:
            self._outbox.send(m.Withdraw(call, one.seq, abandoned))

    def _succeeded_without(self, call: int, what: str) -> None:
        """A call has succeeded for the others after its caller had left."""
        if self._abandoned.late(call) and self.over is None:
            self._outbox.do(Send(m.Leave()))
            why = (
                f"its time ran out in {what} {self._away}, and the others have the "
                "result: this peer is out of step with them"
            )
            self._end(LOST, why, Fault.KICKED)

    def leave(self, why: str) -> list[Effect]:
        if self.over is None:
            self._outbox.do(Send(m.Leave()))
            self._end(Result.INVALID_USAGE, why)
        return self._outbox.take()

    # ---- the master ----

    def received(self, message: m.MasterMessage) -> list[Effect]:
        handler = self._by_type.get(type(message))
        if handler is not None and self.over is None:  # after the end, nothing counts
            handler(message)
        return self._outbox.take()

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.knowledge.number, self._outbox.known = welcome.peer, True

    def _admitted(self, admitted: m.Admitted) -> None:
        known = self.knowledge
        if not known.accepted:
            known.done = admitted.done
            known.saw(admitted.heard)
        known.run, known.accepted = admitted.run, True
        if self._joining is not None:
            self._outbox.do(Answer(self._joining, None))
            self._joining = None

    def _planned(self, plan: m.Plan) -> None:
        before, self.knowledge.plan = self.knowledge.plan, plan
        if before.peers and before.peers != plan.peers:
            self._compare(before, plan)
        keys = tuple(info.curve for info in plan.peers if info.curve)
        self._outbox.do(Expect(self.number, plan.nonce, keys))
        self._streams.keep({info.peer for info in plan.peers})

    def _compare(self, before: m.Plan, plan: m.Plan) -> None:
        """Logs which peers have joined the group, and which are gone."""
        was, now = ({info.peer: info for info in each.peers} for each in (before, plan))
        joined = tuple(str(info) for number, info in now.items() if number not in was)
        reasons = {one.peer: one for one in plan.gone}
        lost: list[str] = []
        left: list[str] = []
        for number in sorted(was.keys() - now.keys()):
            one = reasons.get(number) or m.Gone(number, "the run goes on without it", False)
            (left if one.left else lost).append(f"{was[number]}: {one.why}")
        if joined or lost or left:
            begun = self.knowledge.veteran
            self._outbox.do(MembersChanged(joined, tuple(lost), tuple(left), len(now), begun))

    def _counted(self, sizes: m.WorldSizes) -> None:
        self.knowledge.world = sizes.world

    def _refused(self, refusal: m.CallError) -> None:
        """A call failed before anything happened."""
        if refusal.seq:
            what = refusal.called, refusal.tag, refusal.pair
            why = refusal.result, refusal.why, refusal.cause
            self.knowledge.fails(m.Failure(refusal.seq, *what, *why))
        self._refuse(refused(refusal.call, refusal))

    def _failed(self, failure: m.Failure) -> None:
        """A call has failed for all that made it; for this peer too, if under an earlier master."""
        self.knowledge.fails(failure)
        if self._outbox.known:
            return
        transfer = self.transfers.open
        if failure.called == m.Called.COLLECTIVE:
            call = self.collectives.waiting(failure.tag, failure.pair)
        elif failure.called not in (m.Called.SYNC, m.Called.OPTIMIZE):
            call = self.votes.waiting(failure.called)
        elif transfer is not None and transfer.optimizes == (failure.called == m.Called.OPTIMIZE):
            call = transfer.call
        else:
            call = None
        if call is not None:
            self._refuse(refused(call, failure))

    def _refuse(self, fail: Fail) -> None:
        call = fail.call
        transfer = self.transfers.current
        if call in self.votes:
            self.votes.refuse(fail)
        elif self.collectives.by_call.get(call) is not None:
            self.collectives.refuse(fail)
        elif call in self._abandoned:
            self._abandoned.resolve(call)
        elif transfer is not None and transfer.call == call:
            self.transfers.end(transfer, replace(fail, phase=transfer.phase))

    def _dropped(self, message: m.Kicked | m.Refused) -> None:
        did = "dropped" if isinstance(message, m.Kicked) else "refused"
        result, why = Result(message.result), f"the master {did} this peer: {message.why}"
        gone = result is Result.MASTER_CONNECTION_FAILED
        fault = Fault.MASTER_LOST if gone else Fault.KICKED
        fault = Fault.FINISHED if message.cause == m.Cause.FINISHED else fault
        now = Fault.MISMATCH if message.cause == m.Cause.MISMATCH else fault
        self._end(result, why, fault, now)

    # ---- the engine ----

    def engine_complete(self, op: int, settled: bool, tx: int, rx: int) -> list[Effect]:
        """An op holds its whole result; the caller must verify the data of a fetch."""
        one = self.collectives.by_call.get(op)
        if one is not None:
            self.collectives.complete(one, settled, tx, rx)
        else:
            self.transfers.complete(op, settled, rx)
        return self._outbox.take()

    @property
    def moves(self) -> bool:
        return len(self.collectives.started) > 0 or self.transfers.current is not None

    @property
    def moving(self) -> list[int]:
        """The ops whose progress may be reported to the master."""
        fetching = self.transfers.fetching
        return [*self.collectives.moving, *([fetching] if fetching else [])]

    def engine_progress(self, op: int, done: int) -> list[Effect]:
        one = self.collectives.by_call.get(op)
        if one is not None:
            self.collectives.progress(one, done)
        else:
            self.transfers.progress(op, done)
        return self._outbox.take()

    def engine_failed(
        self, op: int, why: str, starved: int = 0, cause: m.Cause = m.Cause.OTHER
    ) -> list[Effect]:
        """An op cannot complete.

        If `starved` is not 0, the op of a transfer can start again, and only lacks a stream to a
        holder or receiver. `starved` is the sequence number of the plan at that time.
        """
        one = self.collectives.by_call.get(op)
        why = f"it ran out of memory: {why}" if cause is m.Cause.MEMORY else why
        if one is not None:
            self.collectives.fail(one, why, cause)
        else:
            self.transfers.fail(op, why, starved)
        return self._outbox.take()

    def engine_settled(self, op: int, tx: int, rx: int) -> list[Effect]:
        one = self.collectives.by_call.get(op)
        if one is not None:
            self.collectives.settle(one, tx, rx)
        else:
            self.transfers.settle(op, tx, rx)
        return self._outbox.take()

    def stream_lost(self, stream: int, why: str, up: bool = True) -> list[Effect]:
        """A stream is lost. Ops that still need it fail (`engine_failed`).

        `up`: whether it was ever connected.
        """
        self.collectives.stream_lost(stream, why, up)
        return self._outbox.take()

    def unreached(self, info: m.PeerInfo, why: str, stream: int = 0) -> list[Effect]:
        """No stream to a peer could be opened. Ops that need it fail (`engine_failed`).

        The peer does not report it for a direct stream, or in a probe: there it is a result,
        because a ring may have other neighbors. `stream`: the lost stream; `stream_lost` follows.
        """
        transfer = self.transfers.current
        if self._streams.is_direct(stream):
            self._streams.unreached(info.peer)
        elif transfer is None or not transfer.optimizes:
            self._outbox.send(m.Unreached(info.peer, self.knowledge.plan.epoch, why[:WHY_MAX]))
        return self._outbox.take()

    def rendezvous(self, request: m.RendezvousRequest) -> list[Effect]:
        self._outbox.send(request)
        return self._outbox.take()

    # ---- the connection to the master ----

    def disconnected(self, why: str) -> list[Effect]:
        self._outbox.known = False
        for call, reason in list(self._withdrawals.items()):
            self._release(timed_out(call, f"{reason}, {self._away}"))
        if self.number == 0 and self.over is None:  # not even registered
            self._end(Result.MASTER_CONNECTION_FAILED, why, Fault.MASTER_LOST)
        return self._outbox.take()

    def reconnected(self) -> list[Effect]:
        """Tells the master, over a new connection, everything that it may need."""
        hello, known = self._hello, self.knowledge
        if self.over is not None or hello is None:
            return self._outbox.take()
        if not known.accepted:  # so it knows nothing of the run
            known.plan, known.world = NO_PLAN, NO_WORLD
            self._outbox.do(Send(hello))
            return self._outbox.take()
        open_, outcomes, small = self.collectives.report()
        topology = max(known.done.topology, known.plan.topology)
        resume = m.Resume(
            hello.protocol,
            hello.version,
            hello.arithmetic,
            known.run,
            known.info(self.number),
            known.plan.peers,
            known.plan.epoch,
            known.last_seq,
            replace(known.done, topology=topology),
            open_,
            outcomes,
            small,
            known.plan.rings,
            hello.dial,
            tuple(known.failures),
            known.veteran,
        )
        self._outbox.do(Send(resume))
        return self._outbox.take()

    def _resumed(self, resumed: m.Resumed) -> None:
        """Answers calls of rounds whose result was missed, and votes again in the others."""
        before, done = self.knowledge.done, resumed.done
        self._outbox.known = True
        self.knowledge.learn(
            topology=done.topology,
            pending=done.pending,
            were_pending=done.were_pending,
            finished=done.finished,
        )
        self.votes.resume(before, done)
        self.transfers.resume(before, done)
        self.collectives.resume()
        self._resolve_abandoned(before, done)

    def _resolve_abandoned(self, before: m.Done, done: m.Done) -> None:
        """Ends all abandoned calls: their votes were lost with the earlier master."""
        for call in self._abandoned.calls:
            one = self.collectives.by_call.get(call)
            if self.over is not None:
                return  # the call has succeeded for the others
            if one is not None and one.unstarted:
                self.collectives.void(one)
            elif one is None:
                what = self._abandoned.succeeded(call, before, done)
                self.votes.forget(call)
                if what:
                    self._succeeded_without(call, f"{what}()")
                self._abandoned.resolve(call)

    # ---- the end ----

    def lost_master(self, why: str) -> list[Effect]:
        if self.over is None:
            self._end(Result.MASTER_CONNECTION_FAILED, why, Fault.MASTER_LOST)
        return self._outbox.take()

    def broken(self, why: str) -> list[Effect]:
        if self.over is None:
            self._end(Result.INTERNAL_ERROR, why)
        return self._outbox.take()

    def _end(
        self, result: Result, why: str, fault: Fault = Fault.OTHER, now: Fault | None = None
    ) -> None:
        """Ends the membership: all calls fail; waiting calls fail with the fault `now`, if any."""
        self._outbox.known = False  # nothing is sent from now on
        why = m.personal(why, self.number)
        self.over = Fail(0, result, why, fault)
        over = replace(self.over, fault=now or fault)
        self.knowledge.world = NO_WORLD
        if self._joining is not None:
            self._outbox.do(replace(over, call=self._joining))
            self._joining = None
        waiting = {*self.votes.end(), *self._abandoned.clear()}
        for call in sorted(waiting):
            self._outbox.do(replace(over, call=call, phase=ENTERING))
        self._withdrawals.clear()
        self.collectives.end(over)
        transfer = self.transfers.current
        if transfer is not None:
            self.transfers.end(transfer, replace(over, call=transfer.call, phase=transfer.phase))
        self._streams.end()
