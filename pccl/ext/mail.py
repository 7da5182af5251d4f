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


def _locked(name: str, socket: zmq.Socket[bytes], *arguments: Any) -> Callable[..., int]:
    """A function of the C core for this socket, which is called with the interpreter's lock."""
    made = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    function = made(_address(ffi.addressof(lib, name)))
    return partial(function, _address(load().table), socket.underlying)


def _check(error: int) -> None:
    if error == -zmq.EAGAIN:
        raise zmq.Again
    if error < 0:
        raise zmq.ZMQError(-error)


def _memory() -> Any:
    """Memory for received messages."""
    table = load().table
    return ffi.gc(ffi.new("pccl_mail *"), lambda mail: lib.pccl_mail_drop(table, mail))


class Mail:
    """The messages to and from a socket that only one thread uses at a time.

    Args:
        socket: for messages of one frame each.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        backend = load()
        self._socket = socket
        self._by_python = backend.name != "libzmq"  # that backend calls back into Python
        self._table = backend.table
        self._mail = _memory()
        take = _locked("pccl_mail_take", socket, ctypes.c_void_p, ctypes.c_uint32)
        self._receive = partial(take, _address(self._mail), lib.PCCL_MAIL_MAX)
        self._send = _locked("pccl_mail_send", socket, ctypes.c_char_p, ctypes.c_size_t)

    def _check_open(self) -> None:
        """C has only the address of the socket, where by now something else may be."""
        if self._socket.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    def send(self, data: bytes) -> bool:
        """Sends a message. Whether messages wait: this may have consumed the notice of them.

        Raises:
            zmq.Again: there is no room, or no connection.
            zmq.ZMQError: the socket or its context has been closed.
        """
        if self._by_python:
            self._socket.send(data, zmq.DONTWAIT)
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        self._check_open()
        waiting = self._send(data, len(data))
        _check(waiting)
        return waiting > 0

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
        _check(n)
        if taken and sum(map(len, taken)) > KEPT_BYTES:
            lib.pccl_mail_drop(self._table, self._mail)
        return taken


class RouterMail:
    """The messages to and from the connections of a ROUTER.

    Args:
        router: outlives this object.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        backend = load()
        self._router, self._table = router, backend.table
        self._by_python = backend.name != "libzmq"
        bytes_ = (ctypes.c_char_p, ctypes.c_size_t)
        self._send = _locked("pccl_mail_send_to", router, *bytes_, *bytes_)
        self._mail = _memory()
        take = _locked("pccl_mail_take_from", router, ctypes.c_void_p)
        self._receive = partial(take, _address(self._mail))
        self._frame = zmq.Frame()  # the last one, by Python

    def take(self) -> tuple[bytes, bytes | None] | None:
        """The next message: the name of its connection, and its bytes; None in place of these if it
        has several frames, and instead of all if there is no message."""
        if self._by_python:
            return self._take_by_python()
        frames = self._receive()
        if frames <= 0:
            _check(frames)
            return None
        data, size = self._mail.data, self._mail.size
        name = bytes(ffi.buffer(data[0], size[0]))
        return name, bytes(ffi.buffer(data[1], size[1])) if frames == 1 else None

    def _take_by_python(self) -> tuple[bytes, bytes | None] | None:
        if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        name = self._router.recv(zmq.DONTWAIT)
        self._frame = self._router.recv(zmq.DONTWAIT, copy=False)
        if not self._frame.more:
            return name, self._frame.bytes
        while self._router.getsockopt(zmq.RCVMORE):
            self._router.recv(zmq.DONTWAIT)
        return name, None

    def origin(self) -> tuple[int, str] | None:
        """The descriptor from which the message came that was taken last, and the address at its
        other end; None if they are unknown, because it speaks ZMTP 1 or 2, or random bytes."""
        if self._by_python:
            try:
                return int(self._frame.get(zmq.SRCFD)), str(self._frame.get("Peer-Address"))
            except zmq.ZMQError:
                return None
        message = ffi.addressof(self._mail.message[1])
        descriptor = self._table.msg_get(message, zmq.SRCFD)
        address = self._table.msg_gets(message, b"Peer-Address")
        if descriptor < 0 or not address:
            return None
        return descriptor, ffi.string(address).decode()

    def send(self, to: bytes, data: bytes) -> None:
        """Sends a message to a connection.

        Raises:
            zmq.Again: there is no room.
            zmq.ZMQError: the connection is lost, or there is no memory; nothing was sent.
        """
        if self._by_python:
            payload = zmq.Frame(data, copy=True)  # before the first part: it may lack memory
            self._router.send(to, zmq.SNDMORE | zmq.DONTWAIT)
            self._router.send(payload, zmq.DONTWAIT, copy=False)
        elif error := self._send(to, len(to), data, len(data)):
            _check(error)
