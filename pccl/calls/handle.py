"""`AsyncReduceHandle`: a collective in progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from pccl.calls.launch import Launch, info
from pccl.errors import PCCLError, not_picklable
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Deadline
from pccl.types import ReduceInfo, Result


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
