"""The data that peers of a simulated run send before their collectives start.

A model of c/engine/unexpected.c, as far as the protocol may rely on it: the receiver's engine holds
what is of the epoch that it knows, for the start that names its ring and call. What it needs and
has not got by then keeps the collective from completing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pccl.protocol.ring import RingPlace

if TYPE_CHECKING:
    from simulation.engine import Key, Op, SimEngine
    from simulation.run import SimulatedRun


@dataclass(frozen=True, eq=False)
class Chunk:
    """Data of one peer for another one, sent before its collective started."""

    sender: SimEngine
    stream: int
    to: SimEngine
    ring: int
    tag: tuple[int, int]  # run and tag
    call: int
    nonce: int
    epoch: int


class Eager:
    """All of it, in one run.

    Attributes:
        under_way: those that have not arrived; they do so in any order.
        calls: of each collective that has started, the members' calls, by their numbers.
        epochs: the epochs of these.
    """

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.under_way: list[Chunk] = []
        self.calls: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self.epochs: dict[Key, int] = {}
        self._needed: defaultdict[Key, set[Chunk]] = defaultdict(set)
        self._taken: defaultdict[Key, set[Chunk]] = defaultdict(set)
        self.sent = self.used = 0

    def begin(self, engine: SimEngine, op: Op, rings: Sequence[RingPlace]) -> None:
        """The engine sends, or finds no room or no credit."""
        assert op.seq is None and not op.ending and not op.sent, "begun at the wrong time"
        machine = engine.peer.machine
        streams = [engine.streams[place.stream] for place in rings]
        if self._run.random.random() < 0.2 or not all(stream.up for stream in streams):
            return
        for ring, stream in enumerate(streams):
            run, plan = machine.knowledge.run, machine.knowledge.plan
            to = self._run.bearer(stream.to, run)
            if to is not None and to.machine.knowledge.run == run:
                place = stream.number, to.engine, ring
                chunk = Chunk(engine, *place, op.tag, op.number, plan.nonce, plan.epoch)
                op.sent.append(chunk)
                self.under_way.append(chunk)
                self.sent += 1

    def start(self, engine: SimEngine, op: Op, calls: Sequence[int]) -> None:
        """The engine goes on where it has begun, if it is on the same streams, and takes what its
        stash has of the calls that the start names."""
        assert op.seq is not None
        op.calls, op.nonce = [*calls], engine.expects
        if op.sent and op.sent[0].stream == op.streams[0]:
            self._needed[op.seq] |= {*op.sent}
        else:
            void = {*op.sent} & self._taken[op.seq]
            assert not void, "what was sent on another epoch's streams counts"
        for chunk in [each for each in engine.unexpected if each.tag == op.tag]:
            if op.calls[chunk.ring : chunk.ring + 1] == [chunk.call]:
                engine.unexpected.remove(chunk)
                self._take(op, chunk)

    def arrive(self, engine: SimEngine, chunk: Chunk) -> None:
        """The receiver's engine takes it, holds it, or drops it."""
        self.under_way.remove(chunk)
        for op in engine.ops.values():
            running = op.seq is not None and not op.ending and op.tag == chunk.tag
            if running and op.nonce == chunk.nonce and op.calls[chunk.ring] == chunk.call:
                self._take(op, chunk)
                return
        if chunk.nonce == engine.expects:
            engine.unexpected.append(chunk)

    def _take(self, op: Op, chunk: Chunk) -> None:
        """Memory changes by a chunk: it must be of the call that the master has put together."""
        assert op.seq is not None
        self.used += 1
        sender, to = chunk.sender.peer, chunk.to.peer
        self._run.say(f"peer {to.name} takes what peer {sender.name} has sent early")
        calls, number = self.calls[op.seq], sender.machine.number
        assert calls.get(number) == chunk.call, f"{op.seq} takes a chunk of another call"
        assert chunk.epoch == self.epochs[op.seq], "a chunk of another epoch"
        self._taken[op.seq].add(chunk)

    def lacking(self, key: Key) -> bool:
        """Whether a collective still needs something of what was sent before it started."""
        return not self._needed[key] <= self._taken[key]

    def expect(self, engine: SimEngine, nonce: int) -> None:
        """A peer hears of an epoch: what it holds of another one is void."""
        if engine.expects != nonce:
            engine.expects = nonce
            engine.unexpected.clear()

    def lose(self, engine: SimEngine, stream: int = 0) -> None:
        """A stream, or all of a peer's, are gone, with some of what is under way there."""
        for chunk in list(self.under_way):
            if chunk.sender is engine and stream in (0, chunk.stream):
                if self._run.random.random() < 0.5:
                    self.under_way.remove(chunk)
