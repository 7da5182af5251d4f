"""Transfers beside collectives: shared state, and the measurement of links.

Synchronizations transfer the shared state; optimizations transfer random bytes to measure links. A
peer takes part in one of them at a time.

A peer serves its content from its vote on, and fetches the content that the current plan requires.
A plan says which peers fetch which entries from which holders. The master may replace a plan, for
example when a holder has died or another receiver has failed. If the new plan requires the same
content, the fetch continues with the new holders; otherwise the fetch is void. If a fetch in place
may have overwritten entries, neither this peer nor the master offers them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.calls import ENTERING, WHY_MAX
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    CommitOp,
    End,
    Fail,
    Fault,
    Fetched,
    Follow,
    Measure,
    RegisterOp,
    StartTransfer,
    Synced,
)
from pccl.protocol.peer.state import PeerContext, PeerPart
from pccl.protocol.tuning import transfer_chunk
from pccl.types import Result, SharedStateSyncStrategy

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value

# The entries that a plan requires, and their digests.
Content = tuple[tuple[int, ...], tuple[bytes, ...]]


@dataclass(slots=True)
class Transfer:
    """This peer's transfer: its ops, its streams, the current plan."""

    call: int
    serve_op: int
    vote: m.SyncVote | m.OptimizeVote
    seq: int = 0  # the current plan's number; 0: there is none
    nonce: int = 0
    planned: bool = False
    holders: tuple[int, ...] = ()  # the peers from which it fetches under the plan
    content: Content | None = None  # what to fetch; None: content does not matter
    serves: bool = False  # whether this peer serves any other one under the plan
    group: m.Plan | None = None  # the group when the plan was made: slots are places in it
    broken: str = ""  # why serving is impossible; empty if it is possible
    fetch_op: int = 0
    fetched: bool = False  # whether everything in the plan has been fetched
    overwritten: set[int] = field(default_factory=set)  # entries, by fetches in place
    streams: dict[int, int] = field(default_factory=dict)  # peer -> stream
    ops: set[int] = field(default_factory=set)  # not settled yet
    ending: set[int] = field(default_factory=set)  # ops that were told to commit or abort
    outcome: m.SyncResult | m.OptimizeResult | Fail | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0

    @property
    def optimizes(self) -> bool:
        return isinstance(self.vote, m.OptimizeVote)

    @property
    def phase(self) -> str:
        if self.optimizes:
            measuring = "while links were measured"
            return measuring if self.planned else f"{ENTERING}, or others measured links"
        if not self.planned:
            return ENTERING
        if self.content is not None and self.content[0] and not self.fetched:
            return "while this peer fetched the content that it lacks"
        return "while peers fetched the content that they lack"


