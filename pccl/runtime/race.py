"""Which of several addresses of a peer answers first.

As RFC 8305 recommends, the next address is tried before the one before has failed: an address in a
network that does not reach this far is silent more often than it refuses. A peer's engine greets
whoever connects. Whether it is the right peer, only the handshake of a stream shows.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from pccl.runtime import limits

GREETING = b"\xff"  # the first byte of ZMTP
BEGUN = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK)


def destination(address: str, port: int) -> tuple[Any, ...]:
    """What `socket.getaddrinfo` says of a numeric address. Raises OSError if it is none."""
    host = address.encode(errors="replace")  # a str would load tables of international names: 4 ms
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]


def first_to_answer(
    addresses: Sequence[str], port: int, limit_s: float, greets: bool
) -> tuple[str, dict[str, str]]:
    """The first address that answers ("": none does), and why others do not, as far as is known.

    Args:
        addresses: numeric ones, in the order in which they are tried.
        port: of all.
        limit_s: for everything.
        greets: whether who listens there is to greet; else a connection is enough.
    """
    race = _Race(port, greets, min(limits.STAGGER_S, limit_s / (1 + len(addresses))))
    try:
        return race.run(list(addresses), time.monotonic() + limit_s), race.failed
    finally:
        race.close(f"no answer within {limit_s:.3g} s")


class _Race:
    """Attempts to connect, in progress."""

    def __init__(self, port: int, greets: bool, stagger_s: float) -> None:
        self._port, self._greets, self._stagger_s = port, greets, stagger_s
        self._selector = selectors.DefaultSelector()
        self.failed: dict[str, str] = {}

    def run(self, waiting: list[str], until_s: float) -> str:
        """Returns the first address that answers, or "" if none does in time."""
        next_s = now = time.monotonic()
        while now < until_s and (waiting or self._selector.get_map()):
            if waiting and (now >= next_s or not self._selector.get_map()):
                self._begin(waiting.pop(0))
                next_s = now + self._stagger_s
                continue
            due_s = min(next_s, until_s) if waiting else until_s
            for key, _ in self._selector.select(max(0.0, due_s - now)):
                assert isinstance(key.fileobj, socket.socket)
                if self._answers(key.fileobj, key.data):
                    return str(key.data)
            now = time.monotonic()
        self.failed.update(dict.fromkeys(waiting, "there was no time to try it"))
        return ""

    def close(self, why: str) -> None:
        """Ends all attempts, which have failed for this reason."""
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            self._end(key.fileobj, key.data, why)
        self._selector.close()

    def _begin(self, address: str) -> None:
        try:
            family, kind, protocol, _, where = destination(address, self._port)
            attempt = socket.socket(family, kind, protocol)
        except OSError as error:
            self.failed[address] = error.strerror or str(error)
            return
        attempt.setblocking(False)
        number = attempt.connect_ex(where)
        if number in BEGUN:
            self._selector.register(attempt, selectors.EVENT_WRITE, address)
        else:
            attempt.close()
            self.failed[address] = os.strerror(number)

    def _answers(self, attempt: socket.socket, address: str) -> bool:
        """Whether an attempt has succeeded; if it has failed, it ends."""
        number = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(attempt, address, os.strerror(number))
            return False
        if not self._greets:
            return True
        self._selector.modify(attempt, selectors.EVENT_READ, address)
        try:
            said = attempt.recv(len(GREETING))
        except OSError as error:
            if error.errno not in NOT_YET:
                self._end(attempt, address, error.strerror or str(error))
            return False
        if said != GREETING:
            self._end(attempt, address, "something else than a pccl peer answers")
        return said == GREETING

    def _end(self, attempt: socket.socket, address: str, why: str) -> None:
        self._selector.unregister(attempt)
        attempt.close()
        self.failed.setdefault(address, why)
