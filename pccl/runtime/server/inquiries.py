"""What other threads ask the service thread: it answers between two of its waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from pccl.protocol.master import Status

log = logging.getLogger("pccl")


class Inquiries:
    """Questions for the status of the run, and their answers.

    Args:
        wake: ends a wait of the service thread; from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: deque[Future[Status]] = deque()

    def ask(self) -> Future[Status]:
        """From any thread: the status, when the service thread comes to it."""
        future: Future[Status] = Future()
        self._asked.append(future)
        self._wake()
        return future

    def answer(self, make: Callable[[], Status]) -> None:
        """On the service thread: answers all that were asked. No question can end the service."""
        while self._asked:
            future = self._asked.popleft()
            try:
                future.set_result(make())
            except Exception as error:
                log.exception("master: the status of the run cannot be told")
                future.set_exception(error)
