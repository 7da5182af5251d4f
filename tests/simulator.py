"""Whole runs of the real master core and real peer cores, from one seed, without I/O.

Messages travel in queues, one for each direction of each connection, in order; connections are not
ordered against each other. The lane engines are modelled by what the protocol may assume of them: a
collective completes on a peer some time after all its members have started it, but maybe never once
a member has died or given up; an aborted or committed op is settled some time later; a stream may
break at any time. Each step draws one thing that can happen now.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from pccl.protocol import master as master_core
from pccl.protocol import messages as m
from pccl.protocol import peer as peer_core
from pccl.types import Result

End = peer_core.Answer | peer_core.Fail
Program = Callable[["SimPeer"], Generator[None, None, None]]


class GivenUp(Exception):
    """A peer that came back too late to a restarted master, which goes on without it."""


@dataclass
class SimOp:
    """An op of a modelled engine."""

    kind: str  # "collective", "serve" or "fetch"
    seq: int = 0  # 0: registered, not started
    holders: tuple[int, ...] = ()
    members: int = 0
    complete: bool = False
    ending: bool = False  # told to commit or abort


@dataclass
class SimPeer:
    """A peer: its program, its core, its engine, and its connection's two queues."""

    name: int
    conn: bytes
    run: Run
    core: peer_core.Peer = field(default_factory=peer_core.Peer)
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    alive: bool = True
    link: str = "up"  # "up"; "breaking": the master is dead; "down": and this peer knows
    links: int = 1
    program: Generator[None, None, None] | None = None
    answers: dict[int, End] = field(default_factory=dict)
    calls: int = 0
    ops: dict[int, SimOp] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    content: tuple[int, str] = (0, "")  # revision and content of the shared state
    plan: m.SyncPlan | None = None
    staged: str | None = None  # content fetched by that plan
    failed_fetches: int = 0

    # ---- calls, for programs ----

    def number(self, kind: str = "") -> int:
        self.calls += 1
        self.kinds[self.calls] = kind
        return self.calls

    def wait(self, call: int, actions: list[peer_core.Action]) -> Generator[None, None, End]:
        self.perform(actions)
        patience = self.run.random.choice(self.run.patience)
        while call not in self.answers:
            patience -= 1
            if patience == 0:
                self.perform(self.core.withdraw(call, "its caller gave up"))
            yield
        end = self.answers.pop(call)
        if isinstance(end, peer_core.Fail) and end.result is Result.MASTER_CONNECTION_FAILED:
            raise GivenUp
        return end

    def all_reduce(
        self, tag: int = 0, count: int = 1000, data: bytes | None = None
    ) -> Generator[None, None, End]:
        """With `data`, which must be the same for all peers, a small one of `len(data)` bytes."""
        call = self.number("collective")
        work = m.Work("all_reduce", 0, 0, count if data is None else len(data))
        return (yield from self.wait(call, self.core.collective(call, tag, work, data)))

    def broadcast(self, members: int) -> Generator[None, None, End]:
        call = self.number("collective")
        parts = (m.Part(10, 7, "b"), m.Part(3, 1000, "w"))
        work = m.Work("broadcast", 0, 0, 0, members - 1, members, parts)
        end = yield from self.wait(call, self.core.collective(call, 0, work))
        if isinstance(end, peer_core.Answer):
            assert isinstance(end.value, peer_core.Reduced)
            assert end.value.world_size == members, "ranks had changed, and nobody was told"
        return end

    def update_topology(self) -> Generator[None, None, End]:
        call = self.number()
        return (yield from self.wait(call, self.core.update_topology(call)))

    def are_peers_pending(self) -> Generator[None, None, End]:
        call = self.number()
        return (yield from self.wait(call, self.core.are_peers_pending(call)))

    def sync(self) -> Generator[None, None, End]:
        revision, text = self.content
        offer = m.Offer(revision, 0, (m.Entry("x", 10, 4, False, text.encode()),))
        call, serve = self.number(), self.number("serve")
        end = yield from self.wait(call, self.core.sync(call, serve, offer))
        if isinstance(end, peer_core.Answer):
            assert isinstance(end.value, peer_core.Synced)
            if self.plan is not None and self.plan.fetch:
                assert self.staged is not None, "synchronised without what was to be fetched"
                text = self.staged
            self.content = (end.value.revision, text)
            if self.run.master.knows(self.conn):  # else the run may have gone on without it
                self.run.check_content(self)
        self.plan, self.failed_fetches = None, 0
        return end

    # ---- what the runtime would do ----

    def perform(self, actions: list[peer_core.Action]) -> None:
        for action in actions:
            match action:
                case peer_core.Send(message):
                    self.up.append(m.encode(message))
                case peer_core.RegisterOp(op):
                    assert op not in self.ops
                    self.ops[op] = SimOp(self.kinds[op])
                case peer_core.StartOp(op, seq, _, rings):
                    self.start(self.ops[op], seq, rings)
                case peer_core.CommitOp(op) | peer_core.AbortOp(op):
                    self.end(op, isinstance(action, peer_core.AbortOp))
                case peer_core.Store(_, data):
                    self.run.check_small(data)
                case peer_core.Answer(call) | peer_core.Fail(call):
                    assert call not in self.answers
                    assert call not in self.ops, "answered while the engine refers to its memory"
                    self.answers[call] = action
                case peer_core.Plan(_, plan):
                    self.plan, self.staged = plan, None
                    if plan.fetch:
                        self.perform(self.core.fetch(self.number("fetch"), plan.seq))
                case peer_core.Fetched(_, seq, ok, why):
                    if ok and self.plan is not None and self.plan.seq == seq:
                        self.staged = self.plan.digests[0].decode()
                    self.perform(self.core.fetched(seq, ok, why))

    def start(self, op: SimOp, seq: int, rings: tuple[peer_core.RingPart, ...]) -> None:
        op.seq = seq
        if op.kind == "collective":
            op.members = rings[0].members
            self.run.starters.setdefault(seq, set()).add(self.name)
        elif op.kind == "fetch":
            assert self.plan is not None
            op.holders = self.plan.holders

    def end(self, number: int, abort: bool) -> None:
        op = self.ops.get(number)
        if op is None:
            return  # settled meanwhile: the order and the event crossed
        assert not op.ending
        op.ending = True
        if abort:
            self.run.cut(op.seq)

    # ---- what can happen to the engine ----

    def can_complete(self, op: SimOp) -> bool:
        if not op.seq or op.complete or op.ending:
            return False
        if op.kind == "collective":
            allowed = self.run.cut_to.get(op.seq)
            everyone = len(self.run.starters[op.seq]) == op.members
            return everyone and (allowed is None or self.name in allowed)
        return op.kind == "fetch" and all(self.run.serves(h, op.seq) for h in op.holders)

    def can_fail(self, op: SimOp) -> bool:
        if not op.seq or op.complete or op.ending or op.kind == "serve":
            return False
        return op.kind == "collective" or not all(self.run.lives(h) for h in op.holders)

    def complete(self, number: int) -> None:
        op = self.ops[number]
        op.complete = True
        settled = op.kind == "collective" and self.run.random.random() < 0.5
        if settled:
            del self.ops[number]
        self.run.completed.setdefault(op.seq, set()).add(self.name)
        self.perform(self.core.engine_complete(number, settled, 0, 0))

    def fail(self, number: int) -> None:
        self.failed_fetches += self.ops[number].kind == "fetch"
        self.run.cut(self.ops[number].seq)
        self.ops[number].complete = True  # says no more until it is aborted
        self.perform(self.core.engine_failed(number, "a stream was lost"))

    def settle(self, number: int) -> None:
        del self.ops[number]
        self.perform(self.core.engine_settled(number, 0, 0))

    def deliver(self) -> None:
        message = m.decode_from_master(self.down.popleft())
        if isinstance(message, m.Finished):
            self.run.check_outcome(self, message)
        elif isinstance(message, m.Started) and message.data is not None:
            self.run.completed.setdefault(message.seq, set()).add(self.name)
        self.perform(self.core.received(message))


