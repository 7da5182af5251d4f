"""A master and its clients without sockets: messages in any legal order, an engine that obeys.

The engine moves a package when both ends have started it on streams to each other, with one slot.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol import weights
from pccl.protocol.master import Master
from pccl.protocol.master import effects as masters
from pccl.protocol.master.clients import FIRST, PLACES_SMALL, SMALL_BYTES
from pccl.protocol.master.inputs import Disconnected, Hello, Received
from pccl.protocol.peer import effects as common
from pccl.runtime.inline_collectives import combine


def package(version: int, base: int, content: bytes = b"") -> m.Package:
    """A package; what is whole is ten times as large."""
    digest = (content or b"%d" % version).ljust(16, b"-")
    nbytes = SMALL_BYTES // 2 if base else 5 * SMALL_BYTES
    return m.Package(version, base, digest, 1, digest, nbytes, digest)


@dataclass
class Transfer:
    """An op of an engine, and its ends: the numbers of the others, by slot and stream."""

    package: m.Package
    serves: bool
    ends: dict[int, int] = field(default_factory=dict)  # stream -> slot


class Node:
    """A client and its engine."""

    def __init__(self, name: int, follows: bool = True, relays: bool = True) -> None:
        self.hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1000 + name, "", "", b"", client=True)
        self.name, self.lies, self.alive = name, False, True
        self.machine = weights.WeightsMachine(follows, relays, lambda package: True)
        self.conn = b""
        self.out: deque[m.PeerMessage] = deque()
        self.into: deque[m.MasterMessage] = deque()
        self.ops: dict[int, Transfer] = {}
        self.streams: dict[int, tuple[int, int]] = {}  # receiver and nonce
        self.door = 0
        self.answers: dict[int, str] = {}
        self.arrived: list[m.Package] = []
        self.rests = False
        self.available: set[tuple[int, int]] = set()  # as the master has last said
        self.walls: set[Node] = set()  # others that it cannot connect to
        self.blobs: set[tuple[int, int]] = set()

    @property
    def number(self) -> int:
        return self.machine.number

    def perform(self, todo: list[weights.Effect]) -> None:
        for effect in todo:
            match effect:
                case common.Send(message):
                    if isinstance(message, m.Seek):
                        assert (message.version, message.base) in self.available, "nobody has it"
                    self.out.append(m.decode_from_peer(m.encode(message)))
                case common.Expect(_, nonce):
                    self.door = nonce
                case common.OpenStream(stream, to, nonce):
                    self.streams[stream] = to.peer, nonce
                case common.CloseStream(stream):
                    self.streams.pop(stream, None)
                    for op in self.ops.values():
                        op.ends.pop(stream, None)
                case weights.RegisterServe(op, what):
                    assert what.key in self.blobs, "it serves what it does not have"
                    self.ops[op] = Transfer(what, True)
                case weights.RegisterFetch(op, what):
                    fetched = [one.package for one in self.ops.values() if not one.serves]
                    assert what not in fetched, "twice"
                    self.ops[op] = Transfer(what, False)
                case common.StartTransfer(op, _, _, ends):
                    for end in ends:
                        slots = self.ops[op].ends.values() if self.ops[op].serves else ()
                        assert end.slot not in slots, "a slot is taken"
                        assert end.stream in self.streams, "its stream is closed"
                        self.ops[op].ends[end.stream] = end.slot
                case common.CommitOp(op):
                    del self.ops[op]
                    self.perform(self.machine.engine_settled(op, 0, 0))
                case common.AbortOp(op):
                    self.ops.pop(op, None)
                case weights.Arrived(what):
                    self.arrived.append(what)
                case weights.Forgotten(what):
                    self.blobs.discard(what.key)
                case common.Answer(call):
                    self.answers |= {call: ""} if call else {}  # 0: it has joined
                case common.Fail(call, _, why):
                    self.answers[call] = why
                case weights.Backoff():
                    self.rests = True


class WeightsRun:
    """A master with its clients, driven by a random number generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self.masters = self.conns = self.calls = 0
        self.damage = 0.0  # how often a difference does not lead to what was published
        self.begin()

    def begin(self) -> None:
        """Another master begins; all connections are new."""
        self.masters += 1
        self.master = Master(1, combine, secret=b"%d" % self.masters)
        for node in self.living:
            node.out.clear()
            node.into.clear()
            node.perform(node.machine.disconnected("the master is gone"))
            node.out.clear()
            if node.machine.over is None:
                self._connect(node)
                node.perform(node.machine.reconnected())

    @property
    def living(self) -> list[Node]:
        """The living nodes."""
        return [node for node in self.nodes if node.alive]

    def add(self, follows: bool = True, relays: bool = True) -> Node:
        node = Node(len(self.nodes) + 1, follows, relays)
        self.nodes.append(node)
        self._connect(node)
        node.perform(node.machine.join(0, node.hello))
        return node

    def _connect(self, node: Node) -> None:
        self.conns += 1
        node.conn = b"%d" % self.conns

    def kill(self, node: Node) -> None:
        node.alive = False
        node.out.clear()
        self.perform(self.master.feed(Disconnected((node.conn,), "it died")))

    def cut(self, node: Node, stream: int) -> None:
        """A stream of a node breaks."""
        fetches = [op for op, one in node.ops.items() if stream in one.ends and not one.serves]
        for one in node.ops.values():
            one.ends.pop(stream, None)
        node.perform(node.machine.stream_lost(stream, False))
        for op in fetches:
            node.perform(node.machine.engine_failed(op, "its stream is lost", True))

    def publish(self, node: Node, version: int, base: int, whole: bool = False) -> int:
        """Publishes differences, a whole version, or both. Returns the number of the call."""
        self.calls += 1
        made = [package(version, base)] if base else []
        made += [package(version, 0)] if whole or not base else []
        node.blobs |= {one.key for one in made}
        node.perform(node.machine.publish(self.calls, tuple(made)))
        return self.calls

    # ---- events ----

    def perform(self, todo: list[masters.Effect]) -> None:
        by_conn = {node.conn: node for node in self.nodes}
        for effect in todo:
            if isinstance(effect, masters.Send) and by_conn[effect.conn].alive:
                by_conn[effect.conn].into.append(m.decode_from_master(m.encode(effect.message)))

    def step(self) -> bool:
        """One thing happens, of those that may. Returns whether there was any."""
        ways = [(self.send, node) for node in self.living if node.out]
        ways += [(self.receive, node) for node in self.living if node.into]
        ways += [(self._take, node) for node in self.living if node.arrived]
        ways += [(self._move, node) for node in self.living if self._moving(node)]
        if not ways:
            return self._wait()
        way, node = self.random.choice(ways)
        way(node)
        self.check()
        return True

    def settle(self, most: int = 20_000) -> None:
        """Until nothing happens any more."""
        while most > 0 and self.step():
            most -= 1
        assert most > 0, "it never rests"

    def send(self, node: Node) -> None:
        message = node.out.popleft()
        if isinstance(message, m.Hello):
            self.perform(self.master.feed(Hello(node.conn, message, "10.0.0.1")))
        else:
            self.perform(self.master.feed(Received(node.conn, message)))

    def receive(self, node: Node) -> None:
        message = node.into.popleft()
        if isinstance(message, m.Available):
            node.available = {one.key for one in message.packages}
        node.perform(node.machine.received(message))

    def _take(self, node: Node) -> None:
        what = node.arrived.pop(0)
        assert what.base in (0, node.machine.version), "it does not follow what is there"
        if what.base and self.random.random() < self.damage:
            node.perform(node.machine.taken(what, 0))
        else:
            node.blobs.add(what.key)
            node.perform(node.machine.taken(what, what.version))

    def _fetch(self, node: Node) -> tuple[int, Transfer] | None:
        found = [(op, one) for op, one in node.ops.items() if not one.serves and one.ends]
        return found[0] if found else None

    def _reached(self, node: Node, stream: int) -> Node | None:
        """The node that a stream reaches, if any."""
        to, nonce = node.streams[stream]
        found = (one for one in self.living if (one.number, one.door) == (to, nonce))
        return next((one for one in found if one not in node.walls), None)

    def _moving(self, node: Node) -> bool:
        """Whether its fetch can go on: data comes, or it is seen that none will."""
        fetch = self._fetch(node)
        if fetch is None:
            return False
        ((stream, slot),) = fetch[1].ends.items()
        holder = self._reached(node, stream)
        if holder is None:
            return True
        return any(
            one.serves and one.package == fetch[1].package and one.ends.get(back) == slot
            for one in holder.ops.values()
            for back, (there, by) in holder.streams.items()
            if there == node.number and by == node.door and back in one.ends
        )

    def _move(self, node: Node) -> None:
        fetch = self._fetch(node)
        assert fetch is not None
        op, transfer = fetch
        (stream,) = transfer.ends
        holder = self._reached(node, stream)
        lied = holder is not None and holder.lies
        if holder is None or lied:
            transfer.ends.clear()
            node.perform(node.machine.stream_lost(stream, lied))
            node.perform(node.machine.engine_failed(op, "its holder is lost", True))
        elif self.random.random() < 0.2:
            node.perform(node.machine.slow())
        else:
            rate = self.random.randint(1, 1000)
            settled = self.random.random() < 0.5
            if settled:
                del node.ops[op]
            node.perform(node.machine.measured(op, rate))
            node.perform(node.machine.engine_complete(op, settled, 0, 0))

    def _wait(self) -> bool:
        """Time passes: whoever rests seeks again, and who gets nothing gives its holder up."""
        for node in self.random.sample(self.living, len(self.living)):
            if node.rests:
                node.rests = False
                node.perform(node.machine.retry())
                if node.out:
                    return True
            fetch = self._fetch(node)
            if fetch is not None:
                fetch[1].ends.clear()
                node.perform(node.machine.engine_failed(fetch[0], "nothing comes", True))
                return True
        return False

    def check(self) -> None:
        """Checks the invariants."""
        desk = self.master.run.clients
        for number, one in desk.all.items():
            quick = [desk.all[each] for each in one.receivers if not desk.all[each].slow]
            assert len(quick) <= PLACES_SMALL + len(one.receivers) - len(quick), "too many places"
            for each in one.receivers:
                receiver = desk.all[each]
                assert receiver.holder == number and receiver.seek is not None
                key = receiver.seek.version, receiver.seek.base
                assert number in self.master.run.clients.catalogue.holders(key), (
                    "it has no more of it"
                )
                assert number not in receiver.seek.avoid
            assert number > FIRST
        slots = [one.slot for one in desk.all.values()]
        assert len(slots) == len({*slots})
        assert not self.master.peers, "a client is no peer"
