"""A port on which nobody listens, until a process of the test does."""

from __future__ import annotations

import os
import socket

_held: list[socket.socket] = []


def unused_port() -> int:
    """A port of 127.0.0.1 that no other test gets before this one ends.

    Connections to it are refused. Servers that set SO_REUSEADDR can bind it: a master, a store of
    torch. On Windows they could not, so there it is only likely to stay unused.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if os.name == "nt":
        held.close()
    else:
        _held.append(held)
    return port


def release() -> None:
    """The test is over."""
    while _held:
        _held.pop().close()
