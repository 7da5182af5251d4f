"""Work that no exception of another thread's or a signal's making interrupts half-way."""

from __future__ import annotations

import threading
from collections.abc import Callable

INSISTENCE = 100  # whoever presses Ctrl-C so often gets out in the middle


def insist(work: Callable[[], None]) -> None:
    """Does what has to be done, again from the beginning when an exception comes in between.

    Raises:
        BaseException: the first one that came, when the work is done.
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
    """Does work in a thread of its own, where no exception comes in between, to its end.

    Raises:
        BaseException: what the work has raised, or what came to this thread meanwhile.
    """
    claim, done = threading.Lock(), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # an exception came just when the first thread had started
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
            except RuntimeError:  # no more threads can be had: here, then
                run()
        done.wait()

    insist(wait)
    if failed:
        raise failed[0]
