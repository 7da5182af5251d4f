"""One peer's part in `optimize_topology`, in the thread of the caller: it measures links.

For each probe that the master wants, a peer fetches from another one, over a stream as every
collective uses it, what only exists to be sent, while the other does the same the other way. It
takes as long as the rate grows: until then TCP is still finding out what the link carries.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TypeAlias

from pccl.ext import ffi
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, End, Leaf
from pccl.runtime.client.client import Client
from pccl.runtime.client.memory import Pieces

log = logging.getLogger("pccl")

_WINDOW_S = 0.25  # in which bytes are counted, at least,
WINDOW_SHARE = 0.4  # and of the time that the first ones take: some five round trips
_WINDOWS_MAX = 8  # after the first bytes; then it may grow as it will
GROWTH = 1.25  # from one window to the next, that is more than chance
# What is sent, in this order: a slow link has something to count, a fast one little to do.
SIZES = (16 << 10,) * 64 + (64 << 10,) * 64 + (256 << 10,) * 1024
_CHECK_S = 0.03
Arrivals: TypeAlias = list[tuple[float, int]]  # when, how many bytes
BATCH = 64  # verdicts that are given at once


def optimise(client: Client, call: Call, deadline: Deadline) -> End:
    """Takes part in an optimisation until it ends, and says how.

    An exception leaves the call as it stands: the caller lets go of it.
    """
    content, scratch = os.urandom(max(SIZES)), bytearray(max(SIZES))
    client.optimize(call, _pieces(ffi.from_buffer("char[]", content)), content)
    prober = _Prober(client, call, _pieces(ffi.from_buffer("char[]", scratch)), scratch)
    while True:
        note = deadline.next_within(client, call, prober.patience_s)
        match note:
            case effects.Measure(_, seq, holders) if holders:
                prober.begin(seq, holders)
            case effects.Measure():  # the last probe is void: the master was restarted
                prober.end()
            case Leaf():
                prober.take(note)
            case effects.Fetched(_, seq) if seq == prober.seq:
                prober.report(ended=True)
            case effects.Answer() | effects.Fail():
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
        self._arrivals: Arrivals = []
        self._verdicts: list[tuple[int, int, bool]] = []
        self._senders: tuple[int, ...] = ()
        self._op = self.seq = 0
        self._began = self._check_at = 0.0

    @property
    def patience_s(self) -> float:
        """How long nothing but a note needs to be done."""
        return (
            max(0.0, self._check_at - time.perf_counter()) if self.seq else limits.PROBE_CONNECT_S
        )

    def begin(self, seq: int, senders: tuple[int, ...]) -> None:
        """The next probe: how fast `senders` reach us, all at once."""
        self.end()
        self.seq, self._senders = seq, senders
        self._began = time.perf_counter()
        self._op = self._client.fetch(self._call, seq, self._pieces, 0, self._memory)

    def take(self, leaf: Leaf) -> None:
        """Something has arrived."""
        if self.seq and leaf.op == self._op:
            self._arrivals.append((time.perf_counter(), SIZES[leaf.piece]))
            self._verdicts.append((leaf.piece, leaf.leaf, True))

    def work(self) -> None:
        """Asks for more, and reports when it is time to."""
        if self._verdicts and not (self._call.has_notes and len(self._verdicts) < BATCH):
            self._client.judge(self._op, self._verdicts)
            self._verdicts = []
        if self.seq and time.perf_counter() >= self._check_at:
            self.report()

    def report(self, ended: bool = False) -> None:
        """Tells the master if it is time to, which ends the probe; it is when no more will come."""
        now = time.perf_counter()
        self._check_at = now + _CHECK_S
        rate = rate_of(self._arrivals, self._began, now, ended)
        if rate is None:
            return
        first_s = self._arrivals[0][0] - self._began if self._arrivals else 0.0
        log.info("from peers %s: %.1f Mbit/s, %.3f s", self._senders, rate * 8e-6, first_s)
        self._client.measured(self.seq, int(rate), int(first_s * 1e6))
        self.end()

    def end(self) -> None:
        """Nothing that still comes of this probe counts."""
        self._arrivals, self._verdicts, self.seq = [], [], 0


def rate_of(arrivals: Arrivals, began: float, now: float, ended: bool = False) -> float | None:
    """Bytes per second as of `now`, if it can be told by now, or must be.

    Two windows are compared, of about two round trips each, as the first arrival tells, which a
    connection has come before: when the later one has brought hardly more than the earlier one,
    TCP has found out what the link carries.
    """
    if not arrivals:
        return 0.0 if ended or now - began >= limits.PROBE_CONNECT_S else None
    first = arrivals[0][0]
    window = max(_WINDOW_S, WINDOW_SHARE * (first - began))
    if ended:
        window = max(min(window, (arrivals[-1][0] - first) / 2), 1e-6)
        now = arrivals[-1][0]
    elif now - first < 2 * window:
        return None
    before = sum(nbytes for at, nbytes in arrivals if now - 2 * window < at <= now - window)
    after = sum(nbytes for at, nbytes in arrivals if now - window < at)
    if after > GROWTH * before and now - first < _WINDOWS_MAX * window and not ended:
        return None
    if before + after == 0:  # a slow link, on which all that is under way arrives together
        return sum(nbytes for _, nbytes in arrivals) / (now - began)
    return (before + after) / (2 * window)
