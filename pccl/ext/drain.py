"""Drops the rest of a message of many frames, in C: Python takes microseconds for each of them."""

from __future__ import annotations

import zmq

from pccl.ext import ffi, lib
from pccl.ext.tables import load


class Drain:
    """Drops what is left of messages. To be made before it is needed: that takes descriptors."""

    def __init__(self) -> None:
        self._backend = load()

    def __call__(self, socket: zmq.Socket[bytes]) -> int:
        """Drops the other frames of the message of which one was just received.

        Returns:
            How many there were.
        """
        if self._backend.name == "libzmq":
            pointer = ffi.cast("void *", socket.underlying)
            return int(lib.pccl_drain(self._backend.table, pointer))
        frames = 0
        while socket.getsockopt(zmq.RCVMORE):
            socket.recv(zmq.DONTWAIT)
            frames += 1
        return frames
