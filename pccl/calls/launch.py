"""One collective of this peer, from its launch until it has been awaited."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pccl.calls.ranks import KnownRanks
from pccl.calls.standing import Standing
from pccl.errors import (
    DivergenceError,
    KickedError,
    MasterLostError,
    MismatchError,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    RanksChangedError,
    RunFinishedError,
    TooFewPeersError,
)
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Deadline, End
from pccl.runtime.client.client import Client
from pccl.runtime.client.copies import Copies, on_host
from pccl.runtime.client.memory import Operands, Wide
from pccl.runtime.forks import FORKED
from pccl.runtime.uninterrupted import aside
from pccl.types import ReduceInfo, Result

log = logging.getLogger("pccl")

_ERRORS: dict[effects.Fault, type[PCCLError]] = {
    effects.Fault.OTHER: PCCLError,
    effects.Fault.PEER_LOST: PeerLostError,
    effects.Fault.REORDERED: RanksChangedError,
    effects.Fault.MASTER_LOST: MasterLostError,
    effects.Fault.KICKED: KickedError,
    effects.Fault.MISMATCH: MismatchError,
    effects.Fault.TIMEOUT: PCCLTimeoutError,
    effects.Fault.DIVERGENCE: DivergenceError,
    effects.Fault.FINISHED: RunFinishedError,
    effects.Fault.TOO_FEW_PEERS: TooFewPeersError,
}


class Launch:
    """One collective; constructing it does not launch it yet.

    Attributes:
        call: the call in progress.
        end: the answer, once a thread has awaited it.
        over: whether it needs no more awaiting.

    Args:
        name: name of the API call.
        tags: those that it occupies; the first one is that of the collective.
        client: the peer.
        standing: registers the collective until it is awaited.
        ranks: the ranks that the program knows.
    """

    def __init__(
        self,
        name: str,
        tags: Sequence[int],
        client: Client,
        standing: Standing,
        ranks: KnownRanks,
    ) -> None:
        self._name, self._tags = name, tags
        self._client, self._standing, self._ranks = client, standing, ranks
        self.call = client.call()
        self.end: End | None = None
        self.over = False
        self._copies: Copies | None = None
        self._wide: Wide | None = None
        self._lock = threading.Lock()

    def begin(self, work: Operands, stuck: bool = False) -> None:
        """Launches it. `stuck`: its caller makes no other call before the answer.

        Raises:
            PCCLError: a call in progress on this peer excludes it.
            UnsupportedError: an array is on a device that does not exist.
        """
        self._standing.enter(self._name, self.call, *map(work.place, self._tags))
        work, self._copies = on_host(work, self._client.plan, self._client.number)
        if self._copies is not None:
            self._copies.begin()
        if work.averages_integers:
            wide = Wide(work.each)
            work = replace(work, wide=wide)
            if self._copies is not None:
                self._copies.wide = wide
            else:
                self._wide = wide
        self._client.collective(self.call, self._tags[0], work, stuck)
        if self._copies is not None:
            self._copies.go_on(self._client, self.call)

    def finish(self, deadline: Deadline) -> End:
        """Waits for the answer. Several threads may."""
        if self.end is None and self._client.over is FORKED:  # locks may stay locked here
            self.end, self.over = FORKED, True
        if self.end is None:
            note = deadline.next(self._client, self.call)
            assert isinstance(note, effects.Answer | effects.Fail)
            with self._lock:
                if self.end is None:
                    self._conclude(note)
                    self.end = note
        assert self.end is not None
        return self.end

    @property
    def ended(self) -> bool:
        """Whether `finish` would return without waiting."""
        return self.end is not None or self.call.end is not None or self._client.over is FORKED

    @property
    def finishes_slowly(self) -> bool:
        """Whether `finish` must still wait for copies to a device."""
        return self.end is None and self._copies is not None and not self._copies.are_settled

    def hear(self, ended: Callable[[], None]) -> None:
        """Calls `ended`, in a thread of pccl, when `finish` would return without waiting."""
        self._client.hear(self.call, lambda _: ended())

    def _conclude(self, end: End) -> None:
        self.over = True
        self._standing.leave(self.call)
        if isinstance(end, effects.Fail):
            if end.result is Result.RANK_CONNECTION_LOST:
                self._ranks.lose(self._client.plan, self._client.number)
        elif self._wide is not None:
            self._wide.narrow(info(end).world_size)
        if self._copies is not None:
            self._copies.settle()

    def let_go(self) -> None:
        """Ends the collective after an exception in its caller, and frees its tag. Idempotent."""
        try:
            self.over = True
            self._client.let_go(self.call)
            if self._copies is not None and self._client.over is not FORKED:
                aside(self._copies.let_go)
        finally:
            self._standing.leave(self.call)

    def forsake(self) -> None:
        """The handle was collected: the collective continues, and its tag is free afterwards."""

        def told(end: End) -> None:
            self._standing.leave(self.call)
            if isinstance(end, effects.Fail):
                log.warning("a collective whose handle was dropped has failed: %s", self.error(end))

        self._client.hear(self.call, told)

    def error(self, end: effects.Fail) -> PCCLError:
        """The exception for a failure."""
        return error_of(self._name, end, self.call.began_s)


def error_of(name: str, end: effects.Fail, began_s: float | None = None) -> PCCLError:
    """The exception for a failed call, with its phase and duration."""
    when = [end.phase] if end.phase else []
    if began_s is not None:
        when.append(f"{time.monotonic() - began_s:.1f} s after the call began")
    why = f"{end.why} ({', '.join(when)})" if when else end.why
    return _ERRORS[end.fault](end.result, name, why)


def info(end: effects.Answer) -> ReduceInfo:
    """The result of a collective, from its answer."""
    reduced = end.value
    assert isinstance(reduced, effects.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)
