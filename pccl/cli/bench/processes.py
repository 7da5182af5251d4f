"""The measuring processes, one for each peer, which send their results over pipes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

LEAVE_S = 10.0  # for the processes to end by themselves after the last result


class BenchError(Exception):
    """A process could not measure; the text says why."""


@contextmanager
def processes(
    number: int, work: Callable[..., None], *arguments: object
) -> Iterator[list[Connection]]:
    """Starts processes that run work(i, *arguments, connection); gives the other ends."""
    context = multiprocessing.get_context("spawn")
    started = []
    results = []
    try:
        for index in range(number):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(index, *arguments, sender), daemon=True)
            process.start()
            sender.close()  # the process has its own, so that its end is the end of the pipe
            started.append(process)
            results.append(receiver)
        yield results
        for process in started:
            process.join(LEAVE_S)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()


def collect(results: Sequence[Connection]) -> list[Any]:
    """One result of every process. Raises BenchError if one sends text instead, or nothing."""
    found: dict[int, Any] = {}
    waiting = dict(enumerate(results))
    while waiting:
        ready = wait(waiting.values())
        for number in [number for number, result in waiting.items() if result in ready]:
            try:
                message = waiting.pop(number).recv()
            except EOFError:
                raise BenchError(f"process {number} ended before it had measured all") from None
            if isinstance(message, str):
                raise BenchError(f"process {number}: {message}")
            found[number] = message
    return [found[number] for number in range(len(results))]


def follow_parent() -> None:
    """In such a process: ends when the parent does, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
