"""The engine's ops: what the state machine orders is given to the engine, and what the engine tells
is given back.

Only the control thread uses it, until that has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from pccl.protocol import messages as m
from pccl.protocol.messages import EXCHANGES, CollectiveKind
from pccl.protocol.peer import Peer, effects
from pccl.protocol.strategy import TRANSFER_BYTES, Algorithm, chunk_bytes
from pccl.runtime.client.call import Call, End, Leaf
from pccl.runtime.client.call_metrics import CallMetrics
from pccl.runtime.client.connection import MasterConnection
from pccl.runtime.client.engine import (
    COMPLETE,
    FAILED,
    LEAF,
    NO_MEMORY,
    PROGRESS,
    SETTLED,
    STARVED,
    STREAM_UP,
    WRITTEN,
    Engine,
    Event,
    Part,
)
from pccl.runtime.client.memory import Operands, Pool
from pccl.runtime.client.streams import Streams
from pccl.runtime.digest import LEAF_BYTES
from pccl.runtime.inline import store
from pccl.runtime.quantization import wire_format
from pccl.types import Result


def _parts(memory: Operands) -> list[Part]:
    if memory.wide is not None:
        memory.wide.is_used = True
        wide = memory.wide.parts
    else:
        wide = [None] * len(memory.each)
    # the engine writes to the root's alone what is reduced, but wants all to have an address
    unused = memory.work.what is CollectiveKind.REDUCE
    return [
        Part(
            each.send.address,
            each.recv.address or (each.send.address if unused else 0),
            each.count,
            each.send.dtype.value,
        )
        if copied is None
        else Part(*copied)
        for each, copied in zip(memory.each, wide, strict=True)
    ]


log = logging.getLogger("pccl")


class PendingCalls:
    """Calls by number, and memory by op.

    Args:
        figures: count the calls.

    Attributes:
        memory: op -> what the engine refers to, or is about to.
        closed: whether the control thread has ended; then calls are answered in their own threads.
    """

    def __init__(self, figures: CallMetrics) -> None:
        self._figures = figures
        self.memory: dict[int, Operands | Pool] = {}
        self.closed = False
        self._calls: dict[int, Call] = {}
        self._told: list[tuple[Call, End]] = []  # calls that have ended, and not heard of it yet

    def __contains__(self, number: int) -> bool:
        """Whether a call waits for its answer."""
        return number in self._calls

    def add(self, call: Call) -> None:
        """Adds a call."""
        self._calls[call.number] = call

    def welcomed(self, message: m.Welcome) -> None:
        """Tells all calls that the master has registered this peer."""
        for call in self._calls.values():
            call.put(message)

    def note(self, effect: effects.Follow | effects.Measure | effects.Fetched) -> None:
        """Tells a call something that is not its answer."""
        self._calls[effect.call].put(effect)

    def warn(self, peer: int, effect: effects.Waits) -> None:
        """Logs which peers a call waits for."""
        call = self._calls.get(effect.call)
        if call is not None:
            waited_s = time.monotonic() - call.began_s
            log.warning("peer %d has waited %.0f s %s", peer, waited_s, effect.why)

    def answer(self, effect: effects.Answer | effects.Fail) -> None:
        """Ends a call; `tell` then delivers the answer."""
        self.memory.pop(effect.call, None)  # no op of the engine needs it any more
        call = self._calls.pop(effect.call, None)
        if call is not None:
            self._figures.ended(effect, call.began_s)
        if call is not None and self.closed:  # made after the end, in the caller's own thread
            call.put(effect)
        elif call is not None:
            self._told.append((call, effect))

    def tell(self) -> None:
        """Delivers the answers; last, because waking callers contends for the global lock."""
        told, self._told = self._told, []
        for call, end in told:
            call.put(end)

    def fail_all(self, over: effects.Fail | None) -> None:
        """Fails every call that no one will answer any more, for the reason given."""
        ended = effects.Fail(0, Result.INTERNAL_ERROR, "the communicator has ended")
        for number in list(self._calls):
            self.answer(replace(over or ended, call=number))
        self.tell()


class Performer:
    """Performs effects, in their order.

    Args:
        peer: the state machine, which knows the run.
        engine: moves bulk data.
        streams: opens and closes the engine's streams.
        master: the connection to it.
        pending: the calls, and their memory.
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
        figures: CallMetrics,
    ) -> None:
        self.heard = self.told = True
        self._figures = figures
        self._peer, self._engine, self._streams = peer, engine, streams
        self._master, self._pending = master, pending
        self._perform_by_type: dict[type, Callable[..., None]] = {
            effects.Send: lambda effect: master.dealer.say(effect.message),
            effects.RegisterOp: self._register,
            effects.EagerOp: self._start_eagerly,
            effects.StartOp: self._start,
            effects.StartTransfer: self._start_transfer,
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
        """Registers an op, whose memory belongs to the engine until it is settled."""
        memory, engine = self._pending.memory[effect.op], self._engine
        ids = {"run": effect.run, "tag": effect.tag, "min_seq": effect.min_seq}
        if isinstance(memory, Pool):
            pieces, ids["first_counted"] = memory.pieces, memory.first_counted
            if memory.reader is None:
                engine.register_serve(effect.op, pieces=pieces, limit=memory.limit, **ids)
            else:
                engine.register_fetch(effect.op, pieces=pieces, leaf_bytes=LEAF_BYTES, **ids)
        elif memory.work.what in EXCHANGES:
            rows = memory.send_rows, memory.recv_rows
            members = max(map(len, rows))
            parts = _parts(memory)
            engine.register_exchange(effect.op, members=members, parts=parts, rows=rows, **ids)
        else:
            engine.register_collective(
                effect.op,
                what=memory.work.what,
                redop=memory.work.redop,
                members=memory.work.members,
                parts=_parts(memory),
                format=wire_format(memory.work),
                rows=memory.work.rows,
                window=memory.progressive.step if memory.progressive is not None else 0,
                **ids,
            )

    def _start_eagerly(self, effect: effects.EagerOp) -> None:
        self._engine.start_eagerly(
            effect.op,
            chunk_bytes=effect.strategy.chunk_bytes,
            rings=effect.rings,
            oneshot=effect.strategy.algorithm is Algorithm.ONE_SHOT,
        )

    def _start(self, effect: effects.StartOp) -> None:
        self._engine.start(
            effect.op,
            seq=effect.seq,
            nonce=effect.nonce,
            chunk_bytes=effect.strategy.chunk_bytes,
            rings=effect.rings,
            oneshot=effect.strategy.algorithm is Algorithm.ONE_SHOT,
            calls=effect.calls,
        )
        self._figures.started(effect.op, effect.strategy.spec.what)

    def _start_transfer(self, effect: effects.StartTransfer) -> None:
        local = self._peer.knowledge.conditions.local
        self._engine.start_transfer(
            effect.op,
            seq=effect.seq,
            nonce=effect.nonce,
            chunk_bytes=chunk_bytes(TRANSFER_BYTES, 1, local, False),
            ends=effect.ends,
        )

    def _open_stream(self, effect: effects.OpenStream) -> None:
        self._figures.opened()
        self._streams.open(effect.stream, effect.to, self._peer.plan.nonce)

    def _store(self, effect: effects.Store) -> None:
        memory = self._pending.memory[effect.call]
        assert isinstance(memory, Operands)
        self._figures.stored(effect.call, memory.work.what)
        for operand in memory.each:
            store(operand.recv, effect.data)


class EngineEvents:
    """Reads the engine's events.

    Args:
        engine: sends them.
        peer: the state machine, which handles them.
        streams: knows to which peer a lost stream led.
        pending: the memory that the engine releases, and the calls that receive leaves.
        perform: performs the effects.
        figures: count the collectives.
    """

    def __init__(
        self,
        engine: Engine,
        peer: Peer,
        streams: Streams,
        pending: PendingCalls,
        perform: Callable[[list[effects.Effect]], None],
        figures: CallMetrics,
    ) -> None:
        self._figures = figures
        self._engine, self._peer, self._streams = engine, peer, streams
        self._pending, self._perform = pending, perform

    def read(self) -> None:
        """Reads all events that have arrived.

        Raises:
            RuntimeError: the engine has stopped; the text says why.
            Refused: this process gets no sockets for its streams.
        """
        for event in self._engine.events():
            if event.kind == COMPLETE:
                self._figures.held(event.op)
                todo = self._peer.engine_complete(
                    event.op, event.settled, event.tx_bytes, event.rx_bytes
                )
            elif event.kind == FAILED:
                starved = event.seq if event.status == STARVED else 0
                cause = m.Cause.MEMORY if event.status == NO_MEMORY else m.Cause.OTHER
                why = self._streams.why(event)
                todo = self._peer.engine_failed(event.op, why, starved, cause)
            elif event.kind == PROGRESS:
                todo = self._peer.engine_progress(event.op, event.done)
            elif event.kind == LEAF:
                self._leaf(Leaf(event.op, event.piece, event.leaf))
                continue
            elif event.kind == WRITTEN:
                self._written(event)
                continue
            elif event.kind == SETTLED:
                todo = self._peer.engine_settled(event.op, event.tx_bytes, event.rx_bytes)
            elif event.kind == STREAM_UP:
                self._streams.up(event.stream)
                continue
            else:
                self._stream_lost(event)
                continue
            if event.settled or event.kind == SETTLED:
                self._pending.memory.pop(event.op, None)
            self._perform(todo)

        if self._engine.broken and not self._pending.closed:
            raise RuntimeError(self._engine.broken)

    def _stream_lost(self, event: Event) -> None:
        to, unreached = self._streams.lost(event)
        text = self._streams.text(event)
        log.info("peer %d: its connection to %s: %s", self._peer.number, to, text)
        if to is None:
            return
        if unreached:
            self._perform(self._peer.unreached(to, text))
        why = f"its connection to {to}: {text}"
        self._perform(self._peer.stream_lost(event.stream, why))

    def _written(self, event: Event) -> None:
        memory = self._pending.memory.get(event.op)
        if isinstance(memory, Operands) and memory.progressive is not None:
            memory.progressive.written(event.done)

    def _leaf(self, leaf: Leaf) -> None:
        memory = self._pending.memory.get(leaf.op)
        if isinstance(memory, Pool) and memory.reader is not None:
            memory.reader.put(leaf)
