"""Signals: handlers in pccl's own programs, and work that no exception may interrupt.

These programs are pccl's commands, and scripts that only run a master. They install handlers
explicitly, as servers do: otherwise a process that a shell starts in the background ignores Ctrl-C.
A library must not make this decision for a program, so `MasterNode` and `Communicator` never
replace a program's handlers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import TypeAlias

ENDING = [signal.SIGINT, signal.SIGTERM]
Handler: TypeAlias = Callable[[int, FrameType | None], None]


def ended_by(handler: Handler) -> AbstractContextManager[None]:
    """Installs a handler for the signals that end a process; only in the main thread.

    These are SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup.
    """
    hangup = getattr(signal, "SIGHUP", None)
    ignored = hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN
    names = ["SIGINT", "SIGTERM"] + ["SIGHUP"] * (not ignored)
    return handled(dict.fromkeys(names, handler))


@contextmanager
def handled(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Installs signal handlers, by the signal's name, for the context; only in the main thread.

    Signals that this system lacks are left out.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name, handler in handlers.items():
            if (number := getattr(signal, name, None)) is not None:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler: raises KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


class Stopping:
    """A handler: the first signal asks to stop, a second one ends the process at once."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.number = 0  # the first signal; 0 before it
        self._stop = stop  # must neither block nor raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number
        self._stop()


# ---- work that an exception from a signal, or from another thread, must not interrupt ----


class Latch:
    """An event that is set once, and that an exception such as Ctrl-C cannot break.

    `threading.Event` and `Condition` are Python code: an exception that comes when a thread has
    just taken their lock leaves it locked, and another thread that sets the event waits for ever.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._waits = threading.Lock()
        self._waits.acquire()

    def set(self) -> None:
        self.is_set = True
        with suppress(RuntimeError):  # it was set before
            self._waits.release()

    def wait(self, seconds: float = -1) -> None:
        if not self.is_set and self._waits.acquire(timeout=seconds):
            self.set()  # for the next one that waits


INSISTENCE = 100  # interruptions, such as Ctrl-C, after which the work is abandoned


def insist(work: Callable[[], None]) -> None:
    """Runs work that must be done, and restarts it if an exception interrupts it.

    Raises BaseException: when the work is done, the first exception that interrupted it.
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

    Raises BaseException: an exception of the work, or one raised in this thread meanwhile.
    """
    claim, done = threading.Lock(), Latch()
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
