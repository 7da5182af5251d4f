"""Forked children: disables the parent's peer in them, and closes its sockets there.

A child has its parent's memory and descriptors, but not its threads, so the parent's peer cannot
work there. The kernel closes a connection only when no process has it open. If a child kept it
open, the death of the parent would go unnoticed, and the parent's port would stay in use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Collection
from typing import Any, Protocol

from pccl.protocol.peer import effects
from pccl.runtime import tcp
from pccl.types import Result

FORKED = effects.Fail(
    0,
    Result.INVALID_USAGE,
    "this process was forked from that of the peer, to which the membership belongs: make a "
    "Communicator of its own here, or start processes that need one by spawn or forkserver",
)

Address = tuple[str, int] | str  # a TCP address, or the path of an ipc socket


class Forkable(Protocol):
    """An object that is told of forks."""

    def forked(self) -> None:
        """Called first thing in a forked child."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(one: Forkable) -> None:
    """Calls `one.forked()` in each child that is forked while `one` exists."""
    _watched.add(one)


def _notify() -> None:
    for one in list(_watched):
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_notify)


def close_inherited(ports: Collection[int], path: str, others: Collection[Address]) -> None:
    """Closes, in a forked child, the sockets of the parent's peer.

    Args:
        ports: the TCP ports on which the parent listens and accepts connections.
        path: the ipc socket on which the parent listens.
        others: the addresses to which the parent has connected.
    """
    for name in os.listdir(tcp.DESCRIPTORS) if os.path.isdir(tcp.DESCRIPTORS) else ():
        # an error: the directory's own descriptor, or not such a socket
        with contextlib.suppress(OSError):
            with tcp.borrowed(int(name)) as found:
                ours = _is_one(found, ports, path, others)
            if ours:
                os.close(int(name))


def _is_one(
    found: socket.socket, ports: Collection[int], path: str, others: Collection[Address]
) -> bool:
    here = found.getsockname()
    if isinstance(here, tuple):
        if here[1] in ports and found.type == socket.SOCK_STREAM:
            return True
    elif path and here == path:
        return True
    there = tcp.remote(found)
    return bool(there) and there in others
