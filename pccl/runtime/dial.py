"""Dials peers to see whether they can be reached, without ever blocking.

A ZeroMQ socket that accepts a connection sends its greeting first. So a dial connects, reads the
first bytes, and closes; it sends nothing, and nothing can be made of it that a plain connection
could not. Names are not resolved, for that takes as long as it takes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import NamedTuple

from pccl.runtime.waiter import Waiter

LIMIT_S = 3.0  # for one dial; a lost packet is sent again after 1 s
DIALS_MAX = 64  # at the same time; any more are taken to be reached
GREETING = b"\xff"  # the first byte of ZMTP
NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOTCONN)

Then = Callable[[str | None], None]


class _Dial(NamedTuple):
    then: Then
    until_s: float


class Dialler:
    """Dials under way, each of which ends with a call of its `then`: why not, or "" when reached;
    None when no dial was made.

    Args:
        waiter: wakes the thread that uses this, and reads.
    """

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._dials: dict[socket.socket, _Dial] = {}

    @property
    def busy(self) -> bool:
        """Whether `tick` must be called now and then."""
        return bool(self._dials)

    def dial(self, host: str, port: int, now_s: float, then: Then) -> None:
        """Begins a dial; not to a name, and not one too many: `then` is called at once."""
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
        except (OSError, UnicodeError):
            found = []
        if not found or len(self._dials) >= DIALS_MAX:
            then(None)
            return
        family, kind, protocol, _, address = found[0]
        try:
            dialled = socket.socket(family, kind, protocol)
        except OSError:  # no such family here, or no more descriptors: that tells nothing of it
            then(None)
            return
        dialled.setblocking(False)
        number = dialled.connect_ex(address)
        if number not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            dialled.close()
            then(_text(number))
            return
        self._dials[dialled] = _Dial(then, now_s + LIMIT_S)
        self._waiter.add(dialled, lambda: self._read(dialled))

    def tick(self, now_s: float) -> None:
        """Gives up on those that have taken too long."""
        for dialled in [each for each, dial in self._dials.items() if dial.until_s <= now_s]:
            self._end(dialled, f"no answer within {LIMIT_S:g} s")

    def close(self) -> None:
        """Ends all; nobody is told."""
        for dialled in list(self._dials):
            self._forget(dialled)

    def _read(self, dialled: socket.socket) -> None:
        if dialled not in self._dials:
            return
        try:
            said = dialled.recv(len(GREETING))
        except OSError as error:
            if error.errno not in NOT_YET:
                self._end(dialled, _text(error.errno or 0))
            return
        if said == GREETING:
            self._end(dialled, "")
        elif said:
            self._end(dialled, "something else than a pccl peer answers there")
        else:
            self._end(dialled, "the connection is closed as soon as it is there")

    def _end(self, dialled: socket.socket, why: str) -> None:
        self._forget(dialled).then(why)

    def _forget(self, dialled: socket.socket) -> _Dial:
        self._waiter.remove(dialled)
        dialled.close()
        return self._dials.pop(dialled)


def _text(number: int) -> str:
    return {
        errno.ECONNREFUSED: "connection refused: nothing listens at that port",
        errno.ETIMEDOUT: "no answer",
        errno.ENETUNREACH: "there is no route to that network",
        errno.EHOSTUNREACH: "there is no route to that host",
    }.get(number, f"error {errno.errorcode.get(number, str(number))}")
