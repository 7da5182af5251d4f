"""A run of many peers in few sites, over the master's state machine, which has links measured.

Peers of one site are near each other, and sites are far apart by a plane's distances. Each pair of
sites has a rate of its own. Nothing is encoded, and nothing sleeps.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.effects import Send
from pccl.protocol.topology import Link, hops
from pccl.runtime.inline import combine

NEAR = Link(1_000_000_000, 2_000)  # within a site: 8 Gbit/s, 0.4 ms
TRIPS = 5  # that the first bytes of a probe take


@dataclass
class Planet:
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
            self._perform(self.master.hello(b"%d" % (i + 1), hello, "10.0.0.1"))
        self._perform(self.master.received(b"1", m.TopologyVote(1)))

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
            self._perform(self.master.received(b"%d" % number, m.OptimizeVote(2)))
        while self._told:
            told, self._told = self._told, []
            self.slots += 1
            for number, probe in told:
                self.probes += 1
                link = self.link(probe.peers[0], number)
                said = m.Measured(probe.seq, link.rate, link.delay_us)
                self._perform(self.master.received(b"%d" % number, said))
        self.seconds = time.process_time() - began_s
        (ring,) = self.master.run.groups[0].planned
        return ring.order

    def rate(self, order: tuple[int, ...]) -> int:
        """Of the slowest link of a ring."""
        return min(self.link(*hop).rate for hop in hops(order))

    def round_s(self, order: tuple[int, ...]) -> float:
        """Once around a ring: half a round trip for each link."""
        return sum(self.link(*hop).delay_us / TRIPS / 2 * 1e-6 for hop in hops(order))

    def _perform(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, m.Probe):
                self._told.append((int(action.conn), action.message))
