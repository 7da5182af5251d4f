"""`AsyncReduceHandle`: a collective in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from pccl.errors import PCCLError, not_picklable
from pccl.protocol import peer as core
from pccl.runtime.call import Call, Deadline
from pccl.runtime.client import Client
from pccl.types import ReduceInfo, Result


class AsyncReduceHandle:
    """A collective in progress; made by the `_async` methods of `Communicator`.

    Attributes:
        result: what the collective writes to: right once `wait()` has said that it succeeded. The
            array, or list or dict of arrays, that was passed for it, or was made.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        call: Call | None,
        release: Callable[[core.Answer | core.Fail], None],
        result: object,
    ) -> None:
        """`call` is None where there is nothing to wait for; `release` is told the outcome."""
        self.result = result
        self._name = name
        self._error: PCCLError | None = None
        self._client = client
        self._call = call
        self._release = release
        self._lock = threading.Lock()
        self._end: core.Answer | core.Fail | None = None
        if call is None:
            self._end = core.Answer(0, core.Reduced(1, 0, 0))

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "its collective is under way in this process")

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome; the same one every time, and never raises.

        Args:
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            (is_success, status, info): status is the value of a `Result`; a failed collective has
            `ReduceInfo(0, 0, 0)`, and its send buffer holds what it held before.
        """
        end = self._finish(timeout)
        if isinstance(end, core.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, info(end)

    def _finish(self, timeout: float | None = None) -> core.Answer | core.Fail:
        deadline = Deadline(timeout)
        with self._lock:
            if self._end is None:
                assert self._call is not None
                note = deadline.next(self._client, self._call)
                assert isinstance(note, core.Answer | core.Fail)
                self._end = note
                if isinstance(note, core.Fail):
                    self._error = error_of(self._name, note, self._call.began_s)
                self._release(note)
            return self._end

    @property
    def error(self) -> PCCLError | None:
        """What the blocking call would raise: who, where, why and what to do.

        None before `wait()` has returned, and when the collective has succeeded.
        """
        return self._error


def error_of(name: str, end: core.Fail, began_s: float | None = None) -> PCCLError:
    """The exception for a failed call, with its phase and how long it took."""
    when = [end.phase] if end.phase else []
    if began_s is not None:
        when.append(f"{time.monotonic() - began_s:.1f} s after the call began")
    return end.error(end.result, name, f"{end.why} ({', '.join(when)})" if when else end.why)


def info(end: core.Answer) -> ReduceInfo:
    """What the answer to a collective says."""
    reduced = end.value
    assert isinstance(reduced, core.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)
