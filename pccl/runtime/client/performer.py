"""Performs the effects of the peer's state machine: messages, orders to the engine, answers."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.knowledge import NO_PLAN
from pccl.runtime.client import ops
from pccl.runtime.client.connection import MasterConnection
from pccl.runtime.client.engine import Engine
from pccl.runtime.client.figures import Figures
from pccl.runtime.client.memory import Operands
from pccl.runtime.client.pending import PendingCalls
from pccl.runtime.client.streams import Streams
from pccl.runtime.inline import store


class Performer:
    """Performs effects, in their order.

    Args:
        peer: the state machine, which knows the run.
        engine: moves bulk data.
        streams: opens and closes the engine's streams.
        master: the connection to it.
        pending: the calls, and their memory.
        local: whether a peer is on this machine.
        figures: count the collectives.

    Attributes:
        heard: whether messages of the master may wait, of which no notice will come.
        told: the same of the engine's events.
    """

    def __init__(
        self,
        peer: Peer,
        engine: Engine,
        streams: Streams,
        master: MasterConnection,
        pending: PendingCalls,
        local: Callable[[m.PeerInfo], bool],
        figures: Figures,
    ) -> None:
        self.heard = self.told = True
        self._figures = figures
        self._peer, self._engine, self._streams = peer, engine, streams
        self._master, self._pending, self._local = master, pending, local
        self._located, self._together = NO_PLAN, True
        self._perform_by_type: dict[type, Callable[..., None]] = {
            effects.Send: lambda effect: master.dealer.say(effect.message),
            effects.RegisterOp: self._register,
            effects.BeginOp: self._begin,
            effects.StartOp: self._start,
            effects.StartTransfer: self._start,
            effects.CommitOp: lambda effect: engine.commit(effect.op),
            effects.AbortOp: lambda effect: engine.abort(effect.op),
            effects.Store: self._store,
            effects.OpenStream: self._open_stream,
            effects.CloseStream: lambda effect: streams.close(effect.stream),
            effects.Arrange: lambda effect: streams.arranged(effect.message),
            effects.Answer: pending.answer,
            effects.Fail: pending.answer,
            effects.Follow: pending.note,
            effects.Measure: pending.note,
            effects.Fetched: pending.note,
            effects.Waits: lambda effect: pending.warn(peer.number, effect),
        }

    def perform(self, todo: list[effects.Effect]) -> None:
        """Performs effects in order."""
        for effect in todo:
            self._perform_by_type[type(effect)](effect)

    def flush(self) -> None:
        """Sends all orders, and then all messages, which may depend on these."""
        if self._engine.unsent:
            self.told |= self._engine.flush()
        if self._master.dealer.unsent:
            self.heard |= self._master.dealer.flush()

    def _register(self, effect: effects.RegisterOp) -> None:
        ops.register(self._engine, effect, self._pending.memory[effect.op])

    def _begin(self, effect: effects.BeginOp) -> None:
        ops.begin(self._engine, effect, self._pending.memory[effect.op], self._all_local())

    def _start(self, effect: effects.StartOp | effects.StartTransfer) -> None:
        memory = self._pending.memory[effect.op]
        ops.start(self._engine, effect, memory, self._all_local())
        if isinstance(memory, Operands):
            self._figures.started(effect.op, memory.work.what)

    def _all_local(self) -> bool:
        """Whether all members are on this machine."""
        if self._located is not self._peer.plan:  # once for all calls under this plan
            self._located = self._peer.plan
            self._together = all(map(self._local, self._located.peers))
        return self._together

    def _open_stream(self, effect: effects.OpenStream) -> None:
        self._figures.opened()
        self._streams.open(effect.stream, effect.to, self._peer.plan.nonce)

    def _store(self, effect: effects.Store) -> None:
        memory = self._pending.memory[effect.call]
        assert isinstance(memory, Operands)
        self._figures.stored(effect.call, memory.work.what)
        for operand in memory.each:
            store(operand.recv, effect.data)