class Transfers(PeerPart):
    """The transfer in which this peer takes part, if any."""

    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
        self.current: Transfer | None = None  # until the engine has settled it

    @property
    def open(self) -> Transfer | None:
        """The transfer, until its end is known."""
        one = self.current
        return one if one is not None and one.outcome is None else None

    def of(self, call: int) -> Transfer | None:
        one = self.open
        return one if one is not None and one.call == call else None

    def _by(self, seq: int) -> Transfer | None:
        """The transfer, if `seq` is the number of its current plan."""
        one = self.open
        return one if one is not None and one.planned and one.seq == seq else None

    def enter(self, transfer: Transfer) -> None:
        self.current = transfer
        transfer.ops.add(transfer.serve_op)
        run, heard = self._knowledge.run, self._knowledge.last_seq
        self._outbox.do(RegisterOp(transfer.serve_op, run, 0, heard))
        if isinstance(transfer.vote, m.SyncVote):  # an abandoned call may have decided it by now
            holds = self._knowledge.done.holds
            transfer.vote = replace(transfer.vote, holds=holds)
            self._streams.renew()  # collectives usually follow: their streams connect meanwhile
        self._outbox.send(transfer.vote)

    @property
    def fetching(self) -> int:
        one = self.open
        return 0 if one is None or one.optimizes or one.fetched else one.fetch_op

    # ---- plans of shared state, and probes of links ----

    def planned(self, plan: m.SyncPlan) -> None:
        one = self.of(plan.call)
        if one is None:
            return
        if plan.in_place:
            one.overwritten.update(plan.fetch)
        content = plan.fetch, plan.digests
        resumed = bool(one.fetch_op) and one.planned and one.content == content
        if not resumed:
            self._void_fetch(one)
        self._plan(one, plan, content, plan.serve, plan.holders, resumed and not one.fetched)
        # Only now are its streams open. The caller is told even if there is nothing to fetch.
        self._outbox.do(Follow(one.call, plan, resumed))
        if resumed and one.fetched:
            self._report(one, True, "")

    def probed(self, probe: m.Probe) -> None:
        """The master asks for the rate from other peers, which measure at the same time."""
        one = self.of(probe.call)
        if one is not None:
            self._void_fetch(one)
            self._plan(one, probe, None, probe.peers, probe.peers, False)
            self._outbox.do(Measure(one.call, probe.seq, probe.peers))

    def _plan(
        self,
        one: Transfer,
        plan: m.SyncPlan | m.Probe,  # its number is 0 if it is void
        content: Content | None,
        serve: Sequence[int],  # the receivers to serve
        holders: tuple[int, ...],
        resumed: bool,  # whether the current fetch continues, from these holders
    ) -> None:
        """Replaces the plan."""
        earlier, one.streams = one.streams, {}
        one.seq, one.nonce, one.content, one.planned = plan.seq, plan.nonce, content, True
        one.serves, one.holders, one.group = bool(serve), holders, self._knowledge.plan
        if serve:
            ends = [(receiver, _slot(one, receiver)) for receiver in serve]
            self._start(one, one.serve_op, ends)
            if one.broken:
                self._send_stalled(one, one.broken)
        if resumed:
            self._fetch(one)
        self._streams.close(earlier.values())
        self._knowledge.saw(plan.seq)

    def fetch(self, op: int, seq: int) -> None:
        """The caller has memory for a plan; ignored if the plan is not the current one."""
        one = self._by(seq)
        if one is not None:
            one.fetch_op, one.fetched = op, False
            one.ops.add(op)
            self._outbox.do(RegisterOp(op, self._knowledge.run, 0, one.seq - 1))
            self._fetch(one)

    def fetched(self, seq: int, ok: bool, why: str, differences: m.Differences) -> None:
        if self._by(seq) is not None:
            self._outbox.send(m.FetchedVote(seq, ok, why[:WHY_MAX], differences))

    def measured(self, seq: int, rate: int, delay_us: int) -> None:
        one = self._by(seq)
        if one is not None:
            self._void_fetch(one)
            self._outbox.send(m.Measured(seq, rate, delay_us))

    def _void_fetch(self, one: Transfer) -> None:
        if one.fetch_op:
            self._end_op(one, one.fetch_op, AbortOp)
            one.fetch_op, one.fetched = 0, False

    def _report(self, one: Transfer, ok: bool, why: str) -> None:
        self._outbox.do(Fetched(one.call, one.seq, ok, why))

    def _fetch(self, one: Transfer) -> None:
        slot = _slot(one, self._knowledge.number)
        self._start(one, one.fetch_op, [(holder, slot) for holder in one.holders])

    def _start(self, one: Transfer, op: int, ends: list[tuple[int, int]]) -> None:
        """Starts a serve or fetch op on streams to (peer, slot)s."""
        streams = tuple(End(self._stream(one, peer), slot) for peer, slot in ends)
        chunk_bytes = transfer_chunk(self._knowledge.conditions.local)
        self._outbox.do(StartTransfer(op, one.seq, one.nonce, streams, chunk_bytes))

    def _stream(self, one: Transfer, peer: int) -> int:
        if peer not in one.streams:
            assert one.group is not None
            info = next(info for info in one.group.peers if info.peer == peer)
            one.streams[peer] = self._streams.open(info)
        return one.streams[peer]

    # ---- the engine ----

    def complete(self, op: int, settled: bool, rx: int) -> None:
        one = self.current
        if one is None or op != one.fetch_op:
            return
        one.fetched = True
        self._report(one, True, "")
        if settled:
            self.settle(op, 0, rx)

    def progress(self, op: int, done: int) -> None:
        one = self.open
        if one is not None and op and op == self.fetching and one.planned:
            self._outbox.send(m.Progress(one.seq, done))

    def fail(self, op: int, why: str, starved: int) -> None:
        """An op has failed; `starved`: the number of the plan, if the op only lacked streams."""
        one = self.current
        if one is not None and op == one.serve_op:
            self._serve_failed(one, why, starved)
        elif one is not None and op == one.fetch_op and one.planned:
            if starved and starved != one.seq:
                return  # the fetch has got other holders since
            if not starved:
                self._void_fetch(one)
            self._report(one, False, why)

    def settle(self, op: int, tx: int, rx: int) -> None:
        one = self.current
        if one is not None and op in one.ops:
            one.tx_bytes += tx
            one.rx_bytes += rx
            one.ops.discard(op)
            self._conclude(one)

    def _serve_failed(self, one: Transfer, why: str, starved: int) -> None:
        """Serving has failed: one receiver or all may wait forever."""
        if not starved:
            one.broken = why
        if one.serves and starved in (0, one.seq):
            self._send_stalled(one, why)

    def _send_stalled(self, one: Transfer, why: str) -> None:
        """Tells the master, except in an optimization, where no peer waits forever."""
        if one.outcome is None and one.group is not None and not one.optimizes:
            self._outbox.send(m.Stalled(one.group.epoch, one.seq, why[:WHY_MAX]))

    # ---- the end ----

    def synced(self, result: m.SyncResult) -> None:
        """All receivers hold the elected content, or nothing was synchronized."""
        one = self.current
        ours = one is not None and one.call == result.call
        without = self._without_us(one, result) if one is not None and ours else None
        self._knowledge.learn(
            sync=result.round,
            revision=result.revision,
            plan=result.plan,
            holds=without is None and result.call not in self._abandoned,
            short=result.short,
        )
        self._knowledge.veteran |= without is None
        self._abandoned.resolve(result.call)
        if one is not None and ours:
            self.end(one, without or result)

    def _without_us(self, one: Transfer, result: m.SyncResult) -> Fail | None:
        """Why this peer had no part in a synchronization that is over; None if it had.

        This follows only from the peer's manifest and the result. So a peer that learns the result
        from a restarted master draws the same conclusion as a peer that received it.
        """
        assert isinstance(one.vote, m.SyncVote)
        manifest = one.vote.manifest
        if result.short:
            why = (
                f"the shared state is to begin with {result.short} peers, and its group has "
                f"{len(self._knowledge.plan.peers)}"
            )
            return Fail(one.call, Result.TOO_FEW_PEERS, why, Fault.TOO_FEW_PEERS, one.phase)
        stood = manifest.strategy != RECEIVE_ONLY and not (manifest.torn or one.overwritten)
        if stood and manifest.revision > result.revision:
            why = (
                f"this peer offers revision {manifest.revision}, and the others of its group are "
                f"at {result.revision}, which they have synchronized without this peer: offer that "
                "one or a lower one to receive what they have, or start them from this peer's"
            )
            return Fail(one.call, Result.INVALID_ARGUMENT, why, phase=one.phase)
        return None

    def optimized(self, result: m.OptimizeResult) -> None:
        self._knowledge.learn(optimized=result.round)
        self._abandoned.resolve(result.call)
        one = self.current
        if one is not None and one.call == result.call:
            self.end(one, result)

    def release(self, one: Transfer, fail: Fail) -> None:
        self._withdrawals.pop(one.call, None)
        self._abandoned.add(one.call, type(one.vote).__name__, fail.fault is Fault.TIMEOUT)
        self.end(one, replace(fail, phase=one.phase))

    def end(self, one: Transfer, outcome: m.SyncResult | m.OptimizeResult | Fail) -> None:
        """The outcome is known: ends all ops, then answers."""
        if one.outcome is not None:
            return
        one.outcome = outcome
        for op in sorted(one.ops):
            self._end_op(one, op, CommitOp if isinstance(outcome, m.SyncResult) else AbortOp)
        self._streams.close(one.streams.values())
        self._conclude(one)

    def _end_op(self, one: Transfer, op: int, effect: type[AbortOp] | type[CommitOp]) -> None:
        if op in one.ops and op not in one.ending:
            one.ending.add(op)
            self._outbox.do(effect(op))

    def _conclude(self, one: Transfer) -> None:
        if one.outcome is None or one.ops:
            return
        self.current = None
        self._withdrawals.pop(one.call, None)
        if isinstance(one.outcome, m.SyncResult):
            result = one.outcome
            synced = Synced(result.revision, one.tx_bytes, one.rx_bytes, result.divergence)
            self._outbox.do(Answer(one.call, synced))
        elif isinstance(one.outcome, m.OptimizeResult):
            self._outbox.do(Answer(one.call, None))
        else:
            self._outbox.do(one.outcome)

    # ---- a restarted master ----

    def resume(self, before: m.Done, done: m.Done) -> None:
        """Continues with a restarted master, which knows `done`; this peer knew `before`."""
        one = self.open
        if one is None:  # others may have completed some while the master was away
            if before.sync != done.sync:
                self._knowledge.learn(
                    sync=done.sync, revision=done.revision, plan=done.plan, holds=False
                )
            self._knowledge.learn(optimized=done.optimized)
        elif isinstance(one.vote, m.SyncVote):
            self._resume_sync(one, one.vote, before, done)
        elif before.optimized < done.optimized:
            self.optimized(m.OptimizeResult(one.call, done.optimized))
        else:
            if one.planned:  # the next probes start over
                self.probed(m.Probe(one.call, 0, ()))
            self._outbox.send(one.vote)

    def _resume_sync(self, one: Transfer, vote: m.SyncVote, before: m.Done, done: m.Done) -> None:
        if before.sync == done.sync:
            if one.planned:  # the next election starts over, whatever the plan said
                self.planned(m.SyncPlan(one.call, 0, (), (), (), ()))
            manifest = vote.manifest.overwritten(one.overwritten)
            one.vote = m.SyncVote(vote.call, manifest, self._knowledge.done.holds)
            self._outbox.send(one.vote)
            return
        if one.planned and one.seq != done.plan:
            # The last plan was lost too. It required no fetch here, or this peer would have voted.
            self.planned(m.SyncPlan(one.call, done.plan, (), (), (), ()))
        self.synced(m.SyncResult(one.call, done.revision, done.sync, done.plan, short=done.short))


def _slot(one: Transfer, receiver: int) -> int:
    """A receiver's slot at its holders: its place in the group, the same on both sides."""
    assert one.group is not None
    return [info.peer for info in one.group.peers].index(receiver)
