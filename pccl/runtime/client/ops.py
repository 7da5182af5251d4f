"""Carries out a state machine's effects on the engine, and feeds the engine's events back to it.

Only the control thread uses it, until that thread has ended.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.messages import EXCHANGES, CollectiveKind
from pccl.protocol.peer import Peer, effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, End, Leaf
from pccl.runtime.client.call_metrics import CallMetrics
from pccl.runtime.client.connection import Machine, MasterConnection
from pccl.runtime.client.engine import (
    COMPLETE,
    FAILED,
    LEAF,
    NO_MEMORY,
    PROGRESS,
    SETTLED,
    STARVED,
    STREAM_LOST,
    STREAM_UP,
    WRITTEN,
    Engine,
    Event,
    Ids,
    Part,
)
from pccl.runtime.client.memory import Operands, Pool
from pccl.runtime.client.streams import Streams
from pccl.runtime.digest import LEAF_BYTES
from pccl.runtime.quantization import wire_format
from pccl.types import Result


def _parts(memory: Operands) -> list[Part]:
    if memory.wide is not None:
        memory.wide.is_used = True
        wide = memory.wide.parts
    else:
        wide = [None] * len(memory.each)
    # The engine writes the result only on the root, but needs an address on every peer.
    unused = memory.work.what is CollectiveKind.REDUCE
    return [
        Part(
            each.send.address,
            each.recv.address or (each.send.address if unused else 0),
            each.count,
            each.send.dtype.value,
            0 if each.error is None else each.error.address,
        )
        if copied is None
        else Part(*copied)
        for each, copied in zip(memory.each, wide, strict=True)
    ]


log = logging.getLogger("pccl")


class PendingCalls:
    """Calls by number, and memory by op.

    Args:
        ended: called with the end of a call, and the time of its beginning.
        withdraws: whether the master is still asked to take back the vote of a call.
    """

    def __init__(
        self,
        ended: Callable[[End, float], None] = lambda end, began_s: None,
        withdraws: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._ended, self._withdraws = ended, withdraws
        # op -> the memory that the engine uses, or is about to use
        self.memory: dict[int, Operands | Pool] = {}
        # whether the control thread has ended; callers' threads then answer their own calls
        self.closed = False
        self._calls: dict[int, Call] = {}
        self._answered: list[tuple[Call, End]] = []  # not notified yet
        self._withdrawing: dict[int, threading.Event] = {}  # set when the vote is taken back

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, call: Call) -> None:
        self._calls[call.number] = call

    def welcomed(self, message: m.Welcome) -> None:
        """Tells all calls that the master has registered this peer."""
        for call in self._calls.values():
            call.put(message)

    def note(self, effect: effects.Follow | effects.Measure | effects.Fetched) -> None:
        """Gives a call a note that is not its answer."""
        self._calls[effect.call].put(effect)

    def warn(self, peer: int, effect: effects.Waits) -> None:
        """Logs which peers a call waits for."""
        call = self._calls.get(effect.call)
        if call is not None:
            waited_s = time.monotonic() - call.began_s
            why = f"{effect.why}; {call.aim}" if call.aim else effect.why
            log.warning("peer %d has waited %.0f s %s", peer, waited_s, why)

    def answer(self, effect: effects.Answer | effects.Fail) -> None:
        """Ends a call; `notify` then delivers the answer."""
        self.memory.pop(effect.call, None)  # no op of the engine needs it any more
        call = self._calls.pop(effect.call, None)
        if call is not None:
            self._ended(effect, call.began_s)
        if call is not None and self.closed:  # made after the end, in the caller's own thread
            call.put(effect)
        elif call is not None:
            self._answered.append((call, effect))

    def notify(self) -> None:
        """Delivers the answers. This comes last, because woken callers compete for the GIL."""
        answered, self._answered = self._answered, []
        for call, end in answered:
            call.put(end)
        if self._withdrawing:
            for number in [n for n in self._withdrawing if not self._withdraws(n)]:
                self._withdrawing.pop(number).set()

    def watch(self, number: int, withdrawn: threading.Event) -> None:
        """Sets the event when the master has taken back the vote of an abandoned call."""
        self._withdrawing[number] = withdrawn
        self.notify()

    def fail_all(self, over: effects.Fail | None) -> None:
        ended = effects.Fail(0, Result.INTERNAL_ERROR, "the communicator has ended")
        for number in list(self._calls):
            self.answer(replace(over or ended, call=number))
        self.notify()


class Driver:
    """Performs the effects of a state machine in their order, and reads the engine's events.

    Peers and clients of weights add their own entries to its two tables.

    Attributes:
        pending: the calls, and their memory.
        again: reads what may have arrived without a further signal.
        effects: the function that performs an effect, by the effect's type.
        events: the function that handles an event, by the event's kind; it returns effects.
    """

    def __init__(
        self,
        machine: Machine,  # the state machine
        engine: Engine,  # moves bulk data
        streams: Streams,  # opens and closes the engine's streams
        master: MasterConnection,  # the connection to it
        pending: PendingCalls,  # the calls, and their memory
    ) -> None:
        self.again: list[Callable[[], None]] = []
        self.pending = pending
        self._machine, self._engine, self._streams, self._master = machine, engine, streams, master
        self.effects: dict[type, Callable[[Any], object]] = {
            effects.Send: lambda effect: master.dealer.send(effect.message),
            effects.Expect: lambda one: engine.expect(one.number, one.nonce, one.keys),
            effects.CloseStream: lambda effect: streams.close(effect.stream),
            effects.Arrange: lambda effect: streams.arranged(effect.message),
            effects.RegisterOp: self._register,
            effects.CommitOp: lambda effect: engine.commit(effect.op),
            effects.AbortOp: lambda effect: engine.abort(effect.op),
            effects.Answer: pending.answer,
            effects.Fail: pending.answer,
        }
        self.events: dict[int, Callable[[Event], list[Any]]] = {
            FAILED: self._failed,
            SETTLED: lambda one: machine.engine_settled(one.op, one.tx_bytes, one.rx_bytes),
            LEAF: self._leaf,
            STREAM_UP: self._stream_up,
        }

    def perform(self, todo: list[Any]) -> None:
        for effect in todo:
            self.effects[type(effect)](effect)

    def flush(self) -> None:
        """Sends all commands, and then all messages, which may depend on the commands."""
        if self._engine.unsent and self._engine.flush():
            self.again.append(self.read)
        if self._master.dealer.unsent and self._master.dealer.flush():
            self.again.append(self._master.read)

    def read(self) -> None:
        """Reads all events of the engine that have arrived.

        Raises:
            RuntimeError: the engine has stopped; the text says why.
            Refused: this process gets no sockets for its streams.
        """
        for event in self._engine.events():
            todo = self.events[event.kind](event)
            if event.settled or event.kind == SETTLED:
                self.pending.memory.pop(event.op, None)
            self.perform(todo)
        if self._engine.broken and not self.pending.closed:
            raise RuntimeError(self._engine.broken)

    def _failed(self, event: Event) -> list[Any]:
        starved = event.seq if event.status == STARVED else 0
        cause = m.Cause.MEMORY if event.status == NO_MEMORY else m.Cause.OTHER
        return self._machine.engine_failed(event.op, self._streams.why(event), starved, cause)

    def _leaf(self, event: Event) -> list[Any]:
        memory = self.pending.memory.get(event.op)
        if isinstance(memory, Pool) and memory.reader is not None:
            memory.reader(Leaf(event.op, event.piece, event.leaf))
        return []

    def _stream_up(self, event: Event) -> list[Any]:
        self._streams.up(event.stream)
        return []

    def _register(self, effect: effects.RegisterOp) -> None:
        """Registers an op. Its memory belongs to the engine until the op is settled."""
        memory, engine = self.pending.memory[effect.op], self._engine
        ids: Ids = {"run": effect.run, "tag": effect.tag, "min_seq": effect.min_seq}
        if isinstance(memory, Pool):
            pieces, first, op = memory.pieces, memory.first_counted, effect.op
            if memory.reader is None:
                limit = memory.limit
                engine.register_serve(op, pieces=pieces, first_counted=first, limit=limit, **ids)
            else:
                engine.register_fetch(
                    op, pieces=pieces, first_counted=first, leaf_bytes=LEAF_BYTES, **ids
                )
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
                window=memory.step,
                **ids,
            )


class Progress:
    """Asks the engine for the progress of long ops, which the master shows.

    It checks from time to time, and asks about each op that runs at two checks in a row.
    """

    def __init__(self, engine: Engine, peer: Peer, now: Callable[[], float]) -> None:
        self._engine, self._peer, self._now = engine, peer, now
        self._before: set[int] = set()  # the ops that ran at the last check
        self.due_s = math.inf  # when to check next; inf: no op ran

    def started(self) -> None:
        """An op has started."""
        if self.due_s == math.inf:
            self._check()

    def tick(self) -> None:
        if self.due_s <= self._now():
            for op in self._before.intersection(self._peer.moving):
                self._engine.query(op)
            self._check()

    def _check(self) -> None:
        self._before = set(self._peer.moving)
        self.due_s = self._now() + limits.PROGRESS_LOOK_S if self._peer.moves else math.inf


class PeerDriver(Driver):
    """The driver of a peer."""

    def __init__(
        self,
        peer: Peer,
        engine: Engine,
        streams: Streams,
        master: MasterConnection,
        pending: PendingCalls,
        metrics: CallMetrics,
        now: Callable[[], float],  # the clock
    ) -> None:
        super().__init__(peer, engine, streams, master, pending)
        self._peer, self._metrics = peer, metrics
        self.progress = Progress(engine, peer, now)
        self.effects |= {
            effects.OpenStream: self._open_stream,
            effects.EagerOp: engine.start_eagerly,
            effects.StartOp: self._start,
            effects.StartTransfer: self._start_transfer,
            effects.Store: self._store,
            effects.Follow: pending.note,
            effects.Measure: pending.note,
            effects.Fetched: pending.note,
            effects.Waits: lambda effect: pending.warn(peer.number, effect),
            effects.Fail: self._fail,
            effects.MembersChanged: self._members_changed,
        }
        self.events |= {
            COMPLETE: self._complete,
            STREAM_LOST: self._stream_lost,
            PROGRESS: lambda event: peer.engine_progress(event.op, event.done),
            WRITTEN: self._written,
        }

    def _fail(self, effect: effects.Fail) -> None:
        why = m.personal(effect.why, self._peer.number)
        self.pending.answer(effect if why == effect.why else replace(effect, why=why))

    def _members_changed(self, change: effects.MembersChanged) -> None:
        number, now = self._peer.number, f"{change.size} in its group"
        for level, what, who in (
            (logging.INFO, "left", change.left),
            (logging.WARNING, "lost", change.lost),
            (logging.WARNING if change.begun else logging.INFO, "joined", change.joined),
        ):
            if who:
                more = f"; and {len(who) - m.GONE_MAX} more" if len(who) > m.GONE_MAX else ""
                names = "; ".join(who[: m.GONE_MAX]) + more
                log.log(level, "peer %d: %s: %s; %s now", number, what, names, now)

    def _complete(self, event: Event) -> list[Any]:
        self._metrics.held(event.op)
        return self._peer.engine_complete(event.op, event.settled, event.tx_bytes, event.rx_bytes)

    def _stream_lost(self, event: Event) -> list[Any]:
        to, unreached = self._streams.lost(event)
        text = self._streams.text(event)
        log.info("peer %d: its connection to %s: %s", self._peer.number, to, text)
        if to is None:
            return []
        todo = self._peer.unreached(to, text, event.stream) if unreached else []
        up = self._streams.was_up(event.stream)
        return todo + self._peer.stream_lost(event.stream, f"its connection to {to}: {text}", up)

    def _written(self, event: Event) -> list[Any]:
        memory = self.pending.memory.get(event.op)
        if isinstance(memory, Operands) and memory.written is not None:
            memory.written(event.done)
        return []

    def _open_stream(self, effect: effects.OpenStream) -> None:
        self._metrics.opened()
        self._streams.open(effect.stream, effect.to, effect.nonce, effect.shares)

    def _start(self, effect: effects.StartOp) -> None:
        self._engine.start(effect)
        memory = self.pending.memory[effect.op]
        assert isinstance(memory, Operands)
        self._metrics.started(effect.op, memory.work.what)
        self.progress.started()

    def _start_transfer(self, effect: effects.StartTransfer) -> None:
        self._engine.start_transfer(effect)
        self.progress.started()

    def _store(self, effect: effects.Store) -> None:
        memory = self.pending.memory[effect.call]
        assert isinstance(memory, Operands)
        self._metrics.stored(effect.call, memory.work.what)
        memory.store(effect.data)
