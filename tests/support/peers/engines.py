"""Engines of one process, each with the events that it has sent, and an all-reduce of theirs."""

from __future__ import annotations

import time

import numpy as np

from pccl.ext import lib
from pccl.protocol.peer.effects import StartOp
from pccl.protocol.ring import RingPlace
from pccl.runtime.client.engine import (
    COMPLETE,
    SETTLED,
    STREAM_LOST,
    STREAM_UP,
    Engine,
    EngineOptions,
    Event,
    Part,
)
from peers.waiting import PATIENCE_S

F32, SUM = 10, 0  # a data type and an operation, as the engine numbers them
RUN, NONCE = 77, 3
ALIGNMENT: int = lib.PCCL_ALIGNMENT


class Peer:
    """An engine and the events it has sent so far."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = Engine(options, host="127.0.0.1")
        self.seen: list[Event] = []

    def wait(self, kind: int, number: int) -> Event:
        """The event of that kind for that op, or stream."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for event in self.seen:
                same = event.stream if kind in (STREAM_LOST, STREAM_UP) else event.op
                if event.kind == kind and same == number:
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no event {kind} for {number}, only {self.seen}"
            self.engine.socket.poll(int(left * 1000))
            self.seen += self.engine.events()

    def endpoint(self, transport: str) -> str:
        if transport == "ipc":
            return f"ipc://{self.engine.ipc}"
        return f"tcp://127.0.0.1:{self.engine.port}"


class AllReduce:
    """One all-reduce of whole numbers: the sum is exact in any order."""

    def __init__(self, peers: list[Peer], op: int, count: int, *, in_place: bool = False) -> None:
        rng = np.random.default_rng(op)
        self.peers, self.op, self.count = peers, op, count
        self.given = [rng.integers(-99, 99, count).astype(np.float32) for _ in peers]
        self.send = [given.copy() for given in self.given]
        self.recv = self.send if in_place else [np.full_like(given, -1) for given in self.given]
        self.expected = np.sum(self.given, axis=0)
        for peer, send, recv in zip(peers, self.send, self.recv, strict=True):
            peer.engine.register_collective(
                op,
                run=RUN,
                tag=op,
                min_seq=op - 1,
                what="all_reduce",
                redop=SUM,
                members=0,
                parts=[Part(send.ctypes.data, recv.ctypes.data, count, F32)],
            )

    def start(self, who: int, chunk_bytes: int = 1 << 18) -> None:
        ring = RingPlace(1, len(self.peers), who, 0, -(-self.count // ALIGNMENT) * ALIGNMENT)
        self.peers[who].engine.start(StartOp(self.op, self.op, NONCE, (ring,), chunk_bytes))

    def finish(self) -> None:
        """Waits for the result everywhere, commits, and checks it."""
        for peer in self.peers:
            if not peer.wait(COMPLETE, self.op).settled:
                peer.engine.commit(self.op)
                peer.wait(SETTLED, self.op)
        for recv in self.recv:
            np.testing.assert_array_equal(recv, self.expected)
