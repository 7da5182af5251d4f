"""Descriptors and threads: limits that are raised, and what a process must be able to have.

libzmq aborts the whole process if it cannot get a descriptor or thread that it needs. Checking
first gives an error that can be caught.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable

WANTED = 1 << 16  # descriptors of a master, if the system allows this many


def limit() -> int:
    """How many this process may have at the same time, as far as that is known."""
    if sys.platform == "win32":
        return WANTED
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)


def raise_limit() -> None:
    """Asks for more: the usual 1024 are of another time. For programs of our own."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# Where struct tcp_info of Linux (since 4.1) has the u64 tcpi_bytes_received.
_RECEIVED_AT = 128
COUNTED = sys.platform == "linux"


def received(descriptor: int) -> int | None:
    """The number of bytes that a TCP connection has received so far; None if unknown.

    The descriptor belongs to libzmq, and may have been closed or reused meanwhile.
    """
    if not COUNTED:
        return None
    borrowed = None
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return None
    finally:
        if borrowed is not None:
            borrowed.detach()
    if len(info) < _RECEIVED_AT + 8:  # an older kernel
        return None
    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])


class Shutter:
    """Shuts connections down that libzmq owns, by descriptor.

    libzmq says that a connection is gone before it closes its descriptor. So if nothing has been
    said after the descriptor was duplicated, the duplicate is of that connection. It takes no new
    descriptor, for there may be none.
    """

    def __init__(self) -> None:
        self._blank = os.open(os.devnull, os.O_RDONLY)
        self._twin = os.dup(self._blank)

    def shut(self, descriptor: int, still: Callable[[], bool]) -> None:
        """Shuts a connection down, unless its descriptor was reused meanwhile.

        `still` is asked after the duplication whether the descriptor is still the connection's.

        Raises:
            OSError: the connection has just been closed.
        """
        if sys.platform == "win32":
            with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as twin:
                if still():
                    twin.shutdown(socket.SHUT_RDWR)
            return
        os.dup2(descriptor, self._twin, inheritable=False)
        try:
            if still():
                borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._twin)
                try:
                    borrowed.shutdown(socket.SHUT_RDWR)
                finally:
                    borrowed.detach()
        finally:
            os.dup2(self._blank, self._twin, inheritable=False)

    def close(self) -> None:
        """Closes its descriptors."""
        os.close(self._blank)
        os.close(self._twin)


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
    """The error to raise instead, if the system still lacks descriptors, threads or memory."""
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
