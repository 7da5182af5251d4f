"""Waits for ZeroMQ sockets, and for other threads, with a single system call.

zmq.Poller queries each socket before and after waiting, with two system calls each time. This
module waits only for the sockets' descriptors (ZMQ_FD). Such a descriptor is edge-triggered: it
becomes readable when libzmq has news for a socket that was empty before. Any use of the socket,
including a send, may consume that event. So a woken reader reads until the socket is empty, a
sender reads again before it waits, and a new source is read before the first wait.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import zmq

Source: TypeAlias = "zmq.Socket[Any] | socket.socket"
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def readable(source: zmq.Socket[Any]) -> bool:
    """True if a message can be read. This costs much less than a zmq.Again exception."""
    return bool(cast(int, source.getsockopt(_EVENTS)) & _POLLIN)


class Waiter:
    """Sources, each with a function that reads until the source is empty."""

    def __init__(self) -> None:
        self._new: list[Callable[[], object]] = []
        with contextlib.ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._alarm, self._woken = map(opened.enter_context, socket.socketpair())
            for end in (self._alarm, self._woken):
                end.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ, self._silence)
            self._opened = opened.pop_all()

    def add(self, source: Source, read: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, read)
        self._new.append(read)

    def remove(self, source: Source) -> None:
        """Removes a source. Call this before closing the source."""
        self._selector.unregister(source)

    def wait(self, timeout_s: float | None) -> list[Callable[[], object]]:
        """Waits until a source may be readable. Returns the readers to call; none on time-out."""
        new, self._new = self._new, []
        return new or [key.data for key, _ in self._selector.select(timeout_s)]

    def wake(self) -> None:
        """Makes the current or next `wait` return; for any thread or signal handler."""
        with contextlib.suppress(OSError):  # it is closed, or full, and will return anyway
            self._alarm.send(b"\0")

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def close(self) -> None:
        self._opened.close()
