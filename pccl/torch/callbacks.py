"""Threads that run what follows a collective: retries, copies, and callbacks of futures."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

IDLE_S = 5.0  # how long a thread without work stays

_log = logging.getLogger("pccl.torch")


class CallbackPool:
    """Runs jobs at once, in a thread that waits for one or else in a new one.

    A callback of a future may wait for another collective, whose own end needs a thread here: a
    bound on their number, or running callbacks where collectives end, could make them wait for each
    other for ever. Threads without work end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def run(self, job: Callable[[], None]) -> None:
        """Runs a job soon; never waits."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="pccl-torch", daemon=True
            ).start()
        inbox.put(job)

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            try:
                job = inbox.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                job = inbox.get()  # given to this thread just now
            if job is None:
                return
            try:
                job()
            except Exception:  # a callback's; its future has it as well
                _log.exception("a callback of a collective has failed")
            del job
            with self._lock:
                self._idle.append(inbox)


POOL = CallbackPool()


def in_pool(job: Callable[[], T]) -> Future[T]:
    """Runs a job soon; its result, or what it raises."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    POOL.run(work)
    return future
