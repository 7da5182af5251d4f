"""Checks that this process can have enough descriptors and threads, before libzmq needs them.

libzmq aborts the whole process if it cannot get a descriptor or thread that it needs. Checking
first gives an error that can be caught.
"""

from __future__ import annotations

import _thread
import errno
import os
import threading

# A peer has 28 (measured), and one more for each lane, of which a long link has up to 16 both ways.
DESCRIPTORS = 64
THREADS = 8  # a peer's, with libzmq's own


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
    go, ended, started = threading.Event(), threading.Semaphore(0), 0

    def wait() -> None:
        go.wait()
        ended.release()

    try:
        for _ in range(THREADS):
            _thread.start_new_thread(wait, ())  # Thread.start() would wait for each to run
            started += 1
    except RuntimeError:
        why = (
            f"it needs {THREADS} threads, and this process can have {started} more: raise "
            "its limits of processes and of memory (ulimit -u, or those of the container)"
        )
        raise NoRoomError(why) from None
    finally:
        go.set()
        for _ in range(started):
            ended.acquire()
