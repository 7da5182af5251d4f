"""Sends and receives messages without giving up the interpreter's lock.

pyzmq gives it up for each message. Whoever wants it back may have to wait for as long as another
thread computes, at most `sys.getswitchinterval()`, which is many times what the call takes; and
several such waits lie on the way of each collective. The calls here never wait for anything, so
that they can keep it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from pccl.ext import ffi, lib
from pccl.ext.tables import load

KEPT_BYTES = 1 << 16  # released with the next call; more at once


def _address(pointer: object) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def _locked(name: str, *arguments: Any) -> Callable[..., int]:
    """A function of the C core that is called with the interpreter's lock."""
    made = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    function: Callable[..., int] = made(_address(ffi.addressof(lib, name)))
    return function


class Mail:
    """What comes and goes on a socket that only one thread uses at a time.

    Args:
        socket: for messages of one frame each.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        backend = load()
        self._socket = socket
        self._by_python = backend.name != "libzmq"  # that backend calls back into Python
        self._table = table = backend.table
        self._mail = ffi.gc(ffi.new("pccl_mail *"), lambda mail: lib.pccl_mail_drop(table, mail))
        where = _address(table), socket.underlying
        take = _locked("pccl_mail_take", ctypes.c_void_p)
        self._receive = partial(take, *where, _address(self._mail))
        self._send = partial(_locked("pccl_mail_send", ctypes.c_char_p, ctypes.c_size_t), *where)

    def _check_open(self) -> None:
        """C has only the address of the socket, where by now something else may be."""
        if self._socket.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    def send(self, data: bytes) -> None:
        """Sends a message.

        Raises:
            zmq.Again: there is no room, or no connection.
            zmq.ZMQError: the socket or its context has been closed.
        """
        if self._by_python:
            self._socket.send(data, zmq.DONTWAIT)
            return
        self._check_open()
        error = self._send(data, len(data))
        if error == -zmq.EAGAIN:
            raise zmq.Again
        if error:
            raise zmq.ZMQError(-error)

    def take(self) -> list[bytes]:
        """All messages that wait; after this the socket has been found empty.

        Raises:
            zmq.ZMQError: the socket or its context has been closed.
        """
        taken: list[bytes] = []
        if self._by_python:
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                taken.append(self._socket.recv(zmq.DONTWAIT))
            return taken
        self._check_open()
        n = self._receive()
        while n > 0:
            data, size = self._mail.data, self._mail.size
            taken += [bytes(ffi.buffer(data[i], size[i])) for i in range(n)]
            if n < lib.PCCL_MAIL_MAX:
                break
            n = self._receive()
        if n < 0:
            raise zmq.ZMQError(-n)
        if taken and sum(map(len, taken)) > KEPT_BYTES:
            lib.pccl_mail_drop(self._table, self._mail)
        return taken
