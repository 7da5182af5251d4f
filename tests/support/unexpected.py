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
    from simpeer import Key, SimOp, SimPeer
    from simulator import SimulatedRun


@dataclass(frozen=True, eq=False)
class Chunk:
    """Data of one peer for another one, sent before its collective started."""

    sender: SimPeer
    stream: int
    to: SimPeer
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
    """

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.under_way: list[Chunk] = []
        self.calls: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self._needed: defaultdict[Key, set[Chunk]] = defaultdict(set)
        self._taken: defaultdict[Key, set[Chunk]] = defaultdict(set)
        self.sent = self.used = 0

    def begin(self, peer: SimPeer, number: int, op: SimOp, rings: Sequence[RingPlace]) -> None:
        """The engine sends, or finds no room or no credit."""
        assert op.seq is None and not op.ending and not op.sent, "begun at the wrong time"
        plan = peer.machine.plan
        assert all(place.stream in peer.streams for place in rings), "a stream that is not open"
        if self._run.random.random() < 0.2 or any(place.stream in peer.lost for place in rings):
            return
        for ring, place in enumerate(rings):
            number_of_next = peer.streams[place.stream].peer
            for to in self._run.peers:
                same_run = to.machine.run == peer.machine.run
                if same_run and to.machine.number == number_of_next:
                    nonce, epoch = plan.nonce, plan.epoch
                    chunk = Chunk(peer, place.stream, to, ring, op.tag, number, nonce, epoch)
                    op.sent.append(chunk)
                    self.under_way.append(chunk)
                    self.sent += 1

    def start(self, peer: SimPeer, op: SimOp, calls: Sequence[int]) -> None:
        """The engine goes on where it has begun, if it is on the same streams, and takes what its
        stash has of the calls that the start names."""
        assert op.seq is not None
        op.calls, op.nonce = [*calls], peer.expects
        if op.sent and op.sent[0].stream == op.streams[0]:
            self._needed[op.seq] |= {*op.sent}
        else:
            void = {*op.sent} & self._taken[op.seq]
            assert not void, "what was sent on another epoch's streams counts"
        for chunk in [each for each in peer.unexpected if each.tag == op.tag]:
            if op.calls[chunk.ring : chunk.ring + 1] == [chunk.call]:
                peer.unexpected.remove(chunk)
                self._take(op, chunk)

    def arrive(self, peer: SimPeer, chunk: Chunk) -> None:
        """The receiver's engine takes it, holds it, or drops it."""
        self.under_way.remove(chunk)
        for op in peer.ops.values():
            running = op.seq is not None and not op.ending and op.tag == chunk.tag
            if running and op.nonce == chunk.nonce and op.calls[chunk.ring] == chunk.call:
                self._take(op, chunk)
                return
        if chunk.nonce == peer.expects:
            peer.unexpected.append(chunk)

    def _take(self, op: SimOp, chunk: Chunk) -> None:
        """Memory changes by a chunk: it must be of the call that the master has put together."""
        assert op.seq is not None
        self.used += 1
        self._run.say(f"peer {chunk.to.name} takes what peer {chunk.sender.name} has sent early")
        calls, number = self.calls[op.seq], chunk.sender.machine.number
        assert calls.get(number) == chunk.call, f"{op.seq} takes a chunk of another call"
        assert chunk.epoch == chunk.to.machine._streams.epoch, "a chunk of another epoch"
        self._taken[op.seq].add(chunk)

    def lacking(self, key: Key) -> bool:
        """Whether a collective still needs something of what was sent before it started."""
        return not self._needed[key] <= self._taken[key]

    def expect(self, peer: SimPeer, nonce: int) -> None:
        """A peer hears of an epoch: what it holds of another one is void."""
        if peer.expects != nonce:
            peer.expects = nonce
            peer.unexpected.clear()

    def lose(self, peer: SimPeer, stream: int = 0) -> None:
        """A stream, or all of a peer's, are gone, with some of what is under way there."""
        for chunk in list(self.under_way):
            if chunk.sender is peer and stream in (0, chunk.stream):
                if self._run.random.random() < 0.5:
                    self.under_way.remove(chunk)
