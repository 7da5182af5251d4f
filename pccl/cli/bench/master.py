"""Measures the master's work for each message, in runs of ten to some thousand peers. No sockets.

Peers in several groups vote in every kind of round. The cost of a message is the processor's time
to decode it, of the master's state machine, and to encode the answers. `KiB` is the memory that the
master takes for a peer.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pccl.cli.arguments import option, whole_number
from pccl.cli.terminal import painted
from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.effects import Drop, Send
from pccl.protocol.master.inputs import Hello, Received
from pccl.runtime.inline_collectives import combine

VOTE_US_MAX = 25.0
GROWTH_MAX = 2.0  # the cost of a vote in the largest run, as a multiple of that in the smallest
WORK = m.Spec(m.CollectiveKind.ALL_REDUCE, 0, 10, 1 << 20)
ENTRIES = tuple(m.Entry(f"layer.{i}", 10, 4096, False, bytes(16)) for i in range(20))


@dataclass
class Cost:
    messages: int = 0
    seconds: float = 0.0
    rounds: int = 0

    @property
    def us(self) -> float:
        return 1e6 * self.seconds / self.messages


class Swarm:
    def __init__(self, peers: int, groups: int) -> None:
        self.master = Master(1, combine, secret=b"s")
        self.conns = [b"%d" % i for i in range(peers)]
        self.group_of = {conn: i % groups for i, conn in enumerate(self.conns)}
        self.seq: dict[bytes, int] = {}  # of the collective each peer is in
        self.told = 0
        self._call = 0
        self._draw = random.Random(1)
        for conn in self.conns:
            hello = m.Hello(m.PROTOCOL_VERSION, "1", self.group_of[conn], "", 1, "", "x", b"")
            self._perform(self.master.feed(Hello(conn, hello, "10.0.0.1")))
        self._call = 1
        self._perform(self.master.feed(Received(self.conns[0], m.TopologyVote(1))))

    def _perform(self, actions: Iterable[object]) -> None:
        last: m.MasterMessage | None = None
        for action in actions:
            if isinstance(action, Send):
                if action.message is not last:  # as the server does
                    m.encode(action.message)
                last = action.message
                self.told += 1
                if isinstance(last, m.Started):
                    self.seq[action.conn] = last.seq
            assert not isinstance(action, Drop), action

    def everyone(self, cost: Cost, make: Callable[[int, bytes], m.PeerMessage]) -> None:
        """All peers send a message, in any order."""
        self._call += 1
        sent = [(conn, m.encode(make(self._call, conn))) for conn in self.conns]
        self._draw.shuffle(sent)
        begin = time.process_time()
        for conn, data in sent:
            self._perform(self.master.feed(Received(conn, m.decode_from_peer(data))))
        cost.seconds += time.process_time() - begin
        cost.messages += len(sent)
        cost.rounds += 1


def measure(peers: int, groups: int, rounds: int) -> dict[str, Cost]:
    """The cost of each kind of vote in a run of that many peers."""
    swarm = Swarm(peers, min(groups, peers // 2))
    manifest = m.Manifest(0, 0, ENTRIES)
    costs = {name: Cost() for name in ("start", "finish", "pending", "topology", "sync")}
    for i in range(rounds):
        swarm.everyone(costs["start"], lambda call, conn: m.StartVote(call, 0, WORK, stuck=True))
        swarm.everyone(costs["finish"], lambda call, conn: m.FinishVote(swarm.seq[conn], True))
        swarm.everyone(costs["pending"], lambda call, conn: m.PendingVote(call, True))
        swarm.everyone(costs["topology"], lambda call, conn: m.TopologyVote(call))
        revised = m.Manifest(i, 0, manifest.entries)
        swarm.everyone(costs["sync"], lambda call, conn: m.SyncVote(call, revised))  # noqa: B023
    assert swarm.told >= peers * 5 * rounds, "the rounds did not end"
    return costs


def _peer_kib(peers: int, groups: int) -> float:
    tracemalloc.start()
    try:
        swarm = Swarm(peers, min(groups, peers // 2))
        return tracemalloc.get_traced_memory()[0] / len(swarm.conns) / 1024
    finally:
        tracemalloc.stop()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=whole_number(2, 100_000),
        nargs="+",
        default=[10, 100, 1000],
        metavar="N",
        help="sizes of the runs (default: 10 100 1000)",
    )
    option(parser, "--groups", "N", whole_number(1), "groups of peers", 8)
    option(parser, "-n --iters", "N", whole_number(1), "rounds of each kind", 20)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a vote costs too much, or much more in the largest run than in the
    smallest."""
    sizes = sorted(args.peers)
    print(f"# {'vote':8}" + "".join(f"{n:>9} peers" for n in sizes) + "  (us for each message)")
    runs = [measure(peers, args.groups, args.iters) for peers in sizes]
    good = True
    for name in runs[0]:
        costs = [run[name].us for run in runs]
        flat = costs[-1] <= GROWTH_MAX * costs[0]
        fast = costs[-1] <= VOTE_US_MAX or name == "sync"  # its cost grows with its entries
        good = good and flat and fast
        verdict = "" if flat and fast else "GROWS" if not flat else f"over {VOTE_US_MAX:g} us"
        cells = "".join(f"{cost:15.1f}" for cost in costs)
        print(f"  {name:8}{cells}  {painted(verdict, 'red')}".rstrip(), flush=True)
    held = "".join(f"{_peer_kib(peers, args.groups):15.1f}" for peers in sizes)
    print(f"  {'KiB':8}{held}")
    return 0 if good else 1
