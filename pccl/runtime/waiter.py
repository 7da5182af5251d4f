"""Waits for ZeroMQ sockets at the price of one system call.

zmq.Poller asks each socket before and after it waits, at two system calls a time. This waits for
their descriptors alone (ZMQ_FD). Such a descriptor becomes readable when libzmq has something to
tell a socket, and any use of the socket, a send too, may take that in; and it has nothing to tell
before the socket was found empty. So whoever is woken reads until there is nothing more, whoever
has sent reads again before it waits, and a new source is read first of all.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import zmq

Source: TypeAlias = "zmq.Socket[Any] | socket.socket"
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def readable(source: zmq.Socket[Any]) -> bool:
    """Whether a message can be read. To ask costs much less than zmq.Again does."""
    return bool(cast(int, source.getsockopt(_EVENTS)) & _POLLIN)


class Waiter:
    """Sources, and what reads each of them until it is empty."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[Callable[[], object]] = []

    def add(self, source: Source, read: Callable[[], object]) -> None:
        """Waits for this source too."""
        self._selector.register(source, selectors.EVENT_READ, read)
        self._new.append(read)

    def remove(self, source: Source) -> None:
        """Waits for it no longer. To be called before it is closed."""
        self._selector.unregister(source)

    def wait(self, timeout_s: float | None) -> list[Callable[[], object]]:
        """What reads the sources that may have something, once one has; none after the time-out."""
        new, self._new = self._new, []
        return new or [key.data for key, _ in self._selector.select(timeout_s)]

    def close(self) -> None:
        """Waits for nothing any more."""
        self._selector.close()
