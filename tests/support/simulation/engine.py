"""The lane engine of a simulated peer, as far as the protocol may rely on a real one.

It takes the commands of pccl/runtime/client/engine.py and emits its events. A collective completes
some time after all its members have started it, but maybe never once a member has died, given up,
or lost a stream. Transfers copy memory. Times and rates are not simulated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pccl.ext import ffi, lib
from pccl.protocol.peer.effects import EagerOp, StartOp, StartTransfer
from pccl.protocol.tuning import choose
from pccl.runtime.client.engine import (
    COMPLETE,
    FAILED,
    LEAF,
    LIED,
    PROGRESS,
    SETTLED,
    STARVED,
    STREAM_LOST,
    STREAM_UP,
    UNREACHABLE,
    Event,
)
from simulation.unexpected import Chunk

if TYPE_CHECKING:
    from simulation.peer import SimPeer
    from simulation.run import SimulatedRun

Key = tuple[int, int]  # a run and a seq: only together they never repeat
PROGRESS_MAX = 3  # answers to `query` for each op, so that a run comes to rest


@dataclass(eq=False)
class Stream:
    """An open stream."""

    number: int
    to: int = 0  # once it is to be connected: the peer,
    token: str = ""  # and that of the rendezvous, if it needs one
    up: bool = False
    lost: bool = False
    blocked: bool = False  # it will never be up,
    silent: bool = False  # and nothing says so
    carried: set[Key] = field(default_factory=set)  # collectives


@dataclass(eq=False)
class Op:
    """A registered op."""

    number: int
    kind: str  # "collective", "serve" or "fetch"
    tag: tuple[int, int]  # run and tag
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # address and bytes
    seq: Key | None = None  # None: registered, not started
    members: int = 0
    streams: tuple[int, ...] = ()  # that it sends on; of a fetch, to its holders
    direct: tuple[int, ...] = ()  # of these: its rows go another way if they cannot be connected
    complete: bool = False  # or failed: it says no more until it is ended, or started again
    ending: bool = False  # told to commit or abort
    deaf: set[int] = field(default_factory=set)  # serve: receivers that may lack something for ever
    arrived: bool = False  # fetch: all is here, and may not be verified yet
    unverified: set[tuple[int, int]] = field(default_factory=set)  # leaves
    sent: list[Chunk] = field(default_factory=list)  # before it started
    calls: list[int] = field(default_factory=list)  # of its predecessors, by ring
    nonce: int = 0  # of the epoch in which it has started
    asked: int = 0  # how often for its progress


def command(carry_out: Callable[..., None]) -> Callable[..., None]:
    """A command waits for `flush`."""

    @functools.wraps(carry_out)
    def queue(engine: SimEngine, *args: Any, **kwargs: Any) -> None:
        engine.unsent.append(lambda: carry_out(engine, *args, **kwargs))

    return queue


class SimEngine:
    """An engine.

    Attributes:
        ops, streams: by number.
        expects: the nonce of the epoch that it knows.
        unexpected: data of no start yet.
    """

    together = True
    ipc = broken = ""
    backend = "simulated"
    cpu_s = staticmethod(lambda: -1.0)

    def __init__(self, peer: SimPeer) -> None:
        self.peer, self.run = peer, peer.run
        self.port, self.socket = 1000 + peer.name, object()
        self.unsent: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self.ops: dict[int, Op] = {}
        self.streams: dict[int, Stream] = {}
        self.expects = 0
        self.unexpected: list[Chunk] = []
        self._tries: Counter[int] = Counter()  # to reach peers that it cannot
        self._failed_fetches = 0

    # ---- the interface of an engine ----

    def flush(self) -> bool:
        while self.unsent:
            self.unsent.pop(0)()
        return bool(self._events)

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self.flush()
        self.ops.clear()
        for number in list(self.streams):
            self._forget(number)

    @command
    def expect(self, peer: int, nonce: int, keys: object) -> None:
        self.run.eager.expect(self, nonce)

    @command
    def open_stream(self, stream: int) -> None:
        assert stream not in self.streams
        self.streams[stream] = Stream(stream)

    def connect_stream(
        self, stream: int, endpoint: str, *, peer: int, nonce: int, via: str = "", **_: object
    ) -> None:
        assert via or nonce == self.peer.machine.knowledge.plan.nonce
        self._connect(stream, endpoint, peer, via)

    @command
    def _connect(self, stream: int, endpoint: str, peer: int, via: str) -> None:
        one = self.streams.get(stream)
        if one is None or one.lost:
            return
        one.to, one.blocked = peer, self.run.blocked(self.peer, peer)
        one.silent = bool(via) or (one.blocked and self.run.random.random() < 0.5)
        if via:
            one.token = endpoint.rpartition(":")[0]
            self.run.meetings.sends(self, one)
        elif not one.blocked:
            self.connected(one)

    @command
    def meet(self, endpoint: str, via: str, lanes: int) -> None:
        if not self.peer.caged:
            self.run.meetings.takes(endpoint.rpartition(":")[0])

    @command
    def close_stream(self, stream: int) -> None:
        self._forget(stream)

    @command
    def lose_stream(self, stream: int, why: str) -> None:
        self.lose(stream, UNREACHABLE, why)

    @command
    def register_collective(self, op: int, *, run: int, tag: int, **_: object) -> None:
        self._register(Op(op, "collective", (run, tag)))

    @command
    def register_exchange(self, op: int, *, run: int, tag: int, **_: object) -> None:
        self._register(Op(op, "collective", (run, tag)))

    @command
    def register_serve(
        self, op: int, *, run: int, tag: int, pieces: Sequence[tuple[int, int, int]], **_: object
    ) -> None:
        self._failed_fetches = 0
        self._register(Op(op, "serve", (run, tag), {n: where for n, *where in pieces}))  # type: ignore[misc]

    @command
    def register_fetch(
        self, op: int, *, run: int, tag: int, pieces: Sequence[tuple[int, int, int]], **_: object
    ) -> None:
        self._register(Op(op, "fetch", (run, tag), {n: where for n, *where in pieces}))  # type: ignore[misc]

    @command
    def start_eagerly(self, eager: EagerOp) -> None:
        rings = eager.rings
        assert all(ring.stream in self.streams for ring in rings), "a stream that is not open"
        self.run.eager.begin(self, self.ops[eager.op], rings)

    @command
    def start(self, start: StartOp) -> None:
        one, rings = self.ops[start.op], start.rings
        one.direct = tuple(stream for stream in start.direct if stream)
        self._check_tuning(start)
        streams = [ring.stream for ring in rings if ring.stream]  # 0: it sends nothing
        key = self._start(one, start.seq, [*streams, *one.direct])
        one.members = rings[0].members
        for number in one.streams:
            self.streams[number].carried.add(key)
        if any(self.streams[n].lost for n in one.streams) or any(
            self.streams[n].blocked for n in streams
        ):
            self.run.cut_to[key] = set()
        self.run.unready.setdefault(key, set()).update(
            self.streams[number] for number in one.streams if not self.streams[number].up
        )
        self.run.starters.setdefault(key, set()).add(self.peer.name)
        self.run.eager.start(self, one, start.calls or [0] * len(rings))

    @command
    def start_transfer(self, start: StartTransfer) -> None:
        one = self.ops[start.op]
        self._start(one, start.seq, [end.stream for end in start.ends])
        if one.kind == "serve":
            gone = {self.streams[n].to for n in one.streams if self.streams[n].lost}
            if gone:
                self._deafen(one, gone)
            return
        one.complete = False
        if not one.arrived:  # else it goes on with what it has
            self._tear(one)

    @command
    def verified(self, op: int, piece: int, leaf: int, good: bool) -> None:
        assert good, "a holder has other content than was elected"
        if op in self.ops:
            self.ops[op].unverified.discard((piece, leaf))

    @command
    def query(self, op: int) -> None:
        one = self.ops.get(op)
        if one is not None and one.seq and not one.complete and one.asked < PROGRESS_MAX:
            one.asked += 1
            self._emit(PROGRESS, op=op, done=self.run.random.randint(0, 999))

    @command
    def remind(self, op: int, limit: int) -> None:
        """Requests are never lost."""

    @command
    def commit(self, op: int) -> None:
        self._end(op)

    @command
    def abort(self, op: int) -> None:
        if op in self.ops:
            self.run.cut(self.ops[op].seq)
        self._end(op)

    # ---- ops ----

    def _register(self, op: Op) -> None:
        assert op.number not in self.ops
        self.ops[op.number] = op

    def _start(self, op: Op, seq: int, streams: Sequence[int]) -> Key:
        assert all(stream in self.streams for stream in streams), "a stream that is not open"
        op.seq = key = (self.peer.machine.knowledge.run, seq)
        op.streams, op.deaf = tuple(streams), set()
        return key

    def _check_tuning(self, start: StartOp) -> None:
        """The members' data travels in the same way."""
        alike = [(p.members, p.begin, p.count, p.root, p.ranks) for p in start.rings]
        spec = self.peer.calls_open[start.op].spec
        assert spec is not None
        eager = choose(spec, 0, self.peer.client.knowledge.conditions).eager
        self.run.agree(
            ("the tuning", self.peer.machine.knowledge.run, start.seq),
            (start.algorithm, eager, alike),
            self.peer,
        )

    def _end(self, number: int) -> None:
        op = self.ops.get(number)
        if op is None:  # it has settled meanwhile: command and event have crossed
            self._emit(SETTLED, op=number)
            return
        assert not op.ending
        op.ending = True

    def _holders(self, op: Op) -> list[int]:
        """The peers from which data may come."""
        streams = (self.streams.get(number) for number in op.streams)
        return [one.to for one in streams if one is not None and not (one.lost or one.blocked)]

    def serves(self, seq: Key | None) -> Op | None:
        """The op that serves by a plan."""
        found = (op for op in self.ops.values() if op.kind == "serve" and op.seq == seq)
        return next((op for op in found if not op.ending), None)

    # ---- events ----

    def _emit(self, kind: int, **fields: Any) -> None:
        values = dict.fromkeys(Event._fields, 0) | {"kind": kind, "settled": False, "text": ""}
        self._events.append(Event(**(values | fields)))
        self.peer.waiter.notify(self.socket)

    def choices(self) -> list[tuple[Callable[..., None], Any]]:
        """The events that may happen now."""
        draw = self.run.random.random
        choices: list[tuple[Callable[..., None], Any]] = [
            (self.arrive, chunk) for chunk in self.run.eager.under_way if chunk.to is self
        ]
        for number, stream in self.streams.items():
            if stream.blocked and not (stream.lost or stream.silent) and self._may_try(stream):
                choices.append((self._refuse, number))
            elif stream.up and self.run.loss_rate and draw() < self.run.loss_rate:
                choices.append((self._reset, number))
        for number, op in self.ops.items():
            if op.ending:
                choices.append((self._settle, number))
                continue
            if self._can_complete(op):
                choices.append((self._complete, number))
            if self._can_fail(op):
                choices.append((self._fail, op))
        return choices

    def _can_complete(self, op: Op) -> bool:
        if not op.seq or op.complete:
            return False
        if op.kind == "collective":
            if self.run.unready.get(op.seq):
                return False
            allowed = self.run.cut_to.get(op.seq)
            everyone = len(self.run.starters[op.seq]) == op.members
            whole = everyone and not self.run.eager.lacking(op.seq)
            return whole and (allowed is None or self.peer.name in allowed)
        if op.kind != "fetch":
            return False
        if op.arrived:
            return not op.unverified
        if self.run.deafened(self.peer.machine.number, op.seq):
            return False
        return any(self.run.serving(holder, op.seq) for holder in self._holders(op))

    def _can_fail(self, op: Op) -> bool:
        if not op.seq or op.complete or op.kind == "serve":
            return False
        if op.kind == "fetch":
            # the master hears of a death, too, before a peer has tried three times
            tries = self._failed_fetches < 2 or not self.run.broken
            return tries and not any(self.run.lives(holder) for holder in self._holders(op))
        if any(self.streams[n].lost for n in op.streams if n in self.streams):
            return True
        return self.run.random.random() < self.run.failure_rate

    def arrive(self, chunk: Chunk) -> None:
        self.run.eager.arrive(self, chunk)

    def _complete(self, number: int) -> None:
        op = self.ops[number]
        if op.kind == "fetch" and not op.arrived:
            self._fetch(op)
            return
        self.run.say(f"the engine of peer {self.peer.name} completes", op.kind, str(op.seq))
        op.complete = True
        settled = op.kind == "collective" and self.run.random.random() < 0.5
        if settled:
            del self.ops[number]
        assert op.seq is not None
        self.run.completed.setdefault(op.seq, set()).add(self.peer.name)
        self._emit(COMPLETE, op=number, settled=settled)

    def _fetch(self, op: Op) -> None:
        """All data arrives, leaf by leaf."""
        source = next(s for h in self._holders(op) if (s := self.run.serving(h, op.seq)))
        self.run.say(f"data of {op.seq} arrives at peer {self.peer.name}")
        op.arrived = True
        for piece, (address, nbytes) in op.pieces.items():
            at, size = source.pieces[piece]
            assert size == nbytes
            ffi.memmove(ffi.cast("char *", address), ffi.cast("char *", at), nbytes)
            op.unverified.add((piece, 0))  # what is simulated has no second leaf
            self._emit(LEAF, op=op.number, piece=piece)

    def _tear(self, op: Op) -> None:
        """Some data arrives: in place, it is what a call leaves that fails then."""
        for address, nbytes in op.pieces.values():
            torn = f"torn, of peer {self.peer.name}".encode().ljust(nbytes)
            ffi.memmove(ffi.cast("char *", address), torn, nbytes)

    def _fail(self, op: Op, stream: int = 0, text: str = "a stream was lost") -> None:
        self.run.say(f"the engine of peer {self.peer.name} fails in {op.seq}")
        self._failed_fetches += op.kind == "fetch"
        self.run.cut(op.seq)
        op.complete = True
        starves = op.kind != "fetch" or self.run.random.random() < 0.8
        seq = op.seq[1] if op.seq is not None else 0
        status = STARVED if starves else LIED
        self._emit(FAILED, op=op.number, status=status, seq=seq, stream=stream, text=text)

    def _settle(self, number: int) -> None:
        del self.ops[number]
        self._emit(SETTLED, op=number)

    def give_up(self, number: int) -> None:
        """An op fails for a reason of its own."""
        self._emit(FAILED, op=number, status=LIED, text="an impossible chunk")

    # ---- streams ----

    def connected(self, stream: Stream) -> None:
        """A lane is connected."""
        stream.up = True
        for lacking in self.run.unready.values():
            lacking.discard(stream)
        self._emit(STREAM_UP, stream=stream.number)

    def _may_try(self, stream: Stream) -> bool:
        # the master hears of a death, too, before a peer has tried three times
        return self.run.lives(stream.to) or self._tries[stream.to] < 3

    def _refuse(self, number: int) -> None:
        """A stream cannot be connected."""
        self.lose(number, UNREACHABLE, "a wall")

    def _reset(self, number: int) -> None:
        """A connection is reset, and with it goes what others have not read yet.

        That can be at any time: also when the ops whose data it was are complete here, or settled
        and forgotten, or when the stream is idle.
        """
        self.run.losses += 1
        self.lose(number, lib.PCCL_ESTREAM, "a lane was disconnected")

    def lose(self, number: int, status: int, text: str) -> None:
        """A stream is lost."""
        stream = self.streams.get(number)
        if stream is None or stream.lost:
            return
        self.run.say(f"peer {self.peer.name} loses its stream {number} to {stream.to}: {text}")
        if status == UNREACHABLE:
            self._tries[stream.to] += 1
            status = status if self._may_try(stream) else lib.PCCL_ESTREAM
        was_up, stream.lost, stream.up = stream.up, True, False
        if not was_up:
            self._forgo(stream)
        self.run.eager.lose(self, number)
        for key in stream.carried:
            self.run.cut(key)
        self._emit(STREAM_LOST, stream=number, status=status, text=text)
        for op in list(self.ops.values()):
            if number not in op.streams or op.ending:
                continue
            if op.kind == "serve":
                self._deafen(op, {stream.to}, number)
            elif op.kind == "collective" and op.complete:
                self._emit(FAILED, op=op.number, status=STARVED, stream=number, text=text)
            elif op.kind == "collective" or not self._holders(op):
                self._fail(op, number, text)

    def _forgo(self, stream: Stream) -> None:
        """A direct stream could not be connected: its rows go around the rings."""
        for op in self.ops.values():
            if stream.number in op.direct and op.seq is not None:
                op.streams = tuple(each for each in op.streams if each != stream.number)
                self.run.unready[op.seq].discard(stream)
                stream.carried.discard(op.seq)

    def _deafen(self, op: Op, receivers: set[int], stream: int = 0) -> None:
        """Data for some receivers of a serving op may be lost."""
        op.deaf |= receivers
        seq = op.seq[1] if op.seq is not None else 0
        text = "a stream was lost"
        self._emit(FAILED, op=op.number, status=STARVED, seq=seq, stream=stream, text=text)

    def _forget(self, number: int) -> None:
        if self.streams.pop(number, None) is not None:
            self.run.eager.lose(self, number)


class Meetings:
    """The rendezvous of all peers: a stream is up when both sides are at a point that expects them.

    Args:
        run: whose peers meet.
    """

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._made = 0
        self._expected: set[str] = set()  # endpoints without the side
        self._taken: set[str] = set()
        self._senders: dict[str, tuple[SimEngine, Stream]] = {}

    def token(self) -> str:
        """A new one."""
        self._made += 1
        return f"{self._made:032x}"

    def expect(self, token: str) -> None:
        """A point joins those that name a token."""
        groups = ":".join(token[i : i + 4] for i in range(0, len(token), 4))
        self._expected.add(f"tcp://[{groups}]")
        self._join(f"tcp://[{groups}]")

    def takes(self, endpoint: str) -> None:
        """The receiver is there."""
        self._taken.add(endpoint)
        self._join(endpoint)

    def sends(self, engine: SimEngine, stream: Stream) -> None:
        """The sender is there."""
        self._senders[stream.token] = engine, stream
        self._join(stream.token)

    def _join(self, endpoint: str) -> None:
        if endpoint in self._expected & self._taken & self._senders.keys():
            engine, stream = self._senders[endpoint]
            if engine.streams.get(stream.number) is stream and not (stream.lost or stream.blocked):
                engine.connected(stream)
