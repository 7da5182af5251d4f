"""Checks that this process can have enough descriptors and threads, before libzmq needs them.

libzmq aborts the whole process if it cannot get a descriptor or thread that it needs. Checking
first gives an error that can be caught.
"""

from __future__ import annotations

import _thread
import errno
import mmap
import os

# A peer has 28 (measured), and one more for each lane, of which a long link has up to 16 both ways.
DESCRIPTORS = 64
THREADS = 8  # a peer's, with libzmq's own
FIRST_BYTES = 1 << 16  # that a thread allocates
BUFFER_BYTES = 16 << 20  # that a peer allocates to begin with, and more
_START_S = 10.0  # in which a thread runs
_MEMORY = (
    f"it needs the memory of {THREADS} threads, and this process cannot have it: raise its limit "
    "of address space (ulimit -v), or that of the container"
)

_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}


class NoRoomError(Exception):
    """The system does not provide enough descriptors or threads."""


def no_room(error: OSError) -> NoRoomError | None:
    """What to raise instead, if the system lacks descriptors, threads or memory all the same."""
    if error.errno not in _LACKING:
        return None
    said = error.strerror or str(error)
    return NoRoomError(f"{said}: raise this process's limits (ulimit -n), or close files")


def require_room() -> None:
    """Checks that a peer or master can start.

    Raises:
        NoRoomError: it cannot; the text says which limit to raise.
    """
    if os.name == "posix":
        _require_descriptors()
    _require_threads()


def _require_descriptors() -> None:
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY))
        while len(taken) < DESCRIPTORS:
            taken.append(os.dup(taken[0]))
    except OSError as error:
        why = (
            f"it needs {DESCRIPTORS} descriptors for its sockets, and this process can have "
            f"{len(taken)} more ({error.strerror}): raise its limit (ulimit -n), or close files"
        )
        raise NoRoomError(why) from None
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _require_threads() -> None:
    """Has as many threads at once as a peer, each with the memory that a first allocation takes.

    glibc reserves address space for it, which a limit (ulimit -v) may not have beside all stacks;
    what it has reserved here is used again afterwards. Nothing is allocated once threads run, so
    that they all end, whatever is lacking.
    """
    go = _thread.allocate_lock()
    states = [_Tried() for _ in range(THREADS)]
    started, why = 0, ""
    go.acquire()
    try:
        for state in states:
            _thread.start_new_thread(state.run, (go,))  # Thread.start() waits for each to run
            started += 1
        for state in states:
            if not state.ready.acquire(timeout=_START_S) or state.lacks_memory:
                why = _MEMORY
        if not why:
            mmap.mmap(-1, BUFFER_BYTES).close()
    except RuntimeError:
        why = (
            f"it needs {THREADS} threads, and this process can have {started} more: raise "
            "its limits of processes and of memory (ulimit -u, or those of the container)"
        )
    except (MemoryError, OSError):
        why = _MEMORY
    finally:
        go.release()
        for state in states[:started]:
            state.ended.acquire(timeout=_START_S)
    if why:
        raise NoRoomError(why)


class _Tried:
    """A thread that is tried out."""

    def __init__(self) -> None:
        self.ready, self.ended = _thread.allocate_lock(), _thread.allocate_lock()
        self.ready.acquire()
        self.ended.acquire()
        self.lacks_memory = False

    def run(self, go: _thread.LockType) -> None:
        try:
            bytearray(FIRST_BYTES)
        except MemoryError:
            self.lacks_memory = True
        self.ready.release()
        go.acquire()
        go.release()
        self.ended.release()
