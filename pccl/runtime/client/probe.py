"""One peer's part in `optimize_topology`, in the thread of the caller: it measures links.

For each probe that the master requests, a peer fetches random bytes from one or more others over
streams like those of collectives, while the others may fetch from it. A probe lasts until the rate
stops growing, because TCP has then found the capacity of the link.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TypeAlias

from pccl.ext import address_of, ffi
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, End, Leaf
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.memory import Pieces

log = logging.getLogger("pccl")

_WINDOW_S = 0.25  # a window lasts at least this long or, if that is longer,
WINDOW_SHARE = 0.4  # this share of the time until the first bytes: about two round trips
_WINDOWS_MAX = 8  # after the first bytes; then a probe ends even if the rate still grows
GROWTH = 1.25  # the least growth between two windows that counts
# The sizes of the pieces, in order: small ones first, so that several arrive in a slow link's
# window, then large ones, so that few are enough for a fast link.
SIZES = (16 << 10,) * 64 + (64 << 10,) * 64 + (256 << 10,) * 1024
_CHECK_S = 0.03
Arrivals: TypeAlias = list[tuple[float, int]]  # the time, and the number of bytes
BATCH = 64  # results, sent to the engine together


def optimize(client: PeerClient, call: Call, deadline: Deadline) -> End:
    """Takes part in an optimization until it ends, and returns the end.

    After an exception the call is still in progress, and the caller must cancel it.
    """
    content, scratch = os.urandom(max(SIZES)), bytearray(max(SIZES))
    client.optimize(call, _pieces(ffi.from_buffer("char[]", content)), content)
    prober = _Prober(client, call, _pieces(ffi.from_buffer("char[]", scratch)), scratch)
    while True:
        note = deadline.next(client, call, prober.patience_s)
        match note:
            case effects.Measure(_, seq, holders) if holders:
                prober.begin(seq, holders)
            case effects.Measure():  # the master was restarted, which voids the last probe
                prober.end()
            case Leaf():
                prober.take(note)
            case effects.Fetched(_, seq) if seq == prober.seq:
                prober.report(ended=True)
            case effects.Answer() | effects.Fail():
                return note
        prober.work()


def _pieces(memory: object) -> Pieces:
    """Pieces that share the same memory, because their content is never read."""
    return [(number, address_of(memory), size) for number, size in enumerate(SIZES)]


class _Prober:
    """Carries out one probe at a time.

    Attributes:
        seq: number of the current probe; 0: there is none.
    """

    def __init__(self, client: PeerClient, call: Call, pieces: Pieces, memory: object) -> None:
        self._client, self._call = client, call
        self._pieces, self._memory = pieces, memory
        self._arrivals: Arrivals = []
        self._results: list[tuple[int, int, bool]] = []
        self._senders: tuple[int, ...] = ()
        self._op = self.seq = 0
        self._began = self._check_at = 0.0

    @property
    def patience_s(self) -> float:
        """How long `work` has nothing to do unless a note arrives."""
        return (
            max(0.0, self._check_at - time.perf_counter()) if self.seq else limits.PROBE_CONNECT_S
        )

    def begin(self, seq: int, senders: tuple[int, ...]) -> None:
        self.end()
        self.seq, self._senders = seq, senders
        self._began = time.perf_counter()
        self._op = self._client.fetch(self._call, seq, self._pieces, 0, self._memory)

    def take(self, leaf: Leaf) -> None:
        if self.seq and leaf.op == self._op:
            self._arrivals.append((time.perf_counter(), SIZES[leaf.piece]))
            self._results.append((leaf.piece, leaf.leaf, True))

    def work(self) -> None:
        """Makes the engine fetch more, and reports if a report is due."""
        if self._results and not (self._call.has_notes and len(self._results) < BATCH):
            self._client.verified(self._op, self._results)
            self._results = []
        if self.seq and time.perf_counter() >= self._check_at:
            self.report()

    def report(self, ended: bool = False) -> None:
        """Reports the rate if it is known, which ends the probe. `ended`: no more will arrive."""
        now = time.perf_counter()
        self._check_at = now + _CHECK_S
        rate = rate_of(self._arrivals, self._began, now, ended)
        if rate is None:
            return
        first_s = self._arrivals[0][0] - self._began if self._arrivals else 0.0
        log.info("from peers %s: %.1f Mbit/s, %.3f s", self._senders, rate * 8e-6, first_s)
        seq, peer = self.seq, self._client.peer
        self._client.post(lambda: peer.measured(seq, int(rate), int(first_s * 1e6)))
        self.end()

    def end(self) -> None:
        self._arrivals, self._results, self.seq = [], [], 0


def rate_of(arrivals: Arrivals, began: float, now: float, ended: bool = False) -> float | None:
    """Bytes per second as of `now`; None if the probe must continue.

    Two successive windows are compared, each of about two round trips. (The first arrival takes
    about five, including the connection.) If the second one has hardly more bytes than the first,
    TCP has found the capacity of the link.
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
    if before + after == 0:  # a slow link: everything in flight arrived at once
        return sum(nbytes for _, nbytes in arrivals) / (now - began)
    return (before + after) / (2 * window)
