"""File descriptors: those of libzmq's connections, and the limit on their number."""

from __future__ import annotations

import contextlib
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
