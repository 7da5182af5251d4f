"""`AsyncReduceHandle`: a collective in progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import Any, NoReturn

from pccl.calls.launch import Launch, info
from pccl.errors import PCCLError, not_picklable
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Deadline
from pccl.types import ReduceInfo, Result


class AsyncReduceHandle:
    """A collective in progress; made by the `_async` methods of `Communicator`.

    When it is collected before anybody has waited for it, the collective goes on, and its tag is
    free when it is over; if it fails, the log has a warning.

    Attributes:
        result: what the collective writes to: right once `wait()` has said that it succeeded. The
            array, or list or dict of arrays, that was passed for it, or was made.
    """

    def __init__(self, launch: Launch | None, result: object) -> None:
        """`launch` is None where there is nothing to wait for."""
        self._launch = launch
        self.result = result

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "its collective is under way in this process")

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome, which is the same every time.

        An exception that comes to this thread meanwhile gives the collective up.

        Args:
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            (is_success, status, info): status is the value of a `Result`; a failed collective has
            `ReduceInfo(0, 0, 0)`, and its send buffer holds what it held before.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: `timeout` is no time to wait for.
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
        """Whether `wait()` would return at once. It waits for nothing and changes nothing.

        `result` is right, and the tag is free, only when `wait()` has returned.
        """
        return self._launch is None or self._launch.ended

    def __await__(self) -> Generator[Any, None, tuple[bool, int, ReduceInfo]]:
        """`await handle`, in asyncio: what `wait()` returns, and the event loop goes on meanwhile.

        Other than an exception in `wait()`, the cancellation of an await (by `asyncio.wait_for`,
        for instance) leaves the collective as it is: it goes on, and can be awaited again. To give
        it up, call `wait(timeout=0)`. Any number of tasks may await it.
        """
        return self._outcome().__await__()

    async def _outcome(self) -> tuple[bool, int, ReduceInfo]:
        import asyncio  # not with pccl: whoever awaits has it

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
        """What the blocking call would raise: who, where, why and what to do.

        None before `wait()` has returned, and when the collective has succeeded.
        """
        launch = self._launch
        return launch.error(launch.end) if launch and isinstance(launch.end, effects.Fail) else None

    def __del__(self) -> None:
        launch = getattr(self, "_launch", None)
        if launch is not None and not launch.over and not sys.is_finalizing():
            launch.forsake()
