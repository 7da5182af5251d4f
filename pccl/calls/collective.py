"""One collective from its caller's side: which calls are under way, the launch, the outcome, the
handle.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

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
    error_for,
    not_picklable,
)
from pccl.operands import KnownRanks
from pccl.protocol.peer import effects
from pccl.protocol.rounds import EXCLUSIVE
from pccl.runtime.client.call import Call, Deadline, End
from pccl.runtime.client.client import Client
from pccl.runtime.client.memory import Copies, Operands, Wide, on_host
from pccl.runtime.forks import FORKED
from pccl.runtime.uninterrupted import aside
from pccl.types import ReduceInfo, Result


class CallsInFlight:
    """The calls in progress, and which calls may begin beside them.

    A launched collective counts as in progress until it is awaited, or can no longer be awaited.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handle may be collected while it is held
        self._rounds: dict[str, Call] = {}
        self._tags: dict[int | str, Call] = {}
        self._user: threading.Thread | None = None  # the thread that made the latest call
        self._shared = False  # whether several threads that live have made calls
        self.any_collective = False  # whether a collective has been launched since it was reset

    def enter(self, name: str, call: Call, *tags: int | str) -> None:
        """A call begins; `tags` are those of a collective, and in a send with the two peers.

        Raises:
            PCCLError: PENDING_ASYNC_OPS, INVALID_USAGE or INVALID_ARGUMENT: a call in progress
                excludes it.
        """
        with self._lock:
            self._may_enter(name)
            if not tags:
                self._rounds[name] = call
            self.any_collective |= bool(tags)
            for tag in tags:
                if self._tags.setdefault(tag, call) is not call:
                    raise error_for(Result.INVALID_ARGUMENT, name, _in_use(tag))

    def _may_enter(self, name: str) -> None:
        if name in EXCLUSIVE and self._tags:
            tags = sorted(self._tags, key=str)
            why = f"collectives are launched and not awaited (tags {tags}): wait() for them first"
            raise error_for(Result.PENDING_ASYNC_OPS, name, why)
        rounds = self._rounds.keys()
        others = rounds & (EXCLUSIVE | {name}) if name not in EXCLUSIVE else rounds
        if others:
            why = f"another thread of this peer stands in {min(others)}()"
            raise error_for(Result.INVALID_USAGE, name, why)

    def leave(self, call: Call) -> None:
        """A call has ended, if it ever began. Idempotent."""
        with self._lock:
            for name in [name for name, other in self._rounds.items() if other is call]:
                del self._rounds[name]
            for tag in [tag for tag, other in self._tags.items() if other is call]:
                del self._tags[tag]

    def single_threaded(self) -> bool:
        """Whether this thread is the only one there that has ever made a call.

        If so, it makes no other call while it waits in this one, and its vote says so: the master
        can tell it if no peer will ever join that call.
        """
        with self._lock:
            user, self._user = self._user, threading.current_thread()
            self._shared |= user is not None and user is not self._user and user.is_alive()
            return not self._shared


def _in_use(tag: int | str) -> str:
    return f"a collective with tag {tag} is launched and not awaited: use another tag"


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
        standing: CallsInFlight,
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


class AsyncReduceHandle:
    """A collective in progress, returned by the `_async` methods of `Communicator`.

    If the handle is garbage-collected before `wait()`, the collective continues, and its tag is
    free when it has ended; if it fails, the log has a warning.

    Attributes:
        result: the array, or list or dict of arrays, that the collective writes to. Its content is
            valid once `wait()` has reported success.
    """

    def __init__(self, launch: Launch | None, result: object) -> None:
        """`launch` is None if there is nothing to wait for."""
        self._launch = launch
        self.result = result

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "its collective is under way in this process")

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome; later calls return the same outcome.

        An exception that is raised in this thread meanwhile abandons the collective.

        Args:
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            (is_success, status, info): status is the value of a `Result`; after a failure, info is
            `ReduceInfo(0, 0, 0)` and the send buffer is unchanged.

        Raises:
            TypeError: `timeout` is not a number.
            ValueError: `timeout` is not a valid time.
        """
        deadline = Deadline(timeout)
        launch = self._launch
        if launch is None:
            return True, Result.SUCCESS.value, ReduceInfo(1, 0, 0)
        try:
            end = launch.finish(deadline)
        except BaseException:
            launch.let_go()
            raise
        if isinstance(end, effects.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, info(end)

    def done(self) -> bool:
        """Whether `wait()` would return at once. Does not wait, and changes nothing.

        `result` is valid, and the tag is free, only after `wait()` has returned.
        """
        return self._launch is None or self._launch.ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once `wait()` would return at once; now, if it would already.

        It is called in a thread of pccl, which it must not keep: it may set an event, or queue
        something. The caller keeps the handle, and calls `wait()`.
        """
        if self._launch is None:
            callback()
        else:
            self._launch.hear(callback)

    def __await__(self) -> Generator[Any, None, tuple[bool, int, ReduceInfo]]:
        """`await handle`, in asyncio: returns what `wait()` returns, without blocking the loop.

        Unlike an exception in `wait()`, cancelling an await (by `asyncio.wait_for`, for instance)
        does not abandon the collective: it continues, and can be awaited again. To abandon it, call
        `wait(timeout=0)`. Any number of tasks may await it.
        """
        return self._outcome().__await__()

    async def _outcome(self) -> tuple[bool, int, ReduceInfo]:
        import asyncio  # here, so that importing pccl does not import it

        launch = self._launch
        if launch is not None and not launch.ended:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(ended.set)

            launch.hear(tell)
            await ended.wait()
        if launch is not None and launch.finishes_slowly:
            return await asyncio.to_thread(self.wait)
        return self.wait()

    @property
    def error(self) -> PCCLError | None:
        """The exception that the blocking call would raise.

        None before `wait()` has returned, and if the collective has succeeded.
        """
        launch = self._launch
        return launch.error(launch.end) if launch and isinstance(launch.end, effects.Fail) else None

    def __del__(self) -> None:
        launch = getattr(self, "_launch", None)
        if launch is not None and not launch.over and not sys.is_finalizing():
            launch.forsake()
