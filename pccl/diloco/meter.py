"""What the rounds of this peer cost: seconds, and payload bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pccl import ReduceInfo, SharedStateSyncInfo


class Meter:
    """Counts the bytes of all rounds, and the seconds of the present one by what they went into.

    Attributes:
        tx_bytes: payload bytes that this peer has sent.
        rx_bytes: payload bytes that it has received.
        seconds: of the present round, by "reduce", "admit" and "sync".
        last_reduce: info of the last all-reduce that has committed; None before the first.
    """

    def __init__(self) -> None:
        self.last_reduce: ReduceInfo | None = None
        self.tx_bytes = 0
        self.rx_bytes = 0
        self.seconds: dict[str, float] = {}
        self.begin_round()

    def begin_round(self) -> None:
        """Counts the seconds from 0 again."""
        self.seconds = {"reduce": 0.0, "admit": 0.0, "sync": 0.0}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time in the block."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - began_s

    def count(self, info: ReduceInfo | SharedStateSyncInfo) -> None:
        """Adds the bytes of a call."""
        self.tx_bytes += info.tx_bytes
        self.rx_bytes += info.rx_bytes
