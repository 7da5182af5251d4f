"""Passes the engine's events to the peer's state machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.runtime.client.call import Leaf
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
)
from pccl.runtime.client.figures import Figures
from pccl.runtime.client.memory import Operands, Pool
from pccl.runtime.client.pending import PendingCalls
from pccl.runtime.client.streams import Streams

log = logging.getLogger("pccl")


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
        figures: Figures,
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
        if isinstance(memory, Operands) and memory.gradual is not None:
            memory.gradual.written(event.done)

    def _leaf(self, leaf: Leaf) -> None:
        memory = self._pending.memory.get(leaf.op)
        if isinstance(memory, Pool) and memory.reader is not None:
            memory.reader.put(leaf)