class Run:
    """One simulated run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.run = seed + 1
        self.combined: set[bytes] = set()  # results of small collectives
        self.small_max = self.random.choice([0, 1, 128])
        self.master = self._new_master(self.run)
        self.peers: list[SimPeer] = []
        self.outcomes: dict[int, bool] = {}
        self.starters: dict[int, set[int]] = {}  # seq -> peers whose engines started it
        self.completed: dict[int, set[int]] = {}  # seq -> peers that hold the whole result
        self.cut_to: dict[int, set[int]] = {}  # seq -> the only peers that can still complete it
        self.journal: set[int] = set()  # accepted peers, as the master's journal has them
        self.next_peer = 1
        self.incarnation = 0
        self.now_s = 0.0
        self.broken: deque[bytes] = deque()  # connections whose end the master does not know yet
        self.contents: dict[int, str] = {}  # revision -> the content elected
        self.notes: list[str] = []
        # steps after which a caller gives up; 0: never
        self.patience = self.random.choice([[0], [0], [0] * 9 + [5, 20, 60]])
        self.tick_s = self.random.choice([0.01, 0.01, 0.1, 1.0])
        self.failure_rate = self.random.choice([0.0, 0.0, 0.02, 0.1])

    def _new_master(
        self, number: int, journal: master_core.Journal | None = None
    ) -> master_core.Master:
        master = master_core.Master(number, self.combine, journal=journal)
        master.small_max = self.small_max
        return master

    def add(self, program: Program) -> SimPeer:
        """One more peer joins and runs `program` once it is accepted."""
        name = len(self.peers) + 1
        peer = SimPeer(name, b"c%d" % name, self)
        self.peers.append(peer)
        hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1000 + name, "", f"m{name}", b"")

        def whole() -> Generator[None, None, None]:
            call = peer.number()
            try:
                end = yield from peer.wait(call, peer.core.join(call, hello))
                if isinstance(end, peer_core.Answer):
                    yield from program(peer)
            except GivenUp:
                assert self.incarnation, "only a restarted master gives living peers up"

        peer.program = whole()
        return peer

    def kill(self, peer: SimPeer) -> None:
        """kill -9: some of what it sent last is lost, then its connection breaks."""
        peer.alive = False
        for _ in range(self.random.randint(0, len(peer.up))):
            peer.up.pop()
        for op in peer.ops.values():
            self.cut(op.seq)
        if peer.link == "up":
            self.broken.append(peer.conn)

    def restart_master(self, journaled: bool) -> None:
        """kill -9 of the master: what is under way is lost, on each connection from some point."""
        self.incarnation += 1
        self.broken.clear()
        accepted = frozenset(self.journal) if journaled else frozenset()
        if not self.journal:
            self.contents.clear()  # nobody is left to come back
        journal = master_core.Journal(self.run, self.incarnation, self.next_peer, accepted)
        self.master = self._new_master(self.random.getrandbits(40), journal if journaled else None)
        for peer in self.peers:
            if peer.alive:
                peer.up.clear()
                if peer.link == "up":
                    for _ in range(self.random.randint(0, len(peer.down))):
                        peer.down.pop()
                    peer.link = "breaking"

    def _break_link(self, peer: SimPeer) -> None:
        peer.link = "down"
        peer.up.clear()
        peer.perform(peer.core.link_lost("the connection broke"))

    def _new_link(self, peer: SimPeer) -> None:
        peer.link = "up"
        peer.links += 1
        peer.conn = b"c%d.%d" % (peer.name, peer.links)
        peer.perform(peer.core.linked())

    def _tick(self) -> None:
        self.now_s += self.tick_s
        self._perform(self.master.tick(self.now_s))

    def cut(self, seq: int) -> None:
        """Data of a collective stops to flow; who had enough already can still complete it."""
        if seq and seq not in self.cut_to:
            names = sorted(self.starters.get(seq, ()))
            self.cut_to[seq] = {n for n in names if self.random.random() < 0.3}

    def lives(self, number: int) -> bool:
        return any(peer.alive and peer.core.number == number for peer in self.peers)

    def serves(self, number: int, seq: int) -> bool:
        return any(
            op.kind == "serve" and op.seq == seq and not op.ending
            for peer in self.peers
            if peer.alive and peer.core.number == number
            for op in peer.ops.values()
        )

    def check_outcome(self, peer: SimPeer, message: m.Finished) -> None:
        seq, ok = message.seq, message.ok
        assert self.outcomes.setdefault(seq, ok) == ok, f"two outcomes of collective {seq}"
        held = self.completed.get(seq, set())
        assert not ok or peer.name in held, (
            f"{seq} committed, but peer {peer.name} lacks the result"
        )

    def combine(self, work: m.Work, parts: Sequence[bytes]) -> bytes:
        """The master's arithmetic. Peers that stand in different steps must not meet."""
        assert len(set(parts)) == 1, f"contributions of different steps were reduced: {parts}"
        assert len(parts[0]) == work.count
        result = bytes(byte ^ 255 for byte in parts[0])
        self.combined.add(result)
        return result

    def check_small(self, data: bytes) -> None:
        assert data in self.combined

    def check_content(self, peer: SimPeer) -> None:
        revision, content = peer.content
        elected = self.contents.setdefault(revision, content)
        assert elected == content, f"revision {revision} forked"

    # ---- the clockwork ----

    def _by_conn(self, conn: bytes) -> SimPeer:
        return self.peers[int(conn[1:].partition(b".")[0]) - 1]

    def _perform(self, actions: list[master_core.Action]) -> None:
        for action in actions:
            match action:
                case master_core.Send(conn, message):
                    peer = self._by_conn(conn)
                    if peer.conn == conn:  # else it is a connection of before
                        peer.down.append(m.encode(message))
                case master_core.Remember(info):
                    self.journal.add(info.peer)
                    self.next_peer = max(self.next_peer, info.peer + 1)
                case master_core.Forget(number):
                    self.journal.discard(number)
                case master_core.Note(text):
                    self.notes.append(text)
                    if "last holder" in text:  # a new history of revisions begins
                        self.contents.clear()

    def _to_master(self, peer: SimPeer) -> None:
        message = m.decode_from_peer(peer.up.popleft())
        if isinstance(message, m.Hello):
            self._perform(self.master.hello(peer.conn, message, "10.0.0.1"))
        elif isinstance(message, m.Resume):
            self._perform(self.master.resume(peer.conn, message, "10.0.0.1"))
        else:
            self._perform(self.master.received(peer.conn, message))

    def _bury(self) -> None:
        peer = self._by_conn(self.broken.popleft())
        while peer.up:
            self._to_master(peer)
        self._perform(self.master.disconnected(peer.conn, "its connection broke"))

    def _choices(self) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        for peer in self.peers:
            if peer.up and peer.link == "up":
                choices.append(lambda p=peer: self._to_master(p))  # type: ignore[misc]
            if not peer.alive:
                continue
            if peer.down:
                choices.append(peer.deliver)
            elif peer.link == "breaking":
                choices.append(lambda p=peer: self._break_link(p))  # type: ignore[misc]
            elif peer.link == "down" and peer.core.over is None:
                choices.append(lambda p=peer: self._new_link(p))  # type: ignore[misc]
            for number, op in peer.ops.items():
                if op.ending:
                    choices.append(lambda p=peer, n=number: p.settle(n))  # type: ignore[misc]
                elif peer.can_complete(op):
                    choices.append(lambda p=peer, n=number: p.complete(n))  # type: ignore[misc]
                if peer.can_fail(op) and self._may_fail(peer, op):
                    choices.append(lambda p=peer, n=number: p.fail(n))  # type: ignore[misc]
        if self.broken:
            choices.append(self._bury)
        if self.master.recovering:
            choices.append(self._tick)
        return choices

    def _may_fail(self, peer: SimPeer, op: SimOp) -> bool:
        if op.kind == "fetch":  # a dead holder, or one that has another plan: its stream breaks
            # the master hears of a death, too, before a peer has tried three times
            return peer.failed_fetches < 2 or not self.broken
        return self.random.random() < self.failure_rate

    def step(self) -> bool:
        """Programs go on as far as they can, then one thing happens; False when nothing can."""
        moved = False
        for peer in self.peers:
            if peer.alive and peer.program is not None:
                before = peer.calls
                if next(peer.program, "ended") == "ended":
                    peer.program = None
                moved = moved or peer.program is None or peer.calls != before
        choices = self._choices()
        if choices:
            self.random.choice(choices)()
        return moved or bool(choices)

    def finish(self, steps_max: int = 50_000) -> None:
        """Runs until nothing can happen any more: then all programs of living peers have ended."""
        for _ in range(steps_max):
            if not self.step():
                break
        else:
            raise AssertionError("the run does not come to rest")
        waiting = [p.name for p in self.peers if p.alive and p.program is not None]
        assert not waiting, f"peers {waiting} wait for ever"
