"""One collective from its caller's side: launch it, wait for it, hold its handle, abandon it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pccl import operands
from pccl.descriptors import ReduceOpDescriptor
from pccl.errors import AGAIN, PCCLError, error_for, not_picklable
from pccl.membership import Membership
from pccl.protocol.peer import effects
from pccl.protocol.tuning import choose
from pccl.runtime.client.call import Deadline, End, error_of
from pccl.runtime.client.memory import Copies, Operands, Wide, nothing, on_host
from pccl.runtime.forks import FORKED
from pccl.runtime.uninterrupted import aside
from pccl.support.text import require
from pccl.types import ReduceInfo, Result

log = logging.getLogger("pccl")


class Launch:
    """One collective; `begin` launches it.

    Attributes:
        call: the call in progress.
        end: the answer, once a thread has awaited it.
        over: whether no thread needs to await it.

    Args:
        membership: the membership of the peer that makes it.
        name: name of the API call.
        tags: the tags that it occupies; the first one is the tag of the collective.
    """

    def __init__(self, membership: Membership, name: str, *tags: int) -> None:
        for tag in tags:
            if not 0 <= tag < 1 << 64:
                raise OverflowError(f"tag is {tag}: it must be in 0 to 2**64 - 1")
        self._client = membership.one_of_several(name)
        self._name, self._tags = name, tags
        self._calls, self._ranks = membership.calls, membership.ranks
        self.call = self._client.call()
        self.end: End | None = None
        self.over = False
        self._copies: Copies | None = None
        self._wide: Wide | None = None
        self._lock = threading.Lock()

    def begin(self, work: Operands, stuck: bool = False) -> None:
        """Launches it. `stuck`: the caller makes no other call before the answer."""
        self._calls.enter(self._name, self.call, *map(work.place, self._tags))
        conditions = self._client.conditions
        tuning = choose(work.work, work.nbytes, conditions)
        work, self._copies = on_host(work, tuning, conditions)
        if self._copies is not None:
            self._copies.begin()
        if tuning.wide:
            wide = Wide(work.each)
            work = replace(work, wide=wide)
            if self._copies is not None:
                self._copies.wide = wide
            else:
                self._wide = wide
        self._client.collective(self.call, self._tags[0], work, tuning, stuck)
        if self._copies is not None:
            self._copies.go_on(self._client, self.call)

    def finish(self, deadline: Deadline) -> End:
        """Waits for the answer. Several threads may."""
        if self.end is None and self._client.over is FORKED:  # its locks may be locked for ever
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
        """True if `finish` would return without waiting."""
        return self.end is not None or self.call.end is not None or self._client.over is FORKED

    @property
    def finishes_slowly(self) -> bool:
        """True if `finish` must still wait for copies to a device."""
        return self.end is None and self._copies is not None and not self._copies.are_settled

    def on_end(self, ended: Callable[[], None]) -> None:
        """Calls `ended`, in a thread of pccl, when `finish` would return without waiting."""
        self._client.on_end(self.call, lambda _: ended())

    def _conclude(self, end: End) -> None:
        self.over = True
        self._calls.leave(self.call)
        if isinstance(end, effects.Fail):
            if end.result in AGAIN:
                self._ranks.lose(self._client.plan, self._client.number)
        elif self._wide is not None:
            self._wide.narrow(info(end).world_size)
        if self._copies is not None:
            self._copies.settle()

    def cancel(self) -> None:
        """Ends the collective after an exception in its caller, and frees its tag. Idempotent."""
        try:
            self.over = True
            self._client.cancel(self.call)
            if self._copies is not None and self._client.over is not FORKED:
                aside(self._copies.cancel)
        finally:
            self._calls.leave(self.call)

    def detach(self) -> None:
        """The handle was garbage-collected: the collective continues, and then frees its tag."""

        def told(end: End) -> None:
            self._calls.leave(self.call)
            if isinstance(end, effects.Fail):
                log.warning("a collective whose handle was dropped has failed: %s", self.error(end))

        self._client.on_end(self.call, told)

    def error(self, end: effects.Fail) -> PCCLError:
        return error_of(self._name, end, self.call.began_s)


def info(end: effects.Answer) -> ReduceInfo:
    reduced = end.value
    assert isinstance(reduced, effects.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)


class AsyncReduceHandle:
    """A collective in progress, returned by the `_async` methods of `Communicator`.

    If the handle is garbage-collected before `wait()`, the collective continues, and its tag is
    free when it has ended; if it fails, the log has a warning.
    """

    def __init__(self, launch: Launch | None, made: Callable[[], Any] = nothing) -> None:
        """`launch` is None if there is nothing to wait for; `made` returns the result."""
        self._launch = launch
        self._made = made

    @property
    def result(self) -> Any:
        """The array, or list or dict of arrays, that holds the result.

        Its content is valid once `wait()` has reported success. In place of arrays that are
        read-only, it has new ones of their library, made when this is read.
        """
        return self._made()

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
            launch.cancel()
            raise
        if isinstance(end, effects.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, info(end)

    def done(self) -> bool:
        """True if `wait()` would return at once. Does not wait, and changes nothing.

        `result` is valid, and the tag is free, only after `wait()` has returned.
        """
        return self._launch is None or self._launch.ended

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once `wait()` would return at once; now, if it would already.

        It is called in a thread of pccl and must return soon: it may set an event, for example. The
        caller keeps the handle, and calls `wait()`.
        """
        if self._launch is None:
            callback()
        else:
            self._launch.on_end(callback)

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

            launch.on_end(tell)
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
            launch.detach()


