"""Performs the effects of the peer's state machine: messages, orders to the engine, answers."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.runtime.client import ops
from pccl.runtime.client.connection import MasterConnection
from pccl.runtime.client.engine import Engine
from pccl.runtime.client.memory import Operands
from pccl.runtime.client.pending import PendingCalls
from pccl.runtime.client.streams import Streams
from pccl.runtime.inline import store

SILENT = (  # effects that touch no socket
    effects.Store,
    effects.Answer,
    effects.Fail,
    effects.Follow,
    effects.Measure,
    effects.Fetched,
)


class Performer:
    """Performs effects, in their order.

    Args:
        peer: the state machine, which knows the run.
        engine: moves bulk data.
        streams: opens and closes the engine's streams.
        master: the connection to it.
        pending: the calls, and their memory.
        local: whether a peer is on this machine.

    Attributes:
        sent: whether a socket was, or is to be, used since the last `flush`. If so, messages may
            have arrived meanwhile.
    """

    def __init__(
        self,
        peer: Peer,
        engine: Engine,
        streams: Streams,
        master: MasterConnection,
        pending: PendingCalls,
        local: Callable[[m.PeerInfo], bool],
    ) -> None:
        self.sent = True
        self._peer, self._engine, self._streams = peer, engine, streams
        self._master, self._pending, self._local = master, pending, local
        self._perform_by_type: dict[type, Callable[..., None]] = {
            effects.Send: lambda effect: master.dealer.say(effect.message),
            effects.RegisterOp: self._register,
            effects.StartOp: self._start,
            effects.StartTransfer: self._start,
            effects.CommitOp: lambda effect: engine.commit(effect.op),
            effects.AbortOp: lambda effect: engine.abort(effect.op),
            effects.Store: self._store,
            effects.OpenStream: self._open_stream,
            effects.CloseStream: lambda effect: streams.close(effect.stream),
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
            kind = type(effect)
            self.sent |= kind not in SILENT
            self._perform_by_type[kind](effect)

    def flush(self) -> bool:
        """Sends all orders and then all messages, which may depend on these. Whether a socket was
        used since the last time."""
        used = self._engine.flush() | self._master.dealer.flush() | self.sent
        self.sent = False
        return used

    def _register(self, effect: effects.RegisterOp) -> None:
        ops.register(self._engine, effect, self._pending.memory[effect.op])

    def _start(self, effect: effects.StartOp | effects.StartTransfer) -> None:
        local = all(self._local(info) for info in self._peer.plan.peers)
        ops.start(self._engine, effect, self._pending.memory[effect.op], local)

    def _open_stream(self, effect: effects.OpenStream) -> None:
        self._streams.open(effect.stream, effect.to, self._peer.plan.nonce)

    def _store(self, effect: effects.Store) -> None:
        memory = self._pending.memory[effect.call]
        assert isinstance(memory, Operands)
        for operand in memory.each:
            store(operand.recv, effect.data)
