"""Runs work that an exception from a signal or another thread must not interrupt halfway."""

from __future__ import annotations

import threading
from collections.abc import Callable

INSISTENCE = 100  # interruptions, such as Ctrl-C, after which the work is abandoned


def insist(work: Callable[[], None]) -> None:
    """Runs work that must be done, and restarts it if an exception interrupts it.

    Raises BaseException: the first exception that interrupted it, when the work is done.
    """
    came: BaseException | None = None
    for _ in range(INSISTENCE):
        try:
            work()
            break
        except BaseException as error:
            came = came or error
    if came is not None:
        raise came


def aside(work: Callable[[], None]) -> None:
    """Runs work to its end in a separate thread, where no exception can interrupt it.

    Raises BaseException: raised by the work, or in this thread meanwhile.
    """
    claim, done = threading.Lock(), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # an exception arrived just after the first thread had started
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    def wait() -> None:
        if not claim.locked():
            try:
                threading.Thread(target=run, name="pccl-aside", daemon=True).start()
            except RuntimeError:  # no thread can be started: do the work here
                run()
        done.wait()

    insist(wait)
    if failed:
        raise failed[0]
