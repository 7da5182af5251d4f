"""A simulated peer: the real state machine, with simulated API calls, runtime and engine."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from conversation import Conversation
from unexpected import Chunk

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    Arrange,
    CloseStream,
    CommitOp,
    EagerOp,
    Effect,
    Expect,
    Fail,
    Fetched,
    Follow,
    Measure,
    OpenStream,
    Reduced,
    RegisterOp,
    Send,
    StartOp,
    StartTransfer,
    Store,
    Synced,
)
from pccl.protocol.ring import RingPlace
from pccl.protocol.strategy import choose

if TYPE_CHECKING:
    from simulator import SimulatedRun

End = Answer | Fail
Tag = int | tuple[int, int, int]  # of a send: sender, receiver and tag
Key = tuple[int, int]  # a run and a seq: only together they never repeat
Thread = Generator[int, None, Any]  # yields the call that it waits for
Program = Callable[["SimPeer"], Thread]
WORK = m.Spec("all_reduce", 0, 10, 1000)


class Ended(Exception):
    """This peer is out of the run: its threads end."""


@dataclass
class SimOp:
    """An op of a modelled engine."""

    kind: str  # "collective", "serve" or "fetch"
    seq: Key | None = None  # None: registered, not started
    holders: tuple[int, ...] = ()
    members: int = 0
    complete: bool = False
    ending: bool = False  # told to commit or abort
    walled: tuple[m.PeerInfo, ...] = ()  # it needs streams to these, and cannot reach them
    streams: tuple[int, ...] = ()  # that it sends on
    direct: tuple[int, ...] = ()  # of these: its rows go another way if they cannot be connected
    broken: bool = False  # one of these was lost before it started
    deaf: set[int] = field(default_factory=set)  # serve: receivers that may lack something for ever
    tag: tuple[int, int] = (0, 0)  # run and tag
    sent: list[Chunk] = field(default_factory=list)  # before it started
    calls: list[int] = field(default_factory=list)  # of its predecessors, by ring
    nonce: int = 0  # of the epoch in which it has started


@dataclass
class SimPeer:
    """A peer: its program, state machine and engine, and the two queues of its connection."""

    name: int
    conn: bytes
    run: SimulatedRun
    group: int = 0
    team: int = 0
    programs: tuple[Program, ...] = ()
    machine: Peer = field(default_factory=Peer)
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    alive: bool = True
    frozen: bool = False
    severed: bool = False  # cut off once: the master may have dropped it
    left: bool = False  # by its own will
    connection: str = "up"  # "breaking": the master is dead; "down": and this peer knows
    connections: int = 1
    threads: set[Thread] = field(default_factory=set)  # that have not ended
    ready: deque[Thread] = field(default_factory=deque)
    waiters: dict[int, Thread] = field(default_factory=dict)
    answers: dict[int, End] = field(default_factory=dict)
    standing: dict[int, tuple[str, Tag, m.Spec | None]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)  # calls besides which it makes no other
    tags: set[Tag] = field(default_factory=set)  # launched and not awaited
    deadlines: dict[int, int] = field(default_factory=dict)  # call -> step at which it is withdrawn
    given_up: set[int] = field(default_factory=set)  # calls that were withdrawn
    patient: dict[int, int] = field(default_factory=dict)  # call -> step at which it is so no more
    calls: int = 0
    ops: dict[int, SimOp] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    streams: dict[int, m.PeerInfo] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # of these
    carried: dict[int, set[Key]] = field(default_factory=dict)  # by stream: collectives
    walled: bool = False  # no peer can open a stream to it
    caged: bool = False  # it can open no stream
    cut_from: set[int] = field(default_factory=set)  # names of those that it cannot open one to
    posthumous: set[int] = field(default_factory=set)  # calls made after it was out of the run
    dialled: str | None = ""  # what comes of the master's dial to it
    # whether it is outgoing: no peer can open a stream to it; whether it relays for such peers
    nat: tuple[bool, bool] = (False, False)
    tokens: dict[int, str] = field(default_factory=dict)  # by stream: of rendezvous
    content: tuple[int, str] = (0, "new")  # revision and content of the shared state
    plan: m.SyncPlan | None = None
    probe: int = 0  # the seq of the one under way
    staged: str | None = None  # content fetched by that plan
    torn: bool = False  # a synchronization that failed may have overwritten the content
    failed_fetches: int = 0
    tries: Counter[int] = field(default_factory=Counter)  # to reach peers that it cannot
    conversation: Conversation = field(default_factory=Conversation)
    expects: int = 0  # the nonce of the epoch that its engine knows
    unexpected: list[Chunk] = field(default_factory=list)  # of no start yet

    @property
    def outgoing(self) -> bool:
        return self.nat[0]

    @property
    def relay(self) -> bool:
        return self.nat[1]

    # ---- threads ----

    def start_thread(self, thread: Thread) -> None:
        self.threads.add(thread)
        self.ready.append(thread)

    def run_threads(self) -> bool:
        """Lets threads go on as far as they can; whether any could."""
        late = self.deadlines and [c for c, at in self.deadlines.items() if at <= self.run.steps]
        for call in late:
            self.time_out(call)
        hurried = bool(self.patient) and self.hurry(self.run.steps)
        if self.standing and self.run.random.random() < 0.005:
            self.perform(self.machine.inquire(self.run.random.choice(list(self.standing))))
        if not self.ready:
            return bool(late) or hurried
        while self.ready:
            thread = self.ready.popleft()
            try:
                call = next(thread)
                while call in self.answers:
                    call = next(thread)
                self.waiters[call] = thread
            except (StopIteration, Ended):
                self.threads.discard(thread)
        return True

    def time_out(self, call: int) -> None:
        """The caller gives up."""
        self.run.say(f"peer {self.name} gives up", *self.standing[call][:1])
        self.deadlines.pop(call, None)
        self.given_up.add(call)
        away = self.connection != "up" and not self.machine._outbox.known
        self.perform(self.machine.time_out(call, "its caller gave up"))
        self.check_ends(call, away)

    def cancel(self, call: int) -> None:
        """An exception takes the caller away; it comes back, and goes on with its program."""
        self.run.say(f"an exception takes the caller of peer {self.name} out of", call)
        self.deadlines.pop(call, None)
        self.given_up.add(call)
        self.perform(self.machine.cancel(call))
        self.check_ends(call, True)

    def check_ends(self, call: int, alone: bool) -> None:
        """`alone`: whatever the master does, a call that was given up ends with its ops."""
        what = self.standing.get(call, ("connect",))[0]  # of which the facade leaves
        ending = any(op.ending for op in self.ops.values())
        assert not alone or what == "connect" or ending, "who gave up waits for the master"

    def hurry(self, step: float = math.inf) -> bool:
        """Callers whose patience ends at that step want their answers; whether there are any."""
        hasty = [call for call, end in self.patient.items() if end <= step]
        for call in hasty:
            del self.patient[call]
            self.perform(self.machine.hurry(call))
        return bool(hasty)

    @property
    def single(self) -> bool:
        """Whether it has one thread, which never gives up."""
        return len(self.programs) == 1 and not any(self.run.patience)

    # ---- calls, for programs ----

    def number(self, kind: str = "") -> int:
        self.calls += 1
        self.kinds[self.calls] = kind
        return self.calls

    def begin(
        self,
        call: int,
        what: str,
        actions: list[Effect],
        tag: Tag = 0,
        work: Any = None,
    ) -> int:
        self.run.say(f"peer {self.name} calls {what}", f"tag {tag}" if work else "")
        self.standing[call] = (what, tag, work)
        if self.machine.over is not None:
            self.posthumous.add(call)
        patience = self.run.random.choice(self.run.patience)
        if patience:
            self.deadlines[call] = self.run.steps + patience
        self.perform(actions)
        return call

    def wait(self, call: int) -> Generator[int, None, End]:
        while call not in self.answers:
            yield call
        end = self.answers.pop(call)
        if self.machine.over is not None and isinstance(end, Fail):
            self.run.check_over(self, self.machine.over.why)
            if call not in self.posthumous:
                self.run.check_verdict(end, self.machine.over)
            raise Ended
        return end

    def join(self, hello: m.Hello) -> Generator[int, None, End]:
        call = self.number()
        return (yield from self.wait(self.begin(call, "connect", self.machine.join(call, hello))))

    def launch(
        self,
        tag: int = 0,
        work: m.Spec = WORK,
        stuck: bool = False,
        data: bytes | None = None,
    ) -> int:
        """With `data`, which must be the same for all peers, a small one of `len(data)` bytes."""
        call = self.number("collective")
        if data is not None:
            asked = m.Spec("all_reduce", 0, 0, len(data))
            strategy = choose(asked, len(data), self.machine.knowledge.conditions)
            work, data = strategy.spec, data if strategy.inline else None
        self.tags.add(tag)
        self.stuck |= {call} if stuck else set()
        actions = self.machine.collective(call, tag, work, data, stuck)
        return self.begin(call, work.what, actions, tag, work)

    def awaits(self, call: int, tag: Tag) -> Generator[int, None, End]:
        end = yield from self.wait(call)
        self.tags.discard(tag)
        return end

    def all_reduce(
        self, tag: int = 0, work: m.Spec = WORK, data: bytes | None = None
    ) -> Generator[int, None, End]:
        return (yield from self.awaits(self.launch(tag, work, self.single, data), tag))

    def launch_send(self, giver: int, taker: int, tag: int, work: m.Spec, stuck: bool) -> int:
        """Either side of a send; both stand in the same call."""
        call, key = self.number("collective"), (giver, taker, tag)
        self.tags.add(key)
        self.stuck |= {call} if stuck else set()
        actions = self.machine.collective(call, tag, work, stuck=stuck, pair=(giver, taker))
        return self.begin(call, "send", actions, key, work)

    def broadcast(self, members: int) -> Generator[int, None, End]:
        parts = (m.Part(10, 7, "b"), m.Part(3, 1000, "w"))
        work = m.Spec("broadcast", 0, 0, 0, root=members - 1, members=members, parts=parts)
        end = yield from self.all_reduce(work=work)
        if isinstance(end, Answer):
            assert isinstance(end.value, Reduced)
            assert end.value.world_size == members, "ranks had changed, and nobody was told"
        return end

    def update_topology(self) -> Generator[int, None, End]:
        call = self.number()
        actions = self.machine.update_topology(call)
        return (yield from self.wait(self.begin(call, "update_topology", actions)))

    def finish(self) -> Generator[int, None, End]:
        call = self.number()
        actions = self.machine.finish(call)
        return (yield from self.wait(self.begin(call, "finish", actions)))

    def are_peers_pending(self) -> Generator[int, None, End]:
        call = self.number()
        self.stuck |= {call} if self.single else set()
        patience = self.run.random.choice([0, 0, 5, 50])
        if patience:
            self.patient[call] = self.run.steps + patience
        grace = self.run.random.choice(self.run.graces) if len(self.run.graces) > 1 else None
        actions = self.machine.are_peers_pending(call, self.single, bool(patience), grace)
        end = yield from self.wait(self.begin(call, "are_peers_pending", actions))
        self.patient.pop(call, None)
        return end

    def optimize_topology(self) -> Generator[int, None, End]:
        call, serve = self.number(), self.number("serve")
        actions = self.machine.optimize(call, serve)
        end = yield from self.wait(self.begin(call, "optimize_topology", actions))
        self.probe, self.failed_fetches = 0, 0
        return end

    def sync(
        self, entry: str = "x", strategy: int = 0, min_peers: int = 0
    ) -> Generator[int, None, End]:
        revision, text = self.content
        if self.torn:
            text = f"torn, of peer {self.name}"
        entries = (m.Entry(entry, 10, 4, False, text.encode()),)
        manifest = m.Manifest(revision, strategy, entries, min_peers=min_peers, torn=self.torn)
        call, serve = self.number(), self.number("serve")
        actions = self.machine.sync(call, serve, manifest)
        end = yield from self.wait(self.begin(call, "sync_shared_state", actions))
        if isinstance(end, Answer):
            assert isinstance(end.value, Synced)
            if self.plan is not None and self.plan.fetch:
                assert self.staged is not None, "synchronized without what was to be fetched"
                text = self.staged
            elif self.torn:
                text = "torn"
            assert "torn" not in text, "what was overwritten in part counts as whole"
            self.content, self.torn = (end.value.revision, text), False
            self.run.check_content(self)
        self.plan, self.failed_fetches = None, 0
        return end

    def leave(self) -> None:
        self.left = True
        self.perform(self.machine.leave("done"))

    # ---- what it stands in ----

    @property
    def present(self) -> bool:
        """Whether it is an accepted peer that lives, as far as it knows itself."""
        return self.alive and self.machine.accepted and self.machine.over is None

    @property
    def stuck_in(self) -> set[tuple[str, Tag]]:
        """Where it has said that it makes no other call."""
        return {self.standing[call][:2] for call in self.stuck & self.standing.keys()}

    @property
    def stands_in(self) -> set[tuple[str, Tag]]:
        """The rounds that it has entered and that have not ended."""
        return {(what, tag) for what, tag, _ in self.standing.values()}

    def waits(self) -> list[tuple[str, Tag, bool]]:
        """Its waiting calls: the call, its tag, and whether its round is over but not the call."""
        transfer = self.machine.transfers.current
        started = {c.call for c in self.machine.collectives.started.values()}
        if transfer is not None and transfer.planned:
            started.add(transfer.call)
        return [(what, tag, call in started) for call, (what, tag, _) in self.standing.items()]

    def check_empty(self) -> None:
        """Its threads have ended, so nothing may be left of any call."""
        machine = self.machine
        tables = {
            "votes": machine.votes,
            "collectives": machine.collectives,
            "started": machine.collectives.started,
            "withdrawals": machine._withdrawals,
            "abandoned": machine._abandoned,
            "streams": machine._streams.ring,
            "direct streams": machine._streams._direct,
            "streams of sends": machine._streams._sends,
            "lost streams": machine._streams._lost,
        }
        left = {name: len(table) for name, table in tables.items() if len(table)}
        assert not left and machine.transfers.current is None, f"peer {self.name} still has {left}"
        assert not self.ops, f"the engine of peer {self.name} still has ops {self.ops}"
        assert not self.streams, f"peer {self.name} has left streams {self.streams} open"
        assert not self.standing, f"peer {self.name} still stands in {self.stands_in}"

    # ---- what the runtime would do ----

    def perform(self, actions: list[Effect]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.conversation.said(message)
                    self.up.append(m.encode(message))
                case RegisterOp(op, run, tag):
                    assert op not in self.ops
                    self.ops[op] = SimOp(self.kinds[op], tag=(run, tag))
                case EagerOp(op, rings):
                    self.run.eager.begin(self, op, self.ops[op], rings)
                case StartOp(op, seq, _, parts, strategy, calls, direct):
                    alike = [(p.members, p.begin, p.count, p.root, p.ranks) for p in parts]
                    how = ("the strategy", self.machine.run, seq)
                    self.run.agree(how, (strategy.algorithm, strategy.eager, alike), self)
                    self.start(self.ops[op], seq, parts, calls, direct)
                case StartTransfer(op, seq, _, parts):
                    self.start(self.ops[op], seq, parts)
                case CommitOp(op) | AbortOp(op):
                    self.end(op, isinstance(action, AbortOp))
                case Expect(_, nonce):
                    self.run.eager.expect(self, nonce)
                case OpenStream(stream, to, nonce):
                    assert nonce == self.machine.plan.nonce
                    assert stream not in self.streams
                    self.streams[stream] = to
                    if to.outgoing:
                        self.meet(stream, to)
                case Arrange(message):
                    self.run.rendezvous.arranged(self, message)
                case CloseStream(stream):
                    del self.streams[stream]
                    self.run.eager.lose(self, stream)
                    self.lost.discard(stream)
                    self.tokens.pop(stream, None)
                    self.carried.pop(stream, None)
                case Store(call, data):
                    assert data in self.run.combined
                    assert call in self.standing, "memory is written whose owner has gone"
                case Answer(call) | Fail(call):
                    self.answered(call, action)
                case Follow(_, plan, resumed):
                    self.plan = plan
                    self.torn |= plan.in_place
                    if not resumed:
                        self.staged = None
                    if plan.fetch and not resumed:
                        self.perform(self.machine.fetch(self.number("fetch"), plan.seq))
                case Measure(_, seq, holders):
                    self.probe = seq if holders else 0
                    if holders:
                        self.perform(self.machine.fetch(self.number("fetch"), seq))
                case Fetched(_, seq, _, _) if self.probing:
                    if self.probing == seq:
                        self.measure(seq)
                case Fetched(_, seq, ok, why):
                    if ok and self.plan is not None and self.plan.seq == seq:
                        self.staged = self.plan.digests[0].decode()
                    self.perform(self.machine.fetched(seq, ok, why))

    def meet(self, stream: int, to: m.PeerInfo) -> None:
        """A stream to a peer that connects itself, at this one if that is possible."""
        token = self.tokens[stream] = self.run.rendezvous.asked(self)
        port = 0 if self.outgoing else 7
        self.perform(self.machine.rendezvous(m.RendezvousRequest(to.peer, token, port, 1)))

    def missed(self, op: SimOp) -> tuple[m.PeerInfo, ...]:
        """The peers that an op has streams to and that will never join it."""
        around = (stream for stream in op.streams if stream not in op.direct)
        tokens = ((self.streams.get(stream), self.tokens.get(stream)) for stream in around)
        return tuple(
            to for to, token in tokens if to and token and self.run.rendezvous.is_void(token)
        )

    def answered(self, call: int, end: End) -> None:
        assert call not in self.answers
        assert call not in self.ops, "answered while the engine refers to its memory"
        what, tag, _ = self.standing.pop(call)
        self.run.check_condemned(self, call, end)
        self.run.say(f"peer {self.name} returns from {what} (tag {tag}):", end)
        self.deadlines.pop(call, None)
        self.answers[call] = end
        if call in self.waiters:
            self.ready.append(self.waiters.pop(call))

    def start(
        self,
        op: SimOp,
        seq: int,
        parts: Sequence[RingPlace | effects.End],
        calls: Sequence[int] = (),
        direct: Sequence[int] = (),
    ) -> None:
        numbers = tuple(part.stream for part in parts if part.stream)  # 0: it sends nothing
        op.direct = tuple(stream for stream in direct if stream)
        op.seq = key = (self.machine.run, seq)
        op.streams, op.deaf = (*numbers, *op.direct), set()
        assert all(stream in self.streams for stream in op.streams), "a stream that is not open"
        gone = {self.streams[stream].peer for stream in op.streams if stream in self.lost}
        ends = [self.streams[stream] for stream in numbers]
        op.walled = tuple(to for to in ends if self.run.blocked(self, to.peer))
        self.run.rendezvous.needs(key, (self.tokens[n] for n in numbers if n in self.tokens))
        if op.kind == "collective":
            if op.walled:
                self.run.cut_to[key] = set()
            for stream in op.streams:
                self.carried.setdefault(stream, set()).add(key)
            assert isinstance(parts[0], RingPlace)
            op.members, op.broken = parts[0].members, bool(gone)
            if gone:
                self.run.cut_to[key] = set()
            self.run.starters.setdefault(key, set()).add(self.name)
            self.run.eager.start(self, op, calls or [0] * len(parts))
        elif op.kind == "fetch":
            blocked = {info.peer for info in op.walled} | gone
            op.holders = tuple(to.peer for to in ends if to.peer not in blocked)
            op.complete = False
        elif gone:
            self.deafen(op, gone)

    def end(self, number: int, abort: bool) -> None:
        op = self.ops.get(number)
        if op is None:
            return  # settled meanwhile: the order and the event crossed
        assert not op.ending
        op.ending = True
        if abort:
            self.run.cut(op.seq)

    # ---- what can happen to the engine ----

    def engine_choices(self) -> list[tuple[Callable[..., None], Any]]:
        """The actions that the engine may take now."""
        choices: list[tuple[Callable[..., None], Any]] = [
            (self.arrive, chunk) for chunk in self.run.eager.under_way if chunk.to is self
        ]
        if self.probing:
            choices.append((self.measure, self.probing))
        if self.run.loss_rate:
            for stream in self.streams.keys() - self.lost:
                if self.run.random.random() < self.run.loss_rate:
                    choices.append((self.lose_stream, stream))
        for number, op in self.ops.items():
            if op.ending:
                choices.append((self.settle, number))
                continue
            if self.can_complete(op):
                choices.append((self.complete, number))
                if self.run.random.random() < 0.05:
                    choices.append((self.progress, number))
            if self.can_fail(op):
                choices.append((self.fail, number))
            choices += [(self.forgo, stream) for stream in self.unconnected(op)]
        return choices

    def unconnected(self, op: SimOp) -> list[int]:
        """The direct streams that will never be connected."""
        void = self.run.rendezvous.is_void
        return [
            stream
            for stream in op.direct
            if stream in self.streams and stream not in self.lost
            if self.run.blocked(self, self.streams[stream].peer)
            or (stream in self.tokens and void(self.tokens[stream]))
        ]

    def forgo(self, stream: int) -> None:
        """A direct stream could not be connected: the engine sends its rows around the rings."""
        to = self.streams[stream]
        self.run.say(f"peer {self.name} has no stream to", to)
        self.lost.add(stream)
        for op in self.ops.values():
            op.streams = tuple(each for each in op.streams if each != stream)
        if self.run.random.random() < 0.8:
            self.perform(self.machine.unreached(to, "a wall", stream))
        self.perform(self.machine.stream_lost(stream, "a wall", up=False))

    def can_complete(self, op: SimOp) -> bool:
        if not op.seq or op.complete or not self.run.rendezvous.has_all(op.seq):
            return False
        if op.kind == "collective":
            allowed = self.run.cut_to.get(op.seq)
            everyone = len(self.run.starters[op.seq]) == op.members
            whole = everyone and not (self.run.eager.lacking(op.seq) or self.unconnected(op))
            return whole and (allowed is None or self.name in allowed)
        if op.kind != "fetch" or self.run.deafened(self.machine.number, op.seq):
            return False
        return any(self.run.serves(h, op.seq) for h in op.holders)

    def can_fail(self, op: SimOp) -> bool:
        if not op.seq or op.complete or op.kind == "serve":
            return False
        if op.walled or op.broken or self.missed(op):
            return True
        if op.kind == "fetch":
            # the master hears of a death, too, before a peer has tried three times
            tries = self.failed_fetches < 2 or not self.run.broken
            return tries and not any(self.run.lives(h) for h in op.holders)
        return self.run.random.random() < self.run.failure_rate

    def arrive(self, chunk: Chunk) -> None:
        self.run.eager.arrive(self, chunk)

    def progress(self, number: int) -> None:
        self.perform(self.machine.engine_progress(number, self.run.random.randint(0, 999)))

    def complete(self, number: int) -> None:
        op = self.ops[number]
        self.run.say(f"the engine of peer {self.name} completes", op.kind, str(op.seq))
        op.complete = True
        settled = op.kind == "collective" and self.run.random.random() < 0.5
        if settled:
            del self.ops[number]
        self.run.completed.setdefault(op.seq, set()).add(self.name)
        self.perform(self.machine.engine_complete(number, settled, 0, 0))

    def fail(self, number: int) -> None:
        op = self.ops[number]
        self.run.say(f"the engine of peer {self.name} loses a stream of {op.seq}")
        walls, op.walled = (*op.walled, *self.missed(op)), ()
        for wall in walls:
            self.tries[wall.peer] += 1
            # the master hears of a death, too, before a peer has tried three times
            if self.run.lives(wall.peer) or self.tries[wall.peer] < 3:
                self.perform(self.machine.unreached(wall, "a wall"))
        if walls and op.kind == "fetch" and op.holders:
            return  # it goes on with them
        self.failed_fetches += op.kind == "fetch"
        self.run.cut(op.seq)
        op.complete = True  # says no more until it is aborted, or started again
        starves = op.kind == "fetch" and self.run.random.random() < 0.8
        starved = op.seq[1] if op.seq is not None and starves else 0
        self.perform(self.machine.engine_failed(number, "a stream was lost", starved))

    def lose_stream(self, stream: int) -> None:
        """A connection is reset, and with it goes what others have not read yet.

        That can be at any time: also when the ops whose data it was are complete here, or settled
        and forgotten, or when the stream is idle.
        """
        self.run.say(f"peer {self.name} loses its stream {stream} to", self.streams[stream])
        self.lost.add(stream)
        self.run.eager.lose(self, stream)
        self.run.losses += 1
        for key in self.carried.get(stream, ()):
            self.run.cut(key)
        self.perform(self.machine.stream_lost(stream, "a lane was disconnected"))
        for number, op in list(self.ops.items()):
            if stream not in op.streams or op.ending or stream not in self.streams:
                continue
            to = self.streams[stream].peer
            if op.kind == "serve":
                self.deafen(op, {to})
            elif op.kind == "collective" and op.complete:
                self.perform(self.machine.engine_failed(number, "a stream was lost"))
            elif op.kind == "collective":
                self.fail(number)
            elif len(op.holders) > 1:  # it goes on with the others
                op.holders = tuple(h for h in op.holders if h != to)

    def deafen(self, op: SimOp, receivers: set[int]) -> None:
        """Data for some receivers of a serving op may be lost."""
        number = next(number for number, each in self.ops.items() if each is op)
        op.deaf |= receivers
        seq = op.seq[1] if op.seq is not None else 0
        self.perform(self.machine.engine_failed(number, "a stream was lost", seq))

    @property
    def probing(self) -> int:
        """The seq of the probe under way, 0 if there is none."""
        transfer = self.machine.transfers.current
        return self.probe if transfer is not None and transfer.optimizes else 0

    def measure(self, seq: int) -> None:
        """Ends a measurement: time is up, all data is here, or no peer sends."""
        rate = self.run.random.choice([0, 1, 10, 100]) * 1000
        self.probe = 0
        self.perform(self.machine.measured(seq, rate, rate))

    def settle(self, number: int) -> None:
        del self.ops[number]
        self.perform(self.machine.engine_settled(number, 0, 0))

    def deliver(self) -> None:
        message = m.decode_from_master(self.down.popleft())
        self.run.say(f"master -> peer {self.name}:", message)
        self.conversation.heard(message)
        self.run.check_told(self, message)
        if isinstance(message, m.Started) and message.data is not None:
            self.run.completed.setdefault((self.machine.run, message.seq), set()).add(self.name)
        self.perform(self.machine.received(message))


def brief(value: object) -> str:
    """A message or an answer on one line, without what all have in common."""
    if isinstance(value, m.PeerInfo):
        return str(value.peer)
    if isinstance(value, msgspec.Struct):
        fields = [
            f"{f.name}={brief(getattr(value, f.name))}"
            for f in msgspec.structs.fields(value)
            if f.name not in ("protocol", "version", "machine", "arithmetic", "port", "host", "ipc")
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple):
        return f"({' '.join(map(brief, value))})"
    if isinstance(value, Answer):
        return str(value.value)
    if isinstance(value, Fail):
        return f"{value.fault.name} {value.result.name}: {value.why}"
    return str(value)


if TYPE_CHECKING:
    from simpeer import Key, SimPeer
    from simulator import SimulatedRun


class SimRendezvous:
    """All rendezvous of a run, by token."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._wanted: dict[str, set[str]] = {}  # kinds of messages still to be sent
        self._refused: set[str] = set()
        self._needed: dict[Key, set[str]] = {}  # by call

    def are_severed(self, sender: SimPeer, receiver: SimPeer) -> bool:
        """Whether neither can connect to the other, or the one who must cannot connect at all."""
        relayed = any(peer.relay for peer in self._run.peers)
        return receiver.outgoing and (receiver.caged or (sender.outgoing and not relayed))

    def asked(self, sender: SimPeer) -> str:
        """A sender has something for a peer that connects itself. Returns the token."""
        token = f"{len(self._wanted):032x}"
        self._wanted[token] = {
            "RendezvousJoin",
            *(("RendezvousResult", "RendezvousRelay") if sender.outgoing else ()),
        }
        return token

    def arranged(self, peer: SimPeer, message: m.Rendezvous) -> None:
        """A peer is told."""
        match message:
            case m.RendezvousJoin():
                assert peer.outgoing, "a peer was sent to another one that can reach it"
            case m.RendezvousRelay():
                assert peer.relay, "a peer relays that has not offered it"
            case m.RendezvousResult(relay=None):
                self._refused.add(message.token)
                return
        self._wanted[message.token].discard(type(message).__name__)

    def needs(self, key: Key, tokens: Iterable[str]) -> None:
        """A call cannot end well before they have met."""
        self._needed.setdefault(key, set()).update(tokens)

    def has_all(self, key: Key) -> bool:
        """Whether all have met that a call needs."""
        return not any(self._wanted[token] for token in self._needed.get(key, ()))

    def is_void(self, token: str) -> bool:
        """Whether a rendezvous will not take place: no message that it needs is under way."""
        name = token.encode()
        queues = [queue for peer in self._run.peers for queue in (peer.up, peer.down)]
        told = any(name in data for queue in queues for data in queue)
        return bool(self._wanted[token]) and (token in self._refused or not told)
