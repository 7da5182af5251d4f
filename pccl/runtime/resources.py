"""The process's descriptors, threads and memory: checks that there are enough, and a higher limit.

libzmq aborts the whole process if it cannot get a descriptor or a thread. An early check raises an
error that a program can catch.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import mmap
import os
import sys

WANTED = 1 << 16  # descriptors that a master asks for


def descriptor_limit() -> int:
    """The number of descriptors that this process may have at the same time, up to WANTED."""
    if sys.platform == "win32":
        return WANTED
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)


def raise_descriptor_limit() -> None:
    """Raises the limit on descriptors towards WANTED; only pccl's own programs call it."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def streams_max() -> int:
    """The number of peers to which this process can have streams at once."""
    return max(0, descriptor_limit() - DESCRIPTORS) // STREAM_DESCRIPTORS


# A peer needs 28 (measured), plus one per lane: a long link has up to 16 lanes in each direction.
DESCRIPTORS = 64
STREAM_DESCRIPTORS = 8  # descriptors of a stream with two lanes, and one in the other direction
THREADS = 8  # threads of a peer, including libzmq's
FIRST_BYTES = 1 << 16  # the first allocation of a trial thread
BUFFER_BYTES = 16 << 20  # a peer allocates more than this when it starts
_START_S = 10.0  # the longest that a trial thread may take to start
_MEMORY = (
    f"it needs the memory of {THREADS} threads, and this process cannot have it: raise its limit "
    "of address space (ulimit -v), or that of the container"
)

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # errors of `accept`
_LACKING = {*EXHAUSTED, errno.EAGAIN}


class OutOfResourcesError(Exception):
    """The system does not provide enough descriptors or threads."""


def out_of_resources(error: OSError) -> OutOfResourcesError | None:
    """The error to raise if `error` means that descriptors, threads or memory ran out."""
    if error.errno not in _LACKING:
        return None
    text = error.strerror or str(error)
    return OutOfResourcesError(f"{text}: raise this process's limits (ulimit -n), or close files")


def require_resources() -> None:
    """Checks that a peer or master can start.

    Raises OutOfResourcesError: it cannot; the text says which limit to raise.
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
        raise OutOfResourcesError(why) from None
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _require_threads() -> None:
    """Starts as many threads as a peer has, and lets each of them allocate memory.

    For a thread's first allocation, glibc reserves address space, which later threads use again. A
    limit (ulimit -v) may leave too little address space beside the stacks. This thread allocates
    nothing while the others run, so all of them end even if memory is short.
    """
    go = _thread.allocate_lock()
    states = [_Trial() for _ in range(THREADS)]
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
        raise OutOfResourcesError(why)


class _Trial:
    """A thread that only shows that it can be started."""

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
