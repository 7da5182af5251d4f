"""A peer's part in a synchronisation of the shared state. No I/O.

What it offers is served from the vote on. A plan says what to fetch from whom; it can be replaced
by another one while it is carried out (a holder died, another receiver failed). A fetch whose
content is still what is wanted goes on with the new holders where it was; any other is void.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pccl.errors import PCCLError, TooFewPeersError
from pccl.protocol import messages as m
from pccl.protocol.peer.calls import Syncing
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    CloseStream,
    CommitOp,
    Effect,
    Fail,
    Fetched,
    OpenStream,
    Plan,
    RegisterOp,
    Send,
    StartOp,
    Synced,
)
from pccl.protocol.peer.ghosts import Ghosts
from pccl.protocol.ring import RingPart
from pccl.types import Result, SharedStateSyncStrategy

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value


class Transfers:
    """What a peer knows of the synchronisation it stands in, and does in it.

    Attributes:
        number: of the peer.
        over: why it is no longer in the run, if it is not.
        plan: who is there.
    """

    run: int

    def __init__(self) -> None:
        self.number = 0
        self.plan = m.Plan(0, (), (), 0)
        self._done = m.Done()
        self._syncing: Syncing | None = None
        self._withdrawn: dict[int, str] = {}  # calls whose time ran out, and why
        self._ghosts = Ghosts()
        self._last_seq = 0
        self.over: Fail | None = None
        self._linked = True  # to the master
        self._next_stream = 1
        self._out: list[Effect] = []

    def _say(self, message: m.PeerMessage) -> None:
        """Tells the master, unless it must be told who we are first: then Resume says it all."""
        if self._linked:
            self._out.append(Send(message))

    def _open(self, info: m.PeerInfo) -> int:
        stream = self._next_stream
        self._next_stream += 1
        self._out.append(OpenStream(stream, info))
        return stream

    def _dead(self, call: int) -> bool:
        """Whether this peer is out of the run; then the call is answered."""
        if self.over is not None:
            self._out.append(replace(self.over, call=call))
        return self.over is not None

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    @property
    def heard_if_free(self) -> int | None:
        """What a vote on a collective that brings its data says it has heard, None if it must wait.

        To vote is then all that such a call would do.
        """
        free = self._linked and self.over is None and not self._ghosts
        return self._last_seq if free else None

    # ---- calls ----

    def sync(self, call: int, serve_op: int, offer: m.Offer) -> list[Effect]:
        """Answered with a `Synced`; zero or more `Plan` actions come before.

        `serve_op` is a fresh op number under which the offered content is served.
        """
        return self._enter(Syncing(call, serve_op, m.SyncVote(call, offer), ops={serve_op}))

    def optimize(self, call: int, serve_op: int) -> list[Effect]:
        """Answered with None; zero or more `Plan` actions come before, each of a probe.

        A probe's plan names no digests, for its content does not matter. `serve_op` is a fresh op
        number under which as much is served as is to be fetched.
        """
        return self._enter(Syncing(call, serve_op, m.OptimizeVote(call), ops={serve_op}))

    def _enter(self, syncing: Syncing) -> list[Effect]:
        def enter() -> None:
            self._syncing = syncing
            self._out.append(RegisterOp(syncing.serve_op, self.run, 0, self._last_seq))
            self._say(syncing.vote)

        if not self._dead(syncing.call) and not self._ghosts.keeps(
            syncing.call, type(syncing.vote).__name__, enter
        ):
            enter()
        return self._take()

    def measured(self, seq: int, rate: int, delay_us: int) -> list[Effect]:
        """The caller has what a probe was for: nothing more is fetched."""
        syncing = self._syncing
        plan = None if syncing is None or syncing.outcome is not None else syncing.plan
        if syncing is not None and plan is not None and plan.seq == seq:
            self._void_fetch(syncing)
            self._say(m.Measured(seq, rate, delay_us))
        return self._take()

    def fetch(self, op: int, seq: int) -> list[Effect]:
        """Starts fetching by a plan; the caller knows the staging memory of `op`.

        Does nothing when a newer plan, or the end, came in between.
        """
        syncing = self._syncing
        plan = None if syncing is None or syncing.outcome is not None else syncing.plan
        if syncing is None or plan is None or plan.seq != seq:
            return self._take()
        syncing.fetch_op, syncing.fetched = op, False
        syncing.ops.add(op)
        self._out.append(RegisterOp(op, self.run, 0, seq - 1))
        self._start_fetch(syncing, plan)
        return self._take()

    def fetched(
        self, seq: int, ok: bool, why: str, differences: tuple[m.Difference, ...] = ()
    ) -> list[Effect]:
        """The caller has, or cannot get, what a plan told it to fetch."""
        syncing = self._syncing
        if syncing is not None and syncing.plan is not None and syncing.plan.seq == seq:
            self._say(m.FetchedVote(seq, ok, why[:1000], differences))
        return self._take()

    # ---- the engine ----

    def _transfer_complete(self, op: int, settled: bool, rx: int) -> None:
        syncing = self._syncing
        if syncing is None or op != syncing.fetch_op:
            return
        syncing.fetched = True
        self._report_fetch(syncing, True, "")
        if settled:
            self._transfer_settled(op, 0, rx)

    def _transfer_failed(self, op: int, why: str, starved: int) -> None:
        syncing = self._syncing
        if syncing is not None and op == syncing.serve_op:
            self._serve_failed(syncing, why, starved)
            return
        if syncing is None or op != syncing.fetch_op or syncing.plan is None:
            return
        if starved and starved != syncing.plan.seq:
            return  # it has other holders by now
        if not starved:
            self._void_fetch(syncing)
        self._report_fetch(syncing, False, why)

    def _serve_failed(self, syncing: Syncing, why: str, starved: int) -> None:
        """A receiver may wait for ever, or all of them. (Who measures links waits for nobody.)"""
        plan = syncing.plan
        if not starved:
            syncing.broken = why
        if plan is not None and plan.serve and starved in (0, plan.seq):
            self._say_stalled(syncing, plan, why)

    def _say_stalled(self, syncing: Syncing, plan: m.SyncPlan, why: str) -> None:
        if syncing.outcome is None and syncing.group is not None and not syncing.optimises:
            self._say(m.Stalled(syncing.group.epoch, plan.seq, why[:1000]))

    def _transfer_settled(self, op: int, tx: int, rx: int) -> None:
        syncing = self._syncing
        if syncing is not None and op in syncing.ops:
            syncing.tx_bytes += tx
            syncing.rx_bytes += rx
            syncing.ops.discard(op)
            self._conclude_sync(syncing)

    # ---- plans ----

    def _planned(self, plan: m.SyncPlan) -> None:
        syncing = self._syncing
        if syncing is None or syncing.call != plan.call or syncing.outcome is not None:
            return
        old = syncing.plan
        resumed = (
            bool(syncing.fetch_op)
            and not syncing.optimises  # each probe begins anew
            and old is not None
            and (old.fetch, old.digests) == (plan.fetch, plan.digests)
        )
        if not resumed:
            self._void_fetch(syncing)
        streams, syncing.streams = syncing.streams, {}
        syncing.plan, syncing.group = plan, self.plan
        if plan.serve:
            ends = [(receiver, self._slot(syncing, receiver)) for receiver in plan.serve]
            self._start_transfer(syncing, syncing.serve_op, plan, ends)
            if syncing.broken:
                self._say_stalled(syncing, plan, syncing.broken)
        if resumed and not syncing.fetched:
            self._start_fetch(syncing, plan)
        for stream in streams.values():
            self._out.append(CloseStream(stream))
        # when its streams are open; also when it has nothing to fetch
        self._out.append(Plan(syncing.call, plan, resumed))
        self._last_seq = max(self._last_seq, plan.seq)
        if resumed and syncing.fetched:
            self._report_fetch(syncing, True, "")

    def _slot(self, syncing: Syncing, receiver: int) -> int:
        """A receiver's number at its holders: its place in the group, the same on both sides."""
        assert syncing.group is not None
        return [info.peer for info in syncing.group.peers].index(receiver)

    def _start_fetch(self, syncing: Syncing, plan: m.SyncPlan) -> None:
        slot = self._slot(syncing, self.number)
        ends = [(holder, slot) for holder in plan.holders]
        self._start_transfer(syncing, syncing.fetch_op, plan, ends)

    def _start_transfer(
        self, syncing: Syncing, op: int, plan: m.SyncPlan, ends: list[tuple[int, int]]
    ) -> None:
        """Starts a serve or fetch op on streams to (peer, slot)s."""
        rings = tuple(
            RingPart(self._sync_stream(syncing, peer), 2, slot, 0, 0) for peer, slot in ends
        )
        self._out.append(StartOp(op, plan.seq, plan.nonce, rings))

    def _sync_stream(self, syncing: Syncing, peer: int) -> int:
        if peer not in syncing.streams:
            assert syncing.group is not None
            info = next(info for info in syncing.group.peers if info.peer == peer)
            syncing.streams[peer] = self._open(info)
        return syncing.streams[peer]

    def _report_fetch(self, syncing: Syncing, ok: bool, why: str) -> None:
        assert syncing.plan is not None
        self._out.append(Fetched(syncing.call, syncing.plan.seq, ok, why))

    def _void_fetch(self, syncing: Syncing) -> None:
        if syncing.fetch_op:
            self._let_go(syncing, syncing.fetch_op, AbortOp)
            syncing.fetch_op, syncing.fetched = 0, False

    def _let_go(self, syncing: Syncing, op: int, order: type[AbortOp] | type[CommitOp]) -> None:
        """Ends an op of a transfer, once."""
        if op in syncing.ops and op not in syncing.ending:
            syncing.ending.add(op)
            self._out.append(order(op))

    # ---- the end ----

    def _synced(self, result: m.SyncResult) -> None:
        syncing = self._syncing
        ours = syncing is not None and syncing.call == result.call
        without = self._without_us(syncing, result) if syncing is not None and ours else None
        self._done = msgspec.structs.replace(
            self._done,
            sync=result.round,
            revision=result.revision,
            plan=result.plan,
            holds=without is None and result.call not in self._ghosts,
            short=result.short,
        )
        self._ghosts.lay(result.call)
        if syncing is not None and ours:
            self._end_sync(syncing, without or result)

    def _without_us(self, syncing: Syncing, result: m.SyncResult) -> Fail | None:
        """Why a synchronisation that is over was none of this peer's, if so.

        Concluded from what was asked and what came of it: by this a peer that missed the result,
        and hears from a restarted master of it, takes it as if it had been told.
        """
        assert isinstance(syncing.vote, m.SyncVote)
        offer = syncing.vote.offer
        call, phase = syncing.call, syncing.phase
        if result.short:
            why = (
                f"the shared state is to begin with {result.short} peers, and its group has "
                f"{len(self.plan.peers)}"
            )
            return Fail(call, Result.TOO_FEW_PEERS, why, TooFewPeersError, phase)
        if offer.strategy != RECEIVE_ONLY and offer.revision > result.revision:
            why = (
                f"this peer offers revision {offer.revision}, and the others of its group are at "
                f"{result.revision}, which they have synchronised without this peer: offer that "
                "one or a lower one to receive what they have, or start them from this peer's"
            )
            return Fail(call, Result.INVALID_ARGUMENT, why, PCCLError, phase)
        return None

    def _optimized(self, result: m.OptimizeResult) -> None:
        self._done = msgspec.structs.replace(self._done, optimized=result.round)
        self._ghosts.lay(result.call)
        if self._syncing is not None and self._syncing.call == result.call:
            self._end_sync(self._syncing, result)

    def _end_sync(self, syncing: Syncing, outcome: m.SyncResult | m.OptimizeResult | Fail) -> None:
        """The outcome is known: let go of everything, then answer."""
        if syncing.outcome is not None:
            return
        syncing.outcome = outcome
        for op in sorted(syncing.ops):
            self._let_go(syncing, op, CommitOp if isinstance(outcome, m.SyncResult) else AbortOp)
        for stream in syncing.streams.values():
            self._out.append(CloseStream(stream))
        self._conclude_sync(syncing)

    def _conclude_sync(self, syncing: Syncing) -> None:
        if syncing.outcome is None or syncing.ops:
            return
        self._syncing = None
        self._withdrawn.pop(syncing.call, None)
        if isinstance(syncing.outcome, m.SyncResult):
            result = syncing.outcome
            synced = Synced(result.revision, syncing.tx_bytes, syncing.rx_bytes, result.divergence)
            self._out.append(Answer(syncing.call, synced))
        elif isinstance(syncing.outcome, m.OptimizeResult):
            self._out.append(Answer(syncing.call, None))
        else:
            self._out.append(syncing.outcome)

    def _in_sync(self, call: int) -> Syncing | None:
        """The synchronisation that this call waits for, if there is nothing known of its end."""
        syncing = self._syncing
        return syncing if syncing and syncing.call == call and syncing.outcome is None else None

    def _missed_sync(self, done: m.Done) -> None:
        """What others have agreed on since without us, if our caller has gone."""
        if self._done.sync != done.sync:
            self._done = msgspec.structs.replace(
                self._done, sync=done.sync, revision=done.revision, plan=done.plan, holds=False
            )
        self._done = msgspec.structs.replace(self._done, optimized=done.optimized)

    def _resume_sync(self, syncing: Syncing, before: m.Done, done: m.Done) -> None:
        """Goes on with a master that knows what is `done`; we know what was done `before`."""
        if syncing.optimises and before.optimized < done.optimized:
            self._optimized(m.OptimizeResult(syncing.call, done.optimized))
            return
        if syncing.optimises or before.sync == done.sync:
            if syncing.plan is not None:  # whatever it said, the next election begins anew
                self._planned(m.SyncPlan(syncing.call, 0, (), (), (), ()))
            self._say(syncing.vote)
            return
        if syncing.plan is not None and syncing.plan.seq != done.plan:
            # the last plan was lost too: it had nothing to fetch for us, or we would have voted
            self._planned(m.SyncPlan(syncing.call, done.plan, (), (), (), ()))
        result = m.SyncResult(syncing.call, done.revision, done.sync, done.plan, short=done.short)
        self._synced(result)
