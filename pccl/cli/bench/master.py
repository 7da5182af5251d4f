"""Measures the master's work for each message, in runs of ten to some thousand peers. No sockets.

Peers in several groups vote in every kind of round. The cost of a message is the processor time to
decode it, to run the master's state machine, and to encode the answers. `KiB` is the master's
memory for a peer.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable

from pccl.cli.arguments import option, whole_number
from pccl.cli.terminal import painted
from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.effects import Drop, Send
from pccl.protocol.master.inputs import Hello, Received
from pccl.runtime.inline_collectives import combine
from pccl.types import CollectiveKind

VOTE_US_MAX = 25.0
GROWTH_MAX = 2.0  # how much more a vote may cost in the largest run than in the smallest
WORK = m.Spec(CollectiveKind.ALL_REDUCE, 0, 10, 1 << 20)
ENTRIES = tuple(m.Entry(f"layer.{i}", 10, 4096, False, bytes(16)) for i in range(20))


class Swarm:
    def __init__(self, peers: int, groups: int) -> None:
        self.conns = [b"%d" % i for i in range(peers)]
        self.seq: dict[bytes, int] = {}  # by connection: the collective that the peer is in
        self.sent = 0  # messages of the master
        self._master = Master(1, combine, secret=b"s")
        self._call = 1
        self._draw = random.Random(1)
        groups = min(groups, peers // 2)
        for i, conn in enumerate(self.conns):
            hello = m.Hello(m.PROTOCOL_VERSION, "1", i % groups, "", 1, "", "x", b"")
            self._perform(self._master.feed(Hello(conn, hello, "10.0.0.1")))
        self._perform(self._master.feed(Received(self.conns[0], m.TopologyVote(1))))

    def _perform(self, actions: Iterable[object]) -> None:
        last: m.MasterMessage | None = None
        for action in actions:
            if isinstance(action, Send):
                if action.message is not last:  # as the server does
                    m.encode(action.message)
                last = action.message
                self.sent += 1
                if isinstance(last, m.Started):
                    self.seq[action.conn] = last.seq
            assert not isinstance(action, Drop), action

    def everyone(self, make: Callable[[int, bytes], m.PeerMessage]) -> float:
        """All peers send a message, in any order. Returns microseconds per message."""
        self._call += 1
        sent = [(conn, m.encode(make(self._call, conn))) for conn in self.conns]
        self._draw.shuffle(sent)
        began_s = time.process_time()
        for conn, data in sent:
            self._perform(self._master.feed(Received(conn, m.decode_from_peer(data))))
        return 1e6 * (time.process_time() - began_s) / len(sent)


def measure(peers: int, groups: int, rounds: int) -> dict[str, float]:
    """The cost of each kind of vote in a run of `peers` peers, in microseconds."""
    swarm = Swarm(peers, groups)
    costs = dict.fromkeys(("start", "finish", "pending", "topology", "sync"), 0.0)
    for i in range(rounds):
        manifest = m.Manifest(i, 0, ENTRIES)
        votes: list[Callable[[int, bytes], m.PeerMessage]] = [
            lambda call, conn: m.StartVote(call, 0, WORK, stuck=True),
            lambda call, conn: m.FinishVote(swarm.seq[conn], True),
            lambda call, conn: m.PendingVote(call, True),
            lambda call, conn: m.TopologyVote(call),
            lambda call, conn: m.SyncVote(call, manifest),  # noqa: B023
        ]
        for name, vote in zip(costs, votes, strict=True):
            costs[name] += swarm.everyone(vote) / rounds
    assert swarm.sent >= peers * 5 * rounds, "the rounds did not end"
    return costs


def _peer_kib(peers: int, groups: int) -> float:
    tracemalloc.start()
    try:
        swarm = Swarm(peers, groups)
        return tracemalloc.get_traced_memory()[0] / len(swarm.conns) / 1024
    finally:
        tracemalloc.stop()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text, kind = "sizes of the runs (default: 10 100 1000)", whole_number(2, 100_000)
    option(parser, "--peers N", text, kind=kind, nargs="+")
    option(parser, "--groups N", "groups of peers", 8, whole_number(1))
    option(parser, "-n --iters N", "rounds of each kind", 20, whole_number(1))


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a vote costs too much, or much more in the largest run than in the
    smallest."""
    sizes = sorted(args.peers or (10, 100, 1000))
    print(f"# {'vote':8}" + "".join(f"{n:>9} peers" for n in sizes) + "  (us for each message)")
    runs = [measure(peers, args.groups, args.iters) for peers in sizes]
    good = True
    for name in runs[0]:
        costs = [run[name] for run in runs]
        flat = costs[-1] <= GROWTH_MAX * costs[0]
        fast = costs[-1] <= VOTE_US_MAX or name == "sync"  # its cost grows with its entries
        good = good and flat and fast
        verdict = "" if flat and fast else "GROWS" if not flat else f"over {VOTE_US_MAX:g} us"
        cells = "".join(f"{cost:15.1f}" for cost in costs)
        print(f"  {name:8}{cells}  {painted(verdict, 'red')}".rstrip(), flush=True)
    held = "".join(f"{_peer_kib(peers, args.groups):15.1f}" for peers in sizes)
    print(f"  {'KiB':8}{held}")
    return 0 if good else 1
