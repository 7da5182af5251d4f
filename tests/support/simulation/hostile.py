"""Hostile peers for the simulator: connections that say anything at all, well-formed or not.

A *script* is what strangers do, in order: each *blow* is some bytes on one of three connections,
and how many steps the honest peers take before it. Scripts are drawn at random or by hypothesis,
and a coverage-guided fuzzer makes them from a file's bytes (`unpack`). A blow that begins with
`MIMIC`, a byte that begins no message, is an order to say what would be right or nearly right just
now: so strangers get far into the protocol before they lie. `hostile_run` plays a script
against a run of honest peers and demands that nobody but the strangers comes to harm.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master.clients import FIRST
from pccl.protocol.master.effects import Drop, Effect, Send
from pccl.protocol.master.inputs import Disconnected, Hello, Received, Rejected, Resume
from pccl.protocol.peer.effects import Answer
from pccl.types import Result
from simulation.peer import End, Waits
from simulation.run import Program, SimPeer, SimulatedRun, Thread

CONNECTIONS = 3
WAIT_MAX = 15  # steps before one blow
MIMIC = 0xC1  # never used by MessagePack
MIMICRIES = 14
RESTART = bytes((MIMIC, 0xFF))  # no stranger's doing: the master is killed and comes back
_BLOW = struct.Struct(">BBH")  # connection, steps to wait, bytes


@dataclass(frozen=True)
class Blow:
    """Some bytes on a connection; none: the stranger hangs up, and dials again for its next one."""

    conn: int
    wait: int
    data: bytes


Script = list[Blow]


def pack(script: Script) -> bytes:
    """A script as bytes."""
    return b"".join(_BLOW.pack(b.conn, b.wait, len(b.data)) + b.data for b in script)


def unpack(data: bytes) -> Script:
    """A script from any bytes: what is too large wraps, what is cut off is short."""
    script, at = [], 0
    while at + _BLOW.size <= len(data):
        conn, wait, size = _BLOW.unpack_from(data, at)
        at += _BLOW.size
        script.append(Blow(conn % CONNECTIONS, wait % (WAIT_MAX + 1), data[at : at + size]))
        at += size
    return script


# ---- what strangers say ----


def number(draw: random.Random) -> int:
    """Often one that is in use just now, sometimes one at the edge of what can be written."""
    return draw.choice([0, 1, 2, 3, 4, draw.randint(1, 30), (1 << 32) + 1, (1 << 64) - 1])


def text(draw: random.Random, limit: int) -> str:
    return draw.choice(["", "x", "10.0.0.9", "\x1b[2J\n", "\U0010ffff" * limit, "y" * limit])


def info(draw: random.Random) -> m.PeerInfo:
    return m.PeerInfo(number(draw), group(draw), text(draw, 256), 1, "", text(draw, 256))


def group(draw: random.Random) -> int:
    return draw.choice([0, 0, 0, 1, (1 << 32) - 1])


def work(draw: random.Random) -> m.Spec:
    if draw.random() < 0.7:
        return m.Spec("all_reduce", 0, 10, 1000)  # what the honest peers do
    count = draw.choice([0, 0, 1, 300])
    parts = tuple(
        m.Part(draw.randint(0, 65535), number(draw), text(draw, 9), text(draw, 9))
        for _ in range(count)
    )
    return m.Spec(
        text(draw, 256),
        draw.randint(0, 65535),
        draw.randint(0, 65535),
        number(draw),
        draw.randint(0, 3),
        draw.choice([0, 0, 1, 2, (1 << 32) - 1]),
        parts,
    )


def start_vote(draw: random.Random) -> m.StartVote:
    """A vote for a collective, send or all_to_all, with numbers that may be impossible."""
    call, tag = number(draw), draw.choice([0, 0, number(draw)])
    match draw.randrange(4):
        case 0:
            send = m.Spec("send", 0, 10, 1000)
            pair = tuple(number(draw) for _ in range(draw.choice([2, 2, 2, 1])))
            return m.StartVote(call, tag, send, stuck=draw.random() < 0.5, pair=pair)
        case 1:
            size = draw.randint(1, 4)
            trade = m.Spec("all_to_all", 0, 10, 5, members=size)
            gives, takes = (tuple(number(draw) for _ in range(size)) for _ in range(2))
            return m.StartVote(call, tag, trade, gives=gives, takes=takes)
        case _:
            return m.StartVote(call, tag, work(draw))


def manifest(draw: random.Random) -> m.Manifest:
    entry = m.Entry("x", 10, 4, False, draw.choice([b"init 0", b"init 1", b"bad", b"\xff" * 32]))
    other = m.Entry(text(draw, 256), draw.randint(0, 65535), number(draw), True, b"a")
    entries = draw.choice([(entry,), (entry,), (entry,), (), (other,), (entry, other)])
    return m.Manifest(
        draw.choice([0, 1, 2, 3, 4, number(draw)]), draw.choice([0, 0, 1, 9]), entries
    )


def resume(draw: random.Random) -> m.Resume:
    done = m.Done(*(number(draw) for _ in range(2)))
    open_ = tuple(
        m.Open(
            number(draw),
            (number(draw), number(draw)),
            draw.choice([None, True, False]),
            paired=draw.random() < 0.5,
        )
        for _ in range(draw.randint(0, 2))
    )
    return m.Resume(
        protocol=m.PROTOCOL_VERSION,
        version=text(draw, 256),
        arithmetic=draw.choice([b"", b"?"]),
        run=number(draw),
        info=info(draw),
        known=tuple(info(draw) for _ in range(draw.randint(0, 2))),
        epoch=draw.randint(0, 4),
        last_seq=number(draw),
        done=done,
        open=open_,
        finished=((number(draw), True),) * draw.randint(0, 1),
    )


def package(draw: random.Random) -> m.Package:
    """Few of them contradict each other."""
    version, digest = draw.randint(1, 4), b"%d" % draw.choice([0, 0, 0, 1]) * 16
    base = draw.choice([0, 0, version - 1, 7])
    return m.Package(version, base, digest, 1, digest, draw.randint(0, 1 << 40), digest)


def publish(draw: random.Random) -> m.Publish:
    return m.Publish(number(draw), tuple(package(draw) for _ in range(draw.randint(1, 2))))


def holds(draw: random.Random) -> m.Holds:
    packages = tuple(package(draw) for _ in range(draw.randint(0, 5)))
    return m.Holds(packages, draw.choice([0, 0, 1, 5]))


def seek(draw: random.Random) -> m.Seek:
    version = draw.randint(1, 4)
    avoid = draw.choice([(), (number(draw),), (FIRST + 1,)])
    return m.Seek(version, draw.choice([0, version - 1]), avoid)


def hello(draw: random.Random) -> m.Hello:
    if draw.random() < 0.2:
        return m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "h", b"", client=True)
    if draw.random() < 0.6:
        return m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "h", b"")
    protocol = draw.choice([m.PROTOCOL_VERSION, 0, (1 << 32) - 1])
    host, ipc, machine = (text(draw, 256) for _ in range(3))
    arithmetic = draw.choice([b"", b"", b"?" * 32])
    return m.Hello(protocol, text(draw, 256), group(draw), host, 65535, ipc, machine, arithmetic)


def anything(draw: random.Random, hint: Any) -> Any:
    """Any value of this type, or any message of this kind, that can be written."""
    limits = msgspec.Meta()
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    inner = get_args(hint)
    if get_origin(hint) is tuple and inner[-1] is Ellipsis:
        least = limits.min_length or 0
        most = min(least + 3, limits.max_length or least + 3)
        return tuple(anything(draw, inner[0]) for _ in range(draw.randint(least, most)))
    if get_origin(hint) is tuple:
        return tuple(anything(draw, each) for each in inner)
    if inner:  # a union
        return anything(draw, draw.choice(inner))
    if issubclass(hint, m.Value):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{name: anything(draw, hints[name]) for name in hint.__struct_fields__})
    if issubclass(hint, Enum):
        return draw.choice([*hint])
    if hint is int:
        most = limits.le or (limits.lt or 1 << 64) - 1
        return min(most, max(limits.ge or 0, number(draw)))
    if hint is str:
        token = f"{draw.getrandbits(128):032x}"
        return token if limits.pattern else text(draw, limits.max_length or 256)
    if hint in (bytes, memoryview):
        least = limits.min_length or 0
        return draw.randbytes(draw.randint(least, min(least + 40, limits.max_length or 40)))
    return {bool: draw.random() < 0.5, float: draw.random(), NoneType: None}[hint]


def kinds(union: Any) -> list[Any]:
    """The messages of one side, by tag."""
    return sorted(get_args(union), key=lambda kind: kind.__struct_config__.tag)


Maker = Callable[[random.Random], m.PeerMessage]
CHOSEN: dict[type[m.PeerMessage], tuple[int, Maker]] = {  # weights, and what is nearly right
    m.Hello: (4, hello),
    # without `finish`, and without an `enough`: as members they may end the run, or drop others
    m.TopologyVote: (4, lambda draw: m.TopologyVote(number(draw))),
    m.PendingVote: (4, lambda draw: m.PendingVote(number(draw), False, draw.random() < 0.5)),
    m.StartVote: (6, start_vote),
    m.FinishVote: (
        8,
        lambda draw: m.FinishVote(number(draw), draw.random() < 0.7, text(draw, 4096)),
    ),
    m.SyncVote: (6, lambda draw: m.SyncVote(number(draw), manifest(draw))),
    m.Leave: (1, lambda draw: m.Leave()),
    m.Resume: (1, resume),
    m.Publish: (2, publish),
    m.Holds: (2, holds),
    m.Seek: (4, seek),
}
MESSAGES: list[tuple[int, Maker]] = [
    CHOSEN.get(kind, (3, partial(anything, hint=kind))) for kind in kinds(m.PeerMessage)
]


def garbage(draw: random.Random) -> bytes:
    """Bytes that are hardly a message: random, cut off, or with one byte changed."""
    data = bytearray(m.encode(message(draw)))
    kind = draw.randint(0, 3)
    if kind == 0:
        return draw.randbytes(draw.randint(1, 40))
    if kind == 1:
        return bytes(data[: draw.randint(1, len(data))])
    if kind == 2:
        return b"\xdd\xff\xff\xff\xff" + bytes(data)  # an array of four thousand million elements
    data[draw.randrange(len(data))] = draw.randint(0, 255)
    return bytes(data)


def message(draw: random.Random) -> m.PeerMessage:
    """Any message that can be written."""
    weights, makers = zip(*MESSAGES, strict=True)
    return draw.choices(makers, weights)[0](draw)


def draw_script(draw: random.Random, blows: int = 30) -> Script:
    """A script: strangers that mostly say hello first, then anything, then the same again."""
    script: Script = []
    greeted: set[int] = set()
    for _ in range(blows):
        conn, wait = draw.randrange(CONNECTIONS), draw.randint(0, WAIT_MAX)
        kind = draw.random()
        if conn not in greeted and kind < 0.9:
            greeted.add(conn)
            data = m.encode(hello(draw))
        elif kind < 0.05:
            greeted.discard(conn)
            data = b""
        elif kind < 0.1:
            data = garbage(draw)
        elif kind < 0.2 and script:
            data = draw.choice(script).data  # a replay
        elif kind < 0.22:
            data = RESTART
        elif kind < 0.7:
            data = bytes((MIMIC, draw.choice([0, 0, 0, draw.randrange(MIMICRIES)])))
        else:
            data = m.encode(message(draw))
        script.append(Blow(conn, wait, data))
    return script


# ---- honest peers among them ----


# Reasons for which a lying member can get an honest peer dropped. The peer that offers the highest
# revision decides the form of the shared state. If transfers between two peers keep failing, the
# master cannot know which is to blame, and drops the later one. And the first peer of an empty run
# decides which arithmetic is right.
OUTVOTED = re.compile(
    "its shared state is not that of|it took part in . failed transfers|this machine's arithmetic"
    "|peer . \\([^)]*\\) could not reach"
)


def insist(call: Callable[[], Waits[End]]) -> Waits[None]:
    """Makes a call again and again while others spoil it."""
    while not isinstance((yield from call()), Answer):
        pass


def synchronize(peer: SimPeer) -> Waits[None]:
    """Synchronizes until it succeeds; without a holder, a torn peer loads a checkpoint."""
    while not isinstance(end := (yield from peer.sync()), Answer):
        if end.result is Result.NO_SHARED_STATE_AVAILABLE:
            peer.load()


def survivor(steps: int) -> Program:
    """A trainer that tries each call until it succeeds, as all others do for the same call."""

    def program(peer: SimPeer) -> Thread:
        yield from synchronize(peer)
        while peer.content[0] < steps:
            if peer.content[0] % 3 == 0:
                yield from insist(peer.optimize_topology)
            while peer.machine.knowledge.world.local_size > 1:
                if isinstance((yield from peer.all_reduce()), Answer):
                    break
            peer.content = (peer.content[0] + 1, peer.content[1])
            pending = yield from peer.are_peers_pending()
            while not isinstance(pending, Answer):
                pending = yield from peer.are_peers_pending()
            if pending.value:
                yield from insist(peer.update_topology)
            yield from synchronize(peer)
        peer.leave()

    return program


class HostileRun(SimulatedRun):
    """A run with strangers."""

    def __init__(
        self,
        seed: int,
        script: Script,
        journaled: bool = True,
        straggler_s: float | None = None,
    ) -> None:
        super().__init__(seed, journaled, straggler_s)
        self._script = list(reversed(script))
        self._due = 0  # steps until the next blow
        self._generation = [0] * CONNECTIONS
        self._ignored: set[bytes] = set()
        self._heard: list[m.PeerMessage] = []  # messages of honest peers, without hellos
        self._told: dict[bytes, int] = {}  # the number of what a stranger was last asked to do
        self._names: dict[int, m.PeerInfo] = {}  # of the strangers, as members
        self._plan = m.Plan(0, (), (), 0)
        self.members_max = 0  # strangers that were members at the same time

    def step(self) -> bool:
        """A step of the run, then the strangers' blow if it is due. At the end all strangers hang
        up."""
        moved = super().step()
        self._due -= 1
        if self._script and (self._due <= 0 or not moved):
            blow = self._script.pop()
            self._strike(blow)
            self._due = self._script[-1].wait if self._script else 0
            if not self._script:
                self.hang_up()
            return True
        return moved

    def restart_master(self) -> None:
        super().restart_master()
        self._generation = [generation + 1 for generation in self._generation]

    def hang_up(self) -> None:
        """All strangers go."""
        for conn in range(CONNECTIONS):
            self._strike(Blow(conn, 0, b""))

    def _strike(self, blow: Blow) -> None:
        conn = b"h%d.%d" % (blow.conn, self._generation[blow.conn])
        if blow.data == RESTART:
            self.restart_master()
        elif not blow.data:
            self._generation[blow.conn] += 1
            self.perform(self.master.feed(Disconnected((conn,), "its connection broke")))
        elif conn not in self._ignored:
            self.perform(self._hear(conn, blow.data))

    def _to_master(self, peer: SimPeer) -> None:
        message = m.decode_from_peer(peer.up[0])
        if not isinstance(message, m.Hello | m.Resume):
            self._heard.append(message)
        super()._to_master(peer)

    def _mimic(self, conn: bytes, which: int) -> m.PeerMessage:
        """A message that is right, or nearly right, just now."""
        seq = self._told.get(conn, 0)
        why = "z" * 4096
        return [
            self._heard[-1],
            self._heard[0],
            m.FinishVote(seq, True),
            m.FinishVote(seq, True, why),
            m.FinishVote(seq, False, why),
            m.Progress(seq, 500),
            m.FetchedVote(seq, True),
            m.FetchedVote(seq, False, why),
            m.Withdraw(getattr(self._heard[-1], "call", 0)),
            m.Withdraw(0, seq),
            self._resume(conn, seq),
            m.Measured(seq, 1 << 63, 1 << 63),
            m.Stalled(self._plan.epoch, 0, why),
            m.Stalled(self._plan.epoch, seq, why),
        ][which % MIMICRIES]

    def _resume(self, conn: bytes, seq: int) -> m.Resume:
        """A member of before comes back. It knows enough to, and lies about its own vote only."""
        plan, me = self._plan, self._names.get(int(conn[1:2]), m.PeerInfo(9, 0, "", 1, "", "h"))
        open_ = m.Open(seq, tuple(info.peer for info in plan.peers), True)
        known = (m.PROTOCOL_VERSION, "1", b"", self.run, me, plan.peers, plan.epoch, seq)
        return m.Resume(*known, m.Done(), (open_,), ())

    def _hear(self, conn: bytes, data: bytes) -> list[Effect]:
        if data[0] == MIMIC and len(data) == 2 and self._heard:
            data = m.encode(self._mimic(conn, data[-1]))
        try:
            message = m.decode_from_peer(data)
        except m.ProtocolError as error:
            return self.master.feed(Rejected(conn, str(error)))
        if isinstance(message, m.Hello):
            return self.master.feed(Hello(conn, message, "10.0.0.9"))
        if isinstance(message, m.Resume):
            if self.master.deserted(message):
                self._begin_anew()
            return self.master.feed(Resume(conn, message, "10.0.0.9"))
        return self.master.feed(Received(conn, message))

    def perform(self, actions: Iterable[Effect]) -> None:
        mine = []
        for action in actions:
            conn = getattr(action, "conn", b"")
            if not conn.startswith(b"h"):
                if isinstance(action, Drop):
                    self._check_drop(conn, action.why)
                mine.append(action)
            elif isinstance(action, Drop):
                self._ignored.add(conn)
            elif isinstance(action, Send):
                sent = m.decode_from_master(m.encode(action.message))
                if isinstance(sent, m.Started | m.SyncPlan | m.Probe | m.Interrupt):
                    self._told[conn] = sent.seq
                if isinstance(sent, m.Plan):
                    self._plan = sent
                    found = [p.info for p in self.master.peers.values() if p.conn == conn]
                    self._names.update((int(conn[1:2]), info) for info in found)
                if isinstance(sent, m.Started):  # its engine takes its part, whatever it says
                    name = -1 - int(conn[1:2])
                    self.starters.setdefault((self.master.run.number, sent.seq), set()).add(name)
        strangers = sum(p.accepted and p.conn[:1] == b"h" for p in self.master.peers.values())
        self.members_max = max(self.members_max, strangers)
        super().perform(mine)

    def check_over(self, peer: SimPeer, why: str) -> None:
        if not OUTVOTED.search(why):
            super().check_over(peer, why)

    def _check_drop(self, conn: bytes, why: str) -> None:
        """An honest peer is dropped only where it has left or died, or may be."""
        peer = self._by_conn(conn)
        gone = peer.machine.over is not None or not peer.alive or peer.conn != conn
        if not gone and not (peer.severed and "connection broke" in why):
            self.check_over(peer, why)


def hostile_run(script: Script, seed: int = 0, honest: int = 2) -> HostileRun:
    """Plays a script against `honest` peers, to the end.

    Raises:
        AssertionError: an honest peer was harmed, or somebody remembers what it should forget.
    """
    run = HostileRun(seed, script)
    for index in range(honest):
        run.add(survivor(6)).content = (0, f"init {index % 2}")
    run.finish()
    run.check_empty()
    return run
