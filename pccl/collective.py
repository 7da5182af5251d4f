"""One collective from its caller's side: its handle, and the functions that launch and await it."""

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
from pccl.runtime.signals import aside
from pccl.support import require
from pccl.types import ReduceInfo, Result

log = logging.getLogger("pccl")


def info(end: effects.Answer) -> ReduceInfo:
    reduced = end.value
    assert isinstance(reduced, effects.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)


class AsyncReduceHandle:
    """A collective in progress, returned by the `_async` methods of `Communicator`.

    If the handle is garbage-collected before `wait()`, the collective continues, and its tag is
    free when it has ended; if it fails, the log has a warning.
    """

    _over = True  # no thread needs to await it

    def __init__(self, membership: Membership | None, name: str = "", *tags: int) -> None:
        """`_begin` launches the collective, whose tag is the first of the tags.

        Without a membership it has ended already.
        """
        self._made: Callable[[], Any] = nothing  # returns the result
        self._end: End | None = None  # the answer, once a thread has awaited it
        if membership is None:
            self._end = effects.Answer(0, effects.Reduced(1, 0, 0))
            return
        for tag in tags:
            if not 0 <= tag < 1 << 64:
                raise OverflowError(f"tag is {tag}: it must be in 0 to 2**64 - 1")
        self._client = membership.one_of_several(name)
        self._name, self._tags = name, tags
        self._calls, self._ranks = membership.calls, membership.ranks
        self._call = self._client.call()
        self._copies: Copies | None = None
        self._wide: Wide | None = None
        self._lock = threading.Lock()

    @property
    def result(self) -> Any:
        """The array, or list or dict of arrays, that holds the result.

        Its content is valid once `wait()` has reported success. Read-only arrays are replaced by
        new ones of their library, created when this is read.
        """
        return self._made()

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "its collective is under way in this process")

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome; later calls return the same outcome.

        An exception in this thread while it waits abandons the collective.

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
        try:
            end = self._finish(deadline)
        except BaseException:
            self._cancel()
            raise
        if isinstance(end, effects.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, info(end)

    def done(self) -> bool:
        """True if `wait()` would return at once. Does not wait, and has no side effects.

        `result` is valid, and the tag is free, only after `wait()` has returned.
        """
        if self._end is not None:
            return True
        return self._call.end is not None or self._client.is_forked

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` as soon as `wait()` would return at once, possibly now.

        It runs in a thread of pccl and must return soon: it may set an event, for example. The
        caller keeps the handle, and calls `wait()`.
        """
        if self._end is not None:
            callback()
        else:
            self._client.on_end(self._call, lambda _: callback())

    def __await__(self) -> Generator[Any, None, tuple[bool, int, ReduceInfo]]:
        """`await handle`, in asyncio: returns what `wait()` returns, without blocking the loop.

        Unlike an exception in `wait()`, cancelling an await (as `asyncio.wait_for` does) does not
        abandon the collective, which continues and can be awaited again. To abandon it, call
        `wait(timeout=0)`. Any number of tasks may await it.
        """
        return self._outcome().__await__()

    async def _outcome(self) -> tuple[bool, int, ReduceInfo]:
        import asyncio  # here, so that importing pccl does not import it

        if not self.done():
            loop, ended = asyncio.get_running_loop(), asyncio.Event()

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(ended.set)

            self.add_done_callback(notify)
            await ended.wait()
        if self._end is None and self._copies is not None and not self._copies.are_settled:
            return await asyncio.to_thread(self.wait)
        return self.wait()

    @property
    def error(self) -> PCCLError | None:
        """The exception that the blocking call would raise.

        None before `wait()` has returned, or if the collective has succeeded.
        """
        end = self._end
        if isinstance(end, effects.Fail):
            return error_of(self._name, end, self._call.began_s)
        return None

    # ---- its steps ----

    def _begin(self, work: Operands, stuck: bool = False) -> None:
        """Launches it. `stuck`: the caller makes no other call before the answer."""
        self._over, self._made = False, work.result
        self._calls.enter(self._name, self._call, self._tags, work.pair)
        conditions = self._client.knowledge.conditions
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
        self._client.collective(self._call, self._tags[0], work, tuning, stuck)
        if self._copies is not None:
            self._copies.go_on(self._client, self._call)

    def _finish(self, deadline: Deadline) -> End:
        """Waits for the answer; several threads may wait."""
        if self._end is None and self._client.is_forked:  # its locks may be locked forever
            self._end, self._over = FORKED, True
        if self._end is None:
            note = deadline.next(self._client, self._call)
            assert isinstance(note, effects.Answer | effects.Fail)
            with self._lock:
                if self._end is None:
                    self._conclude(note)
                    self._end = note
        assert self._end is not None
        return self._end

    def _conclude(self, end: End) -> None:
        self._over = True
        self._calls.leave(self._call)
        if isinstance(end, effects.Fail):
            if end.result in AGAIN:
                self._ranks.lose(self._client.knowledge.by_rank)
        elif self._wide is not None:
            self._wide.narrow(info(end).world_size)
        if self._copies is not None:
            self._copies.settle()

    def _cancel(self) -> None:
        """Ends the collective after an exception in its caller, and frees its tag. Idempotent."""
        if self._end is not None:
            return
        try:
            self._over = True
            self._client.cancel(self._call)
            if self._copies is not None and not self._client.is_forked:
                aside(self._copies.cancel)
        finally:
            self._calls.leave(self._call)


# ---- launching, and waiting ----


class _Held(AsyncReduceHandle):
    """A handle that its caller may drop. Only this class has `__del__`, which loses exceptions."""

    def __del__(self) -> None:
        if not self._over and not sys.is_finalizing():
            calls, call, name = self._calls, self._call, self._name

            def ended(end: End) -> None:
                calls.leave(call)
                if isinstance(end, effects.Fail):
                    why = error_of(name, end, call.began_s)
                    log.warning("a collective whose handle was dropped has failed: %s", why)

            self._client.on_end(call, ended)


def launch(membership: Membership, name: str, work: Operands, tag: int) -> AsyncReduceHandle:
    handle = _Held(membership, name, tag)
    try:
        handle._begin(work)
        return handle
    except BaseException:
        handle._cancel()
        raise


def run(
    membership: Membership, name: str, work: Operands, tag: int, timeout: float | None
) -> ReduceInfo:
    """Launches a collective and waits for it; raises an exception if it fails."""
    deadline = Deadline(timeout)
    one = AsyncReduceHandle(membership, name, tag)
    try:
        one._begin(work, stuck=timeout is None and not membership.calls.several_threads)
        end = one._finish(deadline)
    except BaseException:
        one._cancel()
        raise
    if isinstance(end, effects.Fail):
        raise error_of(name, end, one._call.began_s)
    found = info(end)
    object.__setattr__(found, "result", work.result())  # pypccl's constructor does not take it
    return found


def run_all(
    membership: Membership, name: str, works: Sequence[Operands], tag: int, timeout: float | None
) -> None:
    """Launches several collectives, waits for all, and raises the first failure."""
    deadline = Deadline(timeout)
    launches: list[AsyncReduceHandle] = []
    try:
        for work in works:
            launches.append(AsyncReduceHandle(membership, name, tag))
            launches[-1]._begin(work)
        ends = [(one, one._finish(deadline)) for one in launches]
    except BaseException:
        for one in launches:
            one._cancel()
        raise
    for one, end in ends:
        if isinstance(end, effects.Fail):
            raise error_of(name, end, one._call.began_s)


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
    in_flight: list[tuple[int, AsyncReduceHandle]] = []
    world_size = tx_bytes = rx_bytes = 0
    try:
        while waiting or in_flight:
            while waiting and len(in_flight) < max_in_flight:
                index = waiting.pop(0)
                tags = [each.reduce_descriptor.tag for each in parts[index]]
                one = AsyncReduceHandle(membership, name, *tags)
                in_flight.append((index, one))
                one._begin(operands.of_descriptors(parts[index]))
            index, one = in_flight[0]
            end = one._finish(deadline)
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
                    other._finish(Deadline(0.0))
                raise error_of(name, end, one._call.began_s)
    except BaseException:
        for _, one in in_flight:
            one._cancel()
        raise
    return ReduceInfo(world_size, tx_bytes, rx_bytes)
