"""State machines of a master and a peer that a test feeds one message at a time, without queues."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.effects import Dial, Drop, Effect, Note, Send
from pccl.protocol.master.inputs import Hello, Received, Resume, Tick
from pccl.protocol.peer import Peer
from pccl.protocol.topology import Link, hops
from pccl.runtime.inline_collectives import combine

RUN = 0x1234_5678_9ABC_DEF0  # large enough to be found in what is said
SECRET = b"a secret"
WORK = m.Spec("all_reduce", 0, 10, 1000)
ENTRY = m.Entry("x", 10, 4, False, b"content")
OTHER = m.Entry("x", 10, 4, False, b"other content")


class ManualRun:
    """A master and accepted peers "1", "2", ... of group 0, without queues."""

    def __init__(self, peers: int = 2) -> None:
        self.master = Master(RUN, combine, secret=SECRET)
        self.told: dict[bytes, list[m.MasterMessage]] = {}
        self.dropped: dict[bytes, str] = {}
        self.notes: list[str] = []
        self.dials: list[int] = []
        for i in range(1, peers + 1):
            self.join(b"%d" % i)
        if peers:
            self.say(b"1", m.TopologyVote(1))

    def perform(self, actions: list[Effect]) -> None:
        for action in actions:
            match action:
                case Send(conn, message):
                    decoded = m.decode_from_master(m.encode(message))
                    self.told.setdefault(conn, []).append(decoded)
                case Drop(conn, why):
                    self.dropped[conn] = why
                case Dial(info):
                    self.dials.append(info.peer)
                case Note(text):
                    self.notes.append(text)

    def join(self, conn: bytes, **fields: object) -> None:
        known = {"protocol": m.PROTOCOL_VERSION, "version": "1", "group": 0, "host": ""}
        place = {"port": 1, "ipc": "", "machine": "x", "arithmetic": b""}
        hello = m.Hello(**{**known, **place, **fields})  # type: ignore[arg-type]
        self.perform(self.master.feed(Hello(conn, hello, "10.0.0.1")))

    def say(self, conn: bytes, message: m.PeerMessage) -> None:
        self.perform(self.master.feed(Received(conn, message)))

    def everyone(self, message: m.PeerMessage) -> None:
        for peer in list(self.master.peers.values()):
            self.say(peer.conn, message)

    def last(self, conn: bytes) -> m.MasterMessage:
        """The last message to a peer about its own calls."""
        return next(one for one in reversed(self.told[conn]) if not isinstance(one, m.Failed))

    def start(self) -> int:
        """Everyone starts a collective; its number."""
        self.everyone(m.StartVote(2, 0, WORK))
        started = self.last(b"1")
        assert isinstance(started, m.Started)
        return started.seq


def resume(number: int, run: int = 5, **fields: object) -> m.Resume:
    info = m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x")
    told = {"known": (info,), "epoch": 1, "last_seq": 3, "done": m.Done(), "open": ()}
    head = {"protocol": m.PROTOCOL_VERSION, "version": "1", "arithmetic": b"", "run": run}
    rest = {"info": info, "finished": ()}
    return m.Resume(**{**head, **rest, **told, **fields})  # type: ignore[arg-type]


def infos(*numbers: int) -> tuple[m.PeerInfo, ...]:
    return tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in numbers)


def member(number: int = 1, size: int = 2, epoch: int = 1, sync: int = 0) -> Peer:
    """An accepted peer of a group of this size, with so many synchronizations behind it."""
    peer = Peer("m:48148")
    peer.join(1, m.Hello(m.PROTOCOL_VERSION, "1", 0, "h", 1000 + number, "", f"m{number}", b""))
    known = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}") for n in range(1, size + 1))
    ring = m.Ring(tuple(info.peer for info in known), 1)
    for message in (
        m.Welcome(number),
        m.Plan(epoch, known, (ring,), 0),
        m.WorldSizes(m.World(size, size, 1, size)),
        m.Admitted(7, m.Done(sync=sync)),
    ):
        peer.received(message)
    return peer


class RestartedRun(ManualRun):
    """A master to which peers come back."""

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__(0)
        self.master = Master(1, combine, journal=journal, secret=b"s")
        self.now_s = 0.0

    def back(self, conn: bytes, number: int, run: int, *known: int, **fields: object) -> None:
        said = resume(number, run, known=infos(*(known or (number,))), **fields)
        self.perform(self.master.feed(Resume(conn, said, "10.0.0.1")))

    def wait(self, seconds: float) -> None:
        for _ in range(11):
            self.perform(self.master.feed(Tick(self.now_s)))
            self.now_s += seconds / 10

    def refused(self, conn: bytes) -> m.Refused:
        told = self.last(conn)
        assert isinstance(told, m.Refused)
        return told


NEAR = Link(1_000_000_000, 2_000)  # within a site: 8 Gbit/s, 0.4 ms
TRIPS = 5  # that the first bytes of a probe take


@dataclass
class SitesRun:
    """A group of `peers` peers at `sites` sites, `machines` of them on each machine."""

    peers: int
    sites: int
    machines: int = 1
    seed: int = 1
    probes: int = 0
    slots: int = 0
    seconds: float = 0.0  # of the master, while links are measured and rings are chosen
    orders: list[tuple[m.Ring, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.places = [(draw.random(), draw.random()) for _ in range(self.sites)]
        self.rates = [
            [draw.randint(10_000_000, 100_000_000) for _ in range(self.sites)]
            for _ in range(self.sites)
        ]
        where = [i * self.sites // self.peers for i in range(self.peers)]
        draw.shuffle(where)
        self.master = Master(1, combine, secret=b"s")
        self.site_of: dict[int, int] = {}
        self._told: list[tuple[int, m.Probe]] = []
        on: dict[int, int] = {}
        for i, site in enumerate(where):
            self.site_of[i + 1] = site
            on[site] = on.get(site, -1) + 1
            machine = f"{site}.{on[site] // self.machines}"
            ipc = "/x" if self.machines > 1 else ""
            hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, ipc, machine, b"")
            self._perform(self.master.feed(Hello(b"%d" % (i + 1), hello, "10.0.0.1")))
        self._perform(self.master.feed(Received(b"1", m.TopologyVote(1))))

    def link(self, a: int, b: int) -> Link:
        """From one peer to another."""
        one, other = self.site_of[a], self.site_of[b]
        if one == other:
            return NEAR
        far = math.dist(self.places[one], self.places[other])
        return Link(self.rates[one][other], TRIPS * int(10_000 + 150_000 * far))

    def optimize(self) -> tuple[int, ...]:
        """Has the links measured; the ring that follows."""
        began_s = time.process_time()
        for number in self.site_of:
            self._perform(self.master.feed(Received(b"%d" % number, m.OptimizeVote(2))))
        while self._told:
            told, self._told = self._told, []
            self.slots += 1
            for number, probe in told:
                self.probes += 1
                link = self.link(probe.peers[0], number)
                said = m.Measured(probe.seq, link.rate, link.delay_us)
                self._perform(self.master.feed(Received(b"%d" % number, said)))
        self.seconds = time.process_time() - began_s
        (ring,) = self.master.run.groups[0].planned
        return ring.order

    def rate(self, order: tuple[int, ...]) -> int:
        """The rate of the slowest link of a ring."""
        return min(self.link(*hop).rate for hop in hops(order))

    def round_s(self, order: tuple[int, ...]) -> float:
        """Once around a ring: half a round trip for each link."""
        return sum(self.link(*hop).delay_us / TRIPS / 2 * 1e-6 for hop in hops(order))

    def _perform(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, m.Probe):
                self._told.append((int(action.conn), action.message))
