"""TCP connections by descriptor: the kernel's facts about them (on Linux only), and their end."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

DESCRIPTORS = "/dev/fd"
SIZE = 192  # bytes read from the kernel's struct tcp_info, which only grows at its end
_RECEIVED_AT = 128  # the offset there of the u64 tcpi_bytes_received (since Linux 4.1)
COUNTED = sys.platform == "linux"
# The fields read: milliseconds, microseconds, numbers of packets, bytes per second.
_FIELDS = struct.Struct("=52xI12xI28xI44xI8xQQQ8x")


class TcpInfo(NamedTuple):
    silent_s: float  # since bytes last came from the other side
    rtt_s: float  # the round trip, as the kernel smooths it
    retransmits: int  # packets that were sent again
    min_rtt_s: float  # the least round trip lately
    delivery_rate: int  # bytes per second, by the latest acknowledgements
    busy_s: float  # how long bytes were in flight or waited to be sent
    rwnd_limited_s: float  # the part of `busy_s` when the other side had no room for more


def parse(data: bytes) -> TcpInfo | None:
    """Reads a struct tcp_info; None if the kernel is too old to give all fields."""
    if len(data) < SIZE:
        return None
    silent, rtt, again, min_rtt, rate, busy, full = _FIELDS.unpack(data[:SIZE])
    return TcpInfo(silent / 1e3, rtt / 1e6, again, min_rtt / 1e6, rate, busy / 1e6, full / 1e6)


@contextlib.contextmanager
def borrowed(descriptor: int, family: int = -1, kind: int = -1) -> Iterator[socket.socket]:
    """A socket for another owner's descriptor, which that owner may have closed or reused.

    `family` and `kind` save system calls. Raises OSError: it is not a socket.
    """
    found = socket.socket(family, kind, fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def of(connection: socket.socket) -> TcpInfo | None:
    """The facts about a connection; raises OSError if it is not a TCP connection."""
    if sys.platform != "linux":
        return None
    return parse(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE))


def of_descriptor(descriptor: int) -> TcpInfo | None:
    """The facts about another owner's connection, by descriptor; None if it is not TCP."""
    with contextlib.suppress(OSError), borrowed(descriptor) as connection:
        return of(connection)
    return None


def connections(others: Collection[tuple[str, int]]) -> dict[tuple[str, int], list[TcpInfo]]:
    """The facts about this process's connections to these addresses, by address."""
    found: dict[tuple[str, int], list[TcpInfo]] = {}
    for name in os.listdir(DESCRIPTORS) if COUNTED else ():
        # an error: the directory's own descriptor, or not a connection
        with contextlib.suppress(OSError), borrowed(int(name)) as connection:
            there = remote(connection)
            if there in others and (info := of(connection)) is not None:
                found.setdefault(there, []).append(info)
    return found


def remote(connection: socket.socket) -> Any:
    """The address at the other end: host and port, or the path of a Unix socket."""
    there = connection.getpeername()
    return (there[0].removeprefix("::ffff:"), there[1]) if isinstance(there, tuple) else there


def received(descriptor: int) -> int | None:
    """The number of bytes that a TCP connection has received so far; None if unknown."""
    if not COUNTED:
        return None
    with contextlib.suppress(OSError):
        with borrowed(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        if len(info) == _RECEIVED_AT + 8:  # an older kernel gives less
            return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
    return None


class Shutter:
    """Shuts down connections that libzmq owns, by descriptor.

    libzmq reports the end of a connection before it closes the descriptor. So if there is no such
    report after the descriptor was duplicated, the duplicate belongs to that connection. The
    duplicate replaces a descriptor that was opened in advance, because there may be no free one.
    """

    def __init__(self) -> None:
        self._blank = os.open(os.devnull, os.O_RDONLY)
        self._twin = os.dup(self._blank)

    def shut(self, descriptor: int, still: Callable[[], bool]) -> bool:
        """Shuts a connection down, unless its descriptor may have been reused meanwhile.

        After the duplication, `still` says whether the descriptor still belongs to the connection;
        its answer is returned. Raises OSError: the connection has just been closed, or the system
        allows no duplicate.
        """
        if sys.platform == "win32":
            with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as twin:
                if is_that_one := still():
                    twin.shutdown(socket.SHUT_RDWR)
            return is_that_one
        os.dup2(descriptor, self._twin, inheritable=False)
        try:
            if is_that_one := still():
                with borrowed(self._twin, socket.AF_INET, socket.SOCK_STREAM) as twin:
                    twin.shutdown(socket.SHUT_RDWR)
            return is_that_one
        finally:
            os.dup2(self._blank, self._twin, inheritable=False)

    def close(self) -> None:
        os.close(self._blank)
        os.close(self._twin)
