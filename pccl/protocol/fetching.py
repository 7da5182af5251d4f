"""A peer's part in a synchronisation of the shared state: it serves, fetches, and lets go."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.calls import Syncing
from pccl.protocol.orders import (
    AbortOp,
    Action,
    Answer,
    CloseStream,
    CommitOp,
    Fail,
    Fetched,
    Plan,
    RingPart,
    StartOp,
    Synced,
)


class Fetching(ABC):
    """The synchronisation in which a peer stands, from its plan to its end."""

    def __init__(self) -> None:
        self.number = 0
        self.plan = m.Plan(0, (), (), 0)
        self._done = m.Done()
        self._syncing: Syncing | None = None
        self._last_seq = 0
        self._out: list[Action] = []

    @abstractmethod
    def _open(self, info: m.PeerInfo) -> int:
        """Opens a stream to a peer; its number."""

    def _slot(self, syncing: Syncing, receiver: int) -> int:
        """A receiver's number at its holders: its place in the group, the same on both sides."""
        assert syncing.group is not None
        return [info.peer for info in syncing.group.peers].index(receiver)

    def _start_transfer(
        self, syncing: Syncing, op: int, seq: int, ends: list[tuple[int, int]]
    ) -> None:
        """Starts a serve or fetch op on streams to (peer, slot)s."""
        assert syncing.group is not None
        rings = tuple(
            RingPart(self._sync_stream(syncing, peer), 2, slot, 0, 0) for peer, slot in ends
        )
        self._out.append(StartOp(op, seq, syncing.group.epoch, rings))

    def _report_fetch(self, syncing: Syncing, ok: bool, why: str) -> None:
        assert syncing.plan is not None
        self._out.append(Fetched(syncing.call, syncing.plan.seq, ok, why))

    def _planned(self, plan: m.SyncPlan) -> None:
        syncing = self._syncing
        if syncing is None or syncing.call != plan.call:
            return
        self._void_fetch(syncing)
        for stream in syncing.streams.values():
            self._out.append(CloseStream(stream))
        syncing.streams.clear()
        syncing.plan, syncing.group = plan, self.plan
        if plan.serve:
            ends = [(receiver, self._slot(syncing, receiver)) for receiver in plan.serve]
            self._start_transfer(syncing, syncing.serve_op, plan.seq, ends)
        self._last_seq = max(self._last_seq, plan.seq)
        self._out.append(Plan(syncing.call, plan))  # also when there is nothing to fetch any more

    def _sync_stream(self, syncing: Syncing, peer: int) -> int:
        if peer not in syncing.streams:
            assert syncing.group is not None
            info = next(info for info in syncing.group.peers if info.peer == peer)
            syncing.streams[peer] = self._open(info)
        return syncing.streams[peer]

    def _void_fetch(self, syncing: Syncing) -> None:
        if syncing.fetch_op:
            self._let_go(syncing, syncing.fetch_op, AbortOp)
            syncing.fetch_op = 0

    def _let_go(self, syncing: Syncing, op: int, order: type[AbortOp] | type[CommitOp]) -> None:
        """Ends an op of a transfer, once."""
        if op in syncing.ops and op not in syncing.ending:
            syncing.ending.add(op)
            self._out.append(order(op))

    def _synced(self, result: m.SyncResult) -> None:
        self._done = msgspec.structs.replace(
            self._done, sync=result.round, revision=result.revision, plan=result.plan, holds=True
        )
        if self._syncing is not None and self._syncing.call == result.call:
            self._end_sync(self._syncing, result)

    def _end_sync(self, syncing: Syncing, outcome: m.SyncResult | Fail) -> None:
        """The outcome is known: let go of everything, then answer."""
        if syncing.outcome is not None:
            return
        syncing.outcome = outcome
        for op in sorted(syncing.ops):
            self._let_go(syncing, op, AbortOp if isinstance(outcome, Fail) else CommitOp)
        for stream in syncing.streams.values():
            self._out.append(CloseStream(stream))
        self._conclude_sync(syncing)

    def _op_settled(self, syncing: Syncing, op: int) -> None:
        syncing.ops.discard(op)
        self._conclude_sync(syncing)

    def _conclude_sync(self, syncing: Syncing) -> None:
        if syncing.outcome is None or syncing.ops:
            return
        self._syncing = None
        if isinstance(syncing.outcome, m.SyncResult):
            synced = Synced(syncing.outcome.revision, syncing.tx_bytes, syncing.rx_bytes)
            self._out.append(Answer(syncing.call, synced))
        else:
            self._out.append(syncing.outcome)
