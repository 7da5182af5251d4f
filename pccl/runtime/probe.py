"""One peer's part in `optimize_topology`, in the thread of the caller: it measures links.

For each probe that the master wants, a peer fetches from another one, over a stream as every
collective uses it, what only exists to be sent, while the other does the same the other way. The
rate is that of the second half of the time that this takes: in the first one TCP is still finding
out what the link carries.
"""

from __future__ import annotations

import logging
import os
import time

from pccl.ext import ffi
from pccl.protocol import peer as core
from pccl.runtime.client import Call, Client, Deadline, Leaf
from pccl.runtime.memory import Pieces

log = logging.getLogger("pccl")

PROBE_S = 0.5  # from the first bytes on
CONNECT_S = 3.0  # for the first bytes; then nothing will come
# What is sent, in this order: a slow link has something to count, a fast one little to do.
SIZES = (16 << 10,) * 64 + (256 << 10,) * 1024
BATCH = 64  # verdicts that are given at once


def optimise(client: Client, deadline: Deadline) -> core.Answer | core.Fail:
    """Takes part in an optimisation until it ends, and says how."""
    content, scratch = os.urandom(max(SIZES)), bytearray(max(SIZES))
    call = client.optimize(_pieces(ffi.from_buffer("char[]", content)), content)
    prober = _Prober(client, call, _pieces(ffi.from_buffer("char[]", scratch)), scratch)
    while True:
        note = deadline.next_within(client, call, prober.patience_s)
        match note:
            case core.Plan(_, plan) if plan.fetch:
                prober.begin(plan.seq, plan.holders[0])
            case core.Plan():  # a probe that is void: the master was restarted
                prober.end()
            case Leaf():
                prober.take(note)
            case core.Fetched(_, seq) if seq == prober.seq:
                prober.report()
            case core.Answer() | core.Fail():
                return note
        prober.work()


def _pieces(memory: object) -> Pieces:
    """All of them in the same memory: nobody ever looks at it."""
    address = int(ffi.cast("uintptr_t", memory))
    return [(number, address, size) for number, size in enumerate(SIZES)]


class _Prober:
    """One probe after the other.

    Attributes:
        seq: of the probe under way; 0: none is.
    """

    def __init__(self, client: Client, call: Call, pieces: Pieces, memory: object) -> None:
        self._client, self._call = client, call
        self._pieces, self._memory = pieces, memory
        self._arrivals: list[tuple[float, int]] = []  # when, how many bytes
        self._verdicts: list[tuple[int, int, bool]] = []
        self._op = self._sender = self.seq = 0
        self._began = self._until = 0.0

    @property
    def patience_s(self) -> float:
        """How long nothing but a note needs to be done."""
        return max(0.0, self._until - time.perf_counter()) if self.seq else CONNECT_S

    def begin(self, seq: int, sender: int) -> None:
        """The next probe: how fast `sender` reaches us."""
        self.end()
        self.seq, self._sender = seq, sender
        self._began = time.perf_counter()
        self._until = self._began + CONNECT_S
        self._op = self._client.fetch(self._call, seq, self._pieces, 0, self._memory)

    def take(self, leaf: Leaf) -> None:
        """Something has arrived."""
        if self.seq and leaf.op == self._op:
            now = time.perf_counter()
            if not self._arrivals:
                self._until = now + PROBE_S
            self._arrivals.append((now, SIZES[leaf.piece]))
            self._verdicts.append((leaf.piece, leaf.leaf, True))

    def work(self) -> None:
        """Asks for more, and reports when it is time to."""
        if self._verdicts and not (self._call.has_notes and len(self._verdicts) < BATCH):
            self._client.judge(self._op, self._verdicts)
            self._verdicts = []
        if self.seq and time.perf_counter() >= self._until:
            self.report()

    def report(self) -> None:
        """Tells the master, and ends the probe."""
        rate = rate_of(self._arrivals)
        first_s = self._arrivals[0][0] - self._began if self._arrivals else 0.0
        log.info("from peer %d: %.1f Mbit/s, %.3f s", self._sender, rate * 8e-6, first_s)
        self._client.measured(self.seq, int(rate), int(first_s * 1e6))
        self.end()

    def end(self) -> None:
        """Nothing that still comes of this probe counts."""
        self._arrivals, self._verdicts, self.seq = [], [], 0


def rate_of(arrivals: list[tuple[float, int]]) -> float:
    """Bytes per second in the second half of the time between the first arrival and the last."""
    if len(arrivals) < 2:
        return sum(nbytes for _, nbytes in arrivals) / PROBE_S
    middle = (arrivals[0][0] + arrivals[-1][0]) / 2
    before = max(i for i, (at, _) in enumerate(arrivals) if at <= middle)
    took_s = arrivals[-1][0] - arrivals[before][0]
    return sum(nbytes for _, nbytes in arrivals[before + 1 :]) / max(took_s, 1e-6)
