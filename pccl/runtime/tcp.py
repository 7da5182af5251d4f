"""The kernel's facts about a TCP connection; on Linux only."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection
from typing import NamedTuple

DESCRIPTORS = "/dev/fd"
SIZE = 192  # of what is read of the kernel's struct tcp_info, which only ever grows at its end
# where, in that struct: milliseconds, microseconds, numbers of packets, bytes per second
_FIELDS = struct.Struct("=52xI12xI28xI44xI8xQQQ8x")


class TcpInfo(NamedTuple):
    """A connection.

    Attributes:
        silent_s: since bytes last came from the other side.
        rtt_s: the round trip, as the kernel smooths it.
        retransmits: packets that were sent again.
        min_rtt_s: the least round trip lately.
        delivery_rate: bytes per second, as acknowledgements last came.
        busy_s: for so long bytes were on the way, or waited to be sent,
        rwnd_limited_s: of which the other side had no room for more.
    """

    silent_s: float
    rtt_s: float
    retransmits: int
    min_rtt_s: float
    delivery_rate: int
    busy_s: float
    rwnd_limited_s: float


def parse(data: bytes) -> TcpInfo | None:
    """From a struct tcp_info; None where the kernel gives less than is needed."""
    if len(data) < SIZE:
        return None
    silent, rtt, again, min_rtt, rate, busy, full = _FIELDS.unpack(data[:SIZE])
    return TcpInfo(silent / 1e3, rtt / 1e6, again, min_rtt / 1e6, rate, busy / 1e6, full / 1e6)


def of(connection: socket.socket) -> TcpInfo | None:
    """Of a connection. Raises OSError if it is none of TCP."""
    if sys.platform != "linux":
        return None
    return parse(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE))


def connections(others: Collection[tuple[str, int]]) -> dict[tuple[str, int], list[TcpInfo]]:
    """Of this process's connections to these addresses."""
    found: dict[tuple[str, int], list[TcpInfo]] = {}
    if sys.platform != "linux":
        return found
    for name in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):  # it is the directory's own, or no connection
            there = _peer(int(name))
            info = of_descriptor(int(name)) if there in others else None
            if there is not None and info is not None:
                found.setdefault(there, []).append(info)
    return found


def _peer(descriptor: int) -> tuple[str, int] | None:
    """The address at the other end of a connection; None if it is none of TCP."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    connection = socket.socket(fileno=descriptor)
    try:
        there = connection.getpeername()
    finally:
        connection.detach()
    return (there[0].removeprefix("::ffff:"), there[1]) if isinstance(there, tuple) else None


def of_descriptor(descriptor: int) -> TcpInfo | None:
    """Of a connection by its descriptor, which somebody else owns; None if it is none of TCP."""
    if sys.platform != "linux":
        return None
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        return of(connection)
    except OSError:
        return None
    finally:
        connection.detach()