# ---- launching, and waiting ----


def launch(membership: Membership, name: str, work: Operands, tag: int) -> AsyncReduceHandle:
    one = Launch(membership, name, tag)
    try:
        one.begin(work)
        return AsyncReduceHandle(one, work.result)
    except BaseException:
        one.cancel()
        raise


def run(
    membership: Membership, name: str, work: Operands, tag: int, timeout: float | None
) -> ReduceInfo:
    """Launches a collective and waits for it; raises an exception if it fails."""
    deadline = Deadline(timeout)
    one = Launch(membership, name, tag)
    try:
        one.begin(work, stuck=timeout is None and membership.calls.single_threaded())
        end = one.finish(deadline)
    except BaseException:
        one.cancel()
        raise
    if isinstance(end, effects.Fail):
        raise one.error(end)
    found = info(end)
    object.__setattr__(found, "result", work.result())  # pypccl's constructor does not take it
    return found


def run_all(
    membership: Membership, name: str, works: Sequence[Operands], tag: int, timeout: float | None
) -> None:
    """Launches several collectives, waits for all, and raises the first failure."""
    deadline = Deadline(timeout)
    launches: list[Launch] = []
    try:
        for work in works:
            launches.append(Launch(membership, name, tag))
            launches[-1].begin(work)
        ends = [(one, one.finish(deadline)) for one in launches]
    except BaseException:
        for one in launches:
            one.cancel()
        raise
    for one, end in ends:
        if isinstance(end, effects.Fail):
            raise one.error(end)


def run_with_retry(
    membership: Membership,
    name: str,
    descriptors: Sequence[ReduceOpDescriptor],
    max_in_flight: int,
    timeout: float | None,
) -> ReduceInfo:
    """Runs several all-reduces, in bundles, and repeats each bundle until it commits."""
    deadline = Deadline(timeout)
    if not descriptors:
        raise error_for(Result.INVALID_ARGUMENT, name, "the list of descriptors is empty")
    for descriptor in descriptors:
        require("a descriptor", descriptor, ReduceOpDescriptor)
    if max_in_flight < 1:
        why = f"max_in_flight is {max_in_flight}: it must be at least 1"
        raise error_for(Result.INVALID_ARGUMENT, name, why)
    parts = operands.bundles(descriptors)
    waiting = list(range(len(parts)))
    in_flight: list[tuple[int, Launch]] = []
    world_size = tx_bytes = rx_bytes = 0
    try:
        while waiting or in_flight:
            while waiting and len(in_flight) < max_in_flight:
                index = waiting.pop(0)
                tags = [each.reduce_descriptor.tag for each in parts[index]]
                one = Launch(membership, name, *tags)
                in_flight.append((index, one))
                one.begin(operands.of_descriptors(parts[index]))
            index, one = in_flight[0]
            end = one.finish(deadline)
            del in_flight[0]
            if isinstance(end, effects.Answer):
                found = info(end)
                world_size = found.local_world_size
                tx_bytes += found.tx_bytes
                rx_bytes += found.rx_bytes
            elif end.again:
                # In the order of the list, so that all peers have the same ones in flight.
                waiting = sorted([*waiting, index])
            else:
                for _, other in in_flight:
                    other.finish(Deadline(0.0))
                raise one.error(end)
    except BaseException:
        for _, one in in_flight:
            one.cancel()
        raise
    return ReduceInfo(world_size, tx_bytes, rx_bytes)
