"""A simulated peer: the real client and state machine, and programs in place of user threads."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from pccl.ext import ffi
from pccl.protocol import messages as m
from pccl.protocol.peer import Peer
from pccl.protocol.peer.effects import Answer, Fail, Measure, Reduced, Synced
from pccl.protocol.rounds import Grace
from pccl.protocol.tuning import choose
from pccl.runtime.client.call import Call, Steps
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.memory import Operand, Operands
from pccl.runtime.client.sync import Synchronization
from pccl.runtime.config import Config
from pccl.tensors import Buffer
from pccl.types import DataType
from simulation.conversation import Conversation
from simulation.engine import SimEngine
from simulation.system import SimDealer, SimSystem, SimWaiter

if TYPE_CHECKING:
    from simulation.run import SimulatedRun

T = TypeVar("T")
End = Answer | Fail
Tag = int | tuple[int, int, int]  # of a send: sender, receiver and tag
Waits: TypeAlias = Generator[Call, None, T]  # yields the call that it waits for
Thread: TypeAlias = Waits[Any]
Program = Callable[["SimPeer"], Thread]
WORK = m.Spec("all_reduce", 0, 10, 1000)
CONTENT_BYTES = 64
IDLE_S = 10.0  # longer than the time limit of a stream
CONFIG = Config(name="simulated", advertise=("10.0.0.1",), master_patience_s=600_000.0)
MASTER = "::1"  # never connected


class Ended(Exception):
    """This peer is out of the run: its threads end."""


@dataclass
class OpenCall:
    """A call that a thread waits for."""

    call: Call
    what: str
    tag: Tag
    spec: m.Spec | None

    @property
    def place(self) -> tuple[str, Tag]:
        return self.what, self.tag


@dataclass(eq=False)
class SimPeer:
    """A peer: its programs, its client and engine, and the two queues of its connection."""

    name: int
    conn: bytes
    run: SimulatedRun
    hello: m.Hello
    programs: tuple[Program, ...] = ()
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    arrived: deque[bytes] = field(default_factory=deque)  # and not read
    alive: bool = True
    frozen: bool = False
    severed: bool = False  # cut off once: the master may have dropped it
    left: bool = False  # by its own will
    closed: bool = False  # its client has ended
    connection: str = "up"  # "breaking": the master is dead; "down": and this peer knows
    connections: int = 1
    now_s: float = 0.0  # its clock
    pause_s: float | None = None  # how long its control thread waits
    threads: set[Thread] = field(default_factory=set)  # that have not ended
    ready: deque[Thread] = field(default_factory=deque)
    waiters: dict[int, Thread] = field(default_factory=dict)  # by call
    alarms: dict[int, float] = field(default_factory=dict)  # call -> when its caller goes on
    calls_open: dict[int, OpenCall] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)  # calls besides which it makes no other
    tags: set[Tag] = field(default_factory=set)  # launched and not awaited
    deadlines: dict[int, int] = field(default_factory=dict)  # call -> step at which it is withdrawn
    given_up: set[int] = field(default_factory=set)  # calls that were withdrawn
    patient: dict[int, int] = field(default_factory=dict)  # call -> step at which it is so no more
    walled: bool = False  # no peer can open a stream to it
    caged: bool = False  # it can open no stream
    cut_from: set[int] = field(default_factory=set)  # names of those that it cannot open one to
    posthumous: set[int] = field(default_factory=set)  # calls made after it was out of the run
    dialled: str | None = ""  # what comes of the master's dial to it
    revision: int = 0
    torn: bool = False  # a synchronization that failed may have overwritten the content
    conversation: Conversation = field(default_factory=Conversation)

    def __post_init__(self) -> None:
        self.waiter, self.engine = SimWaiter(self), SimEngine(self)
        self.dealer: SimDealer = None  # type: ignore[assignment]
        self.memory = bytearray(CONTENT_BYTES)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.memory)))
        self.content = (0, "new")
        self.checkpoint = bytes(self.memory)
        config = dataclasses.replace(CONFIG, outgoing=self.outgoing, relay=self.relay)
        place = 48148, MASTER, config, None, self.group, (self.team, self.hello.team_size), 0
        self.client = PeerClient(MASTER, *place, system=SimSystem(self))
        self.client.hello = self.hello
        self.machine: Peer = self.client.peer
        self.work()

    @property
    def group(self) -> int:
        return self.hello.group

    @property
    def team(self) -> int:
        return self.hello.team

    @property
    def outgoing(self) -> bool:
        """Whether no peer can open a stream to it."""
        return self.hello.outgoing

    @property
    def relay(self) -> bool:
        """Whether it relays for such peers."""
        return self.hello.relay > 0

    # ---- the control thread ----

    def work(self) -> None:
        """The control thread works until it would wait."""
        while self.waiter.pending or self.pause_s == 0.0:
            goes_on = self.client.turn(self.waiter.wait(0.0))
            if self.client.failure is not None:
                raise self.client.failure
            self.pause_s = self.client.pause()
            if not goes_on:
                left = self.engine.ops, self.engine.streams
                assert not any(left), f"peer {self.name} has left, and its engine has {left}"
                self.closed, self.pause_s = True, None
                self.client.end()
        for number, one in self.calls_open.items():
            if number in self.waiters and one.call.has_notes:
                self.ready.append(self.waiters.pop(number))

    def wake(self) -> None:
        """The control thread works, unless the draw lets another go first."""
        if self.waiter.pending and self.run.random.random() < 0.8:
            self.work()

    @property
    def due_s(self) -> float:
        """In how many seconds something happens by itself."""
        times = [at - self.now_s for at in self.alarms.values()]
        if self.pause_s is not None:
            times.append(self.pause_s)
        return max(0.0, min(times, default=math.inf))

    def pass_time(self, seconds: float | None = None) -> None:
        """Its clock goes on by some time, or until something happens."""
        seconds = self.due_s if seconds is None else seconds
        if math.isfinite(seconds):
            self.now_s += seconds
            self.waiter.wake()
            self.work()
            for number in [n for n, at in self.alarms.items() if at <= self.now_s]:
                del self.alarms[number]
                if number in self.waiters:
                    self.ready.append(self.waiters.pop(number))

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
        if self.calls_open and self.run.random.random() < 0.005:
            one = self.calls_open[self.run.random.choice(list(self.calls_open))]
            self.client.inquire(one.call)
        if not self.ready:
            return bool(late) or hurried
        while self.ready:
            thread = self.ready.popleft()
            try:
                call = next(thread)
                while call.has_notes:
                    call = next(thread)
                self.waiters[call.number] = thread
            except (StopIteration, Ended):
                self.threads.discard(thread)
            self.wake()
        return True

    def time_out(self, number: int) -> None:
        """The caller gives up."""
        one = self.calls_open[number]
        self.run.say(f"peer {self.name} gives up", one.what)
        self.deadlines.pop(number, None)
        self.given_up.add(number)
        self.client.time_out(one.call, "its caller gave up")
        self.work()
        self.check_ends(number, self.connection == "down")

    def cancel(self, number: int) -> None:
        """An exception takes the caller away; it comes back, and goes on with its program."""
        self.run.say(f"an exception takes the caller of peer {self.name} out of", number)
        self.deadlines.pop(number, None)
        self.given_up.add(number)
        self.client.abandon(self.calls_open[number].call)
        self.work()
        self.check_ends(number, True)

    def check_ends(self, number: int, alone: bool) -> None:
        """`alone`: whatever the master does, a call that was given up ends with its ops."""
        one = self.calls_open.get(number)  # that of connect is ended by the facade, which leaves
        ending = any(op.ending for op in self.engine.ops.values())
        left = one is None or one.what == "connect"
        assert not alone or left or ending, "who gave up waits for the master"

    def hurry(self, step: float = math.inf) -> bool:
        """Hurries the calls whose patience ends at that step; returns whether there are any."""
        hasty = [number for number, end in self.patient.items() if end <= step]
        for number in hasty:
            del self.patient[number]
            self.client.post(partial(self.machine.hurry, number))
            self.wake()
        return bool(hasty)

    @property
    def single(self) -> bool:
        """Whether it has one thread, which never gives up."""
        return len(self.programs) == 1 and not any(self.run.patience)

    # ---- calls, for programs ----

    def enter(
        self, what: str, tag: Tag = 0, spec: m.Spec | None = None, stuck: bool = False
    ) -> Call:
        """A new call, which is to be made at once."""
        self.run.say(f"peer {self.name} calls {what}", f"tag {tag}" if spec else "")
        call = self.client.call()
        call.callbacks.append(self.answered)
        self.calls_open[call.number] = OpenCall(call, what, tag, spec)
        self.stuck |= {call.number} if stuck else set()
        if self.machine.over is not None:
            self.posthumous.add(call.number)
        patience = self.run.random.choice(self.run.patience)
        if patience:
            self.deadlines[call.number] = self.run.steps + patience
        return call

    def answered(self, end: End) -> None:
        """A call has ended."""
        assert end.call not in self.engine.ops, "answered while the engine refers to its memory"
        one = self.calls_open.pop(end.call)
        self.run.check_condemned(self, end.call, end)
        self.run.say(f"peer {self.name} returns from {one.what} (tag {one.tag}):", end)
        self.deadlines.pop(end.call, None)
        self.alarms.pop(end.call, None)
        self.patient.pop(end.call, None)
        if end.call in self.waiters:
            self.ready.append(self.waiters.pop(end.call))

    def wait(self, call: Call) -> Waits[End]:
        """Waits for the end of a call."""
        while call.end is None:
            if call.next(0.0) is None:
                yield call
        return self.ended(call.end)

    def follow(self, call: Call, steps: Steps[T]) -> Waits[T]:
        """Waits for the notes of a call, as `Deadline.follow` does."""
        try:
            seconds = next(steps)
            while True:
                until_s, note = self.now_s + seconds, call.next(0.0)
                while note is None and self.now_s < until_s:
                    if math.isfinite(until_s):
                        self.alarms[call.number] = until_s
                    yield call
                    note = call.next(0.0)
                self.alarms.pop(call.number, None)
                seconds = steps.send(note)
        except StopIteration as end:
            result: T = end.value
            return result

    def ended(self, end: End) -> End:
        """The end of a call, unless this peer is out of the run."""
        if self.machine.over is not None and isinstance(end, Fail):
            self.run.check_over(self, self.machine.over.why)
            if end.call not in self.posthumous:
                self.run.check_verdict(end, self.machine.over)
            raise Ended
        return end

    def join(self) -> Waits[End]:
        call = self.enter("connect")
        self.client.join(call)
        return (yield from self.wait(call))

    def launch(
        self, tag: int = 0, work: m.Spec = WORK, stuck: bool = False, data: bytes | None = None
    ) -> Call:
        """With `data`, which must be the same for all peers, a small one of `len(data)` bytes."""
        self.tags.add(tag)
        if data is None:
            return self._collective(tag, work, stuck, ())
        memory = bytearray(data)
        asked = m.Spec("all_reduce", 0, 0, len(data))
        found = Buffer(
            int(ffi.cast("uintptr_t", ffi.from_buffer(memory))), len(data), DataType.UINT8, memory
        )
        return self._collective(tag, asked, stuck, (Operand(found, found, len(data)),))

    def _collective(
        self, tag: int, work: m.Spec, stuck: bool, each: tuple[Operand, ...], pair: Any = ()
    ) -> Call:
        nbytes = each[0].send.nbytes if each else 0
        tuning = choose(work, nbytes, self.client.knowledge.conditions)
        if not each:
            tuning = dataclasses.replace(tuning, spec=work, inline=False)
        place = (*pair, tag) if pair else tag
        call = self.enter("send" if pair else work.what, place, tuning.spec, stuck)
        operands = Operands(tuning.spec, each, pair=pair)
        self.client.collective(call, tag, operands, tuning, stuck)
        return call

    def awaits(self, call: Call, tag: Tag) -> Waits[End]:
        end = yield from self.wait(call)
        self.tags.discard(tag)
        return end

    def all_reduce(
        self, tag: int = 0, work: m.Spec = WORK, data: bytes | None = None
    ) -> Waits[End]:
        return (yield from self.awaits(self.launch(tag, work, self.single, data), tag))

    def launch_send(self, giver: int, taker: int, tag: int, work: m.Spec, stuck: bool) -> Call:
        """Either side of a send; both stand in the same call."""
        self.tags.add((giver, taker, tag))
        return self._collective(tag, work, stuck, (), (giver, taker))

    def broadcast(self, members: int) -> Waits[End]:
        parts = (m.Part(10, 7, "b"), m.Part(3, 1000, "w"))
        work = m.Spec("broadcast", 0, 0, 0, root=members - 1, members=members, parts=parts)
        end = yield from self.all_reduce(work=work)
        if isinstance(end, Answer):
            assert isinstance(end.value, Reduced)
            assert end.value.world_size == members, "ranks had changed, and nobody was told"
        return end

    def update_topology(self) -> Waits[End]:
        call = self.enter("update_topology")
        self.client.begin(call, self.machine.update_topology)
        return (yield from self.wait(call))

    def finish(self) -> Waits[End]:
        call = self.enter("finish")
        self.client.begin(call, self.machine.finish)
        return (yield from self.wait(call))

    def are_peers_pending(self) -> Waits[End]:
        call = self.enter("are_peers_pending", stuck=self.single)
        patience = self.run.random.choice([0, 0, 5, 50])
        if patience:
            self.patient[call.number] = self.run.steps + patience
        graces: list[Grace | None] = self.run.graces
        grace = self.run.random.choice(graces) if len(graces) > 1 else None
        votes = self.single, bool(patience), grace
        self.client.begin(call, lambda number: self.machine.are_peers_pending(number, *votes))
        return (yield from self.wait(call))

    def optimize_topology(self) -> Waits[End]:
        call = self.enter("optimize_topology")
        self.client.optimize(call, [], None)
        return self.ended((yield from self.follow(call, self._measure(call))))

    def _measure(self, call: Call) -> Steps[End]:
        """A probe takes time; only its end is simulated."""
        seq = 0
        while True:
            match (yield self.run.random.choice([0.1, 1.0]) if seq else math.inf):
                case Measure(_, number, holders):
                    seq = number if holders else 0
                    if holders:
                        self.client.fetch(call, number, [], 0, None)
                case Answer() | Fail() as end:
                    return end
                case _ if seq:  # time is up, all data is here, or no peer sends
                    rate = self.run.random.choice([0, 1, 10, 100]) * 1000
                    self.client.post(partial(self.machine.measured, seq, rate, rate))
                    seq = 0

    def sync(self, entry: str = "x", strategy: int = 0, min_peers: int = 0) -> Waits[End]:
        call = self.enter("sync_shared_state")
        memory = Buffer(self.address, CONTENT_BYTES // 4, DataType.FLOAT, self.memory)
        entries = (m.Entry(entry, DataType.FLOAT.value, 4, False, b""),)
        manifest = m.Manifest(self.revision, strategy, entries, False, min_peers, self.torn)
        one = Synchronization(
            self.client, call, manifest, [memory], self.memory, self.tear, self.adopt
        )
        end: Synced | Fail = yield from self.follow(call, one.run())
        assert one.error is None
        if isinstance(end, Fail):
            return self.ended(end)
        assert "torn" not in self.content[1], "what was overwritten in part counts as whole"
        self.run.check_content(self)
        return Answer(call.number, end)

    # its shared state is a revision, and a text in `memory`

    @property
    def content(self) -> tuple[int, str]:
        return self.revision, self.memory.decode().rstrip()

    @content.setter
    def content(self, content: tuple[int, str]) -> None:
        self.revision, text = content
        self.memory[:] = text.encode().ljust(CONTENT_BYTES)

    def tear(self, entries: object) -> None:
        if not self.torn:
            self.checkpoint = bytes(self.memory)
        self.torn = True

    def load(self) -> None:
        """It loads its checkpoint, which is as old as its content before a call has torn it."""
        self.memory[:], self.torn = self.checkpoint, False

    def adopt(self, synced: Synced, overwritten: object) -> None:
        self.revision, self.torn = synced.revision, False

    def leave(self) -> None:
        self.left = True
        self.client.leave("done")
        self.work()

    # ---- its connection ----

    def send(self, message: m.PeerMessage) -> None:
        """A message is on its way to the master."""
        if self.connection != "down":
            self.up.append(m.encode(message))

    def hear(self, message: m.MasterMessage) -> None:
        """A message of the master is read."""
        self.run.say(f"master -> peer {self.name}:", message)
        self.conversation.heard(message)
        self.run.check_told(self, message)
        if isinstance(message, m.Started) and message.data is not None:
            key = self.machine.knowledge.run, message.seq
            self.run.completed.setdefault(key, set()).add(self.name)

    def deliver(self) -> None:
        """A message of the master arrives."""
        self.arrived.append(self.down.popleft())
        self.waiter.notify(self.dealer.socket)
        self.wake()

    def hang_up(self) -> None:
        """Its client closes the connection."""
        if self.connection == "up" and self.conn not in self.run.broken:
            self.run.broken.append(self.conn)

    # ---- what it stands in ----

    @property
    def present(self) -> bool:
        """Whether it is an accepted peer that lives, as far as it knows itself."""
        return self.alive and self.machine.knowledge.accepted and self.machine.over is None

    @property
    def stuck_in(self) -> set[tuple[str, Tag]]:
        """Where it has said that it makes no other call."""
        return {self.calls_open[call].place for call in self.stuck & self.calls_open.keys()}

    @property
    def stands_in(self) -> set[tuple[str, Tag]]:
        """The rounds that it has entered and that have not ended."""
        return {one.place for one in self.calls_open.values()}

    def waits(self) -> list[tuple[str, Tag, bool]]:
        """Its waiting calls: the call, its tag, and whether its round is over but not the call."""
        transfer = self.machine.transfers.current
        started = {c.call for c in self.machine.collectives.started.values()}
        if transfer is not None and transfer.planned:
            started.add(transfer.call)
        return [(*one.place, number in started) for number, one in self.calls_open.items()]

    def check_empty(self) -> None:
        """Its threads have ended, so nothing may be left of any call."""
        self.leave()
        assert self.machine.idle, f"peer {self.name} has left, and is not idle"
        left = {
            f"{part.lstrip('_')}.{name.lstrip('_')}": len(table)
            for part, owner in vars(self.machine).items()
            if hasattr(owner, "__dict__") and part != "knowledge"
            for name, table in vars(owner).items()
            if isinstance(table, dict | list | set) and table
        }
        assert not left, f"peer {self.name} still has {left}"
        assert not self.calls_open, f"peer {self.name} still stands in {self.stands_in}"


def brief(value: object) -> str:
    """A message or an answer on one line, without what all have in common."""
    if isinstance(value, m.PeerInfo):
        return str(value.peer)
    if isinstance(value, Answer):
        return str(value.value)
    if isinstance(value, Fail):
        return f"{value.fault.name} {value.result.name}: {value.why}"
    if isinstance(value, msgspec.Struct):
        fields = [
            f"{f.name}={brief(getattr(value, f.name))}"
            for f in msgspec.structs.fields(value)
            if f.name not in ("protocol", "version", "machine", "arithmetic", "port", "host", "ipc")
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple):
        return f"({' '.join(map(brief, value))})"
    return str(value)
