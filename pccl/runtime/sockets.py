"""ZeroMQ sockets: their messages without the cost of the interpreter's lock (GIL), and waiting.

pyzmq releases the lock for each message. To get it back, a thread may have to wait up to
`sys.getswitchinterval()` for another one that computes, many times longer than the call takes. Each
collective would have several such waits. The calls of `Mail` and `RouterMail` never block, so they
can keep the lock.

zmq.Poller queries each socket before and after waiting, with two system calls each time. `Waiter`
waits only for the sockets' descriptors (ZMQ_FD), with a single one. Such a descriptor is
edge-triggered: it becomes readable when libzmq has news for a socket that was empty before. Any use
of the socket, including a send, may consume that event. So a woken reader reads until the socket is
empty, a sender reads again before it waits, and a new source is read before the first wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import zmq

from pccl.ext import address_of, ffi, lib
from pccl.ext.tables import load

COPIED_BYTES = 1 << 16  # the largest received frame that is copied


def _locked(name: str, socket: zmq.Socket[bytes], *arguments: Any) -> Callable[..., int]:
    """A function of the C core for this socket. It is called with the interpreter's lock held."""
    made = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    function = made(address_of(ffi.addressof(lib, name)))
    return partial(function, address_of(load().table), socket.underlying)


def _error(number: int) -> zmq.ZMQError:
    return zmq.Again() if number == -zmq.EAGAIN else zmq.ZMQError(-number)


# what is done with a closed socket fails with this: C has only its address, which may be reused
_CLOSED = -zmq.ENOTSOCK


class _Receiver:
    """Calls a function of the C core that receives frames, and holds them until the next call.

    Large frames are not copied: a view keeps the memory of its frame, and the next call uses other
    memory.
    """

    def __init__(self, name: str, socket: zmq.Socket[bytes], *arguments: Any) -> None:
        self._function = _locked(name, socket, ctypes.c_void_p, *arguments)
        self._drop = partial(lib.pccl_mail_drop, load().table)
        self._renew()

    def _renew(self) -> None:
        self.mail = ffi.gc(ffi.new("pccl_mail *"), self._drop)
        self._address, self._lent = address_of(self.mail), False

    def __call__(self, *arguments: int) -> int:
        self.let_go()
        return self._function(self._address, *arguments)

    def let_go(self) -> None:
        """Leaves the memory of large frames to their views."""
        if self._lent:
            self._renew()

    def frame(self, index: int) -> bytes | memoryview:
        mail = self.mail
        data, size = mail.data[index], mail.size[index]
        if size <= COPIED_BYTES:
            return bytes(ffi.buffer(data, size))
        self._lent = True
        return memoryview(ffi.buffer(ffi.gc(data, lambda _: mail), size))


class Mail:
    """Sends and receives messages of one frame on a socket; for one thread at a time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        backend = load()
        self._socket = socket
        self._by_python = backend.name != "libzmq"  # that backend calls back into Python
        self._receive = _Receiver("pccl_mail_take", socket, ctypes.c_uint32)
        bytes_ = (ctypes.c_char_p, ctypes.c_size_t)
        self._send = _locked("pccl_mail_send", socket, *bytes_, ctypes.c_void_p)

    def send(self, data: bytes) -> bool:
        """Sends a message. Returns whether messages wait: sending may consume their notification.

        Raises zmq.Again: there is no room, or no connection.
        """
        if self._by_python:
            self._socket.send(data, zmq.DONTWAIT)
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        waiting = _CLOSED if self._socket.closed else self._send(data, len(data), None)
        if waiting < 0:
            raise _error(waiting)
        return waiting > 0

    def send_now(self, data: bytes, sent: ctypes.Array[ctypes.c_int32]) -> bool:
        """Sends a message in a single C call. sent[0] becomes 1 then, even if an exception follows.

        Returns False if it was not sent, or if messages wait.
        """
        if self._by_python or self._socket.closed:
            return False
        return self._send(data, len(data), sent) == 0

    def take(self) -> list[bytes | memoryview]:
        """Receives all waiting messages, until the socket is empty."""
        taken: list[bytes | memoryview] = []
        if self._by_python:
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                taken.append(self._socket.recv(zmq.DONTWAIT))
            return taken
        n = most = lib.PCCL_MAIL_MAX
        while n == most:
            n = _CLOSED if self._socket.closed else self._receive(most)
            if n < 0:
                raise _error(n)
            taken += map(self._receive.frame, range(n))
        self._receive.let_go()
        return taken


class RouterMail:
    """Sends and receives messages on a ROUTER."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        backend = load()
        self._router, self._table = router, backend.table
        self._by_python = backend.name != "libzmq"
        bytes_ = (ctypes.c_char_p, ctypes.c_size_t)
        self._send = _locked("pccl_mail_send_to", router, *bytes_, *bytes_)
        self._receive = _Receiver("pccl_mail_take_from", router)
        self._frame = zmq.Frame()  # the last one received, if Python receives

    def take(self) -> tuple[bytes, bytes | memoryview | None] | None:
        """Receives the next message: the name of its connection, and its bytes, or None in place of
        the bytes if it has several frames. Returns None if no message waits."""
        if self._by_python:
            return self._take_by_python()
        frames = self._receive()
        if frames < 0:
            raise _error(frames)
        if not frames:
            return None
        name = bytes(self._receive.frame(0))
        return name, self._receive.frame(1) if frames == 1 else None

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
        """The descriptor of the connection of the last message, and the address of its other end.
        None if they are unknown, because the other end uses ZMTP 1 or 2, or sends random bytes."""
        if self._by_python:
            try:
                return int(self._frame.get(zmq.SRCFD)), str(self._frame.get("Peer-Address"))
            except zmq.ZMQError:
                return None
        message = ffi.addressof(self._receive.mail.message[1])
        descriptor = self._table.msg_get(message, zmq.SRCFD)
        address = self._table.msg_gets(message, b"Peer-Address")
        if descriptor < 0 or not address:
            return None
        return descriptor, ffi.string(address).decode()

    def send(self, to: bytes, data: bytes) -> None:
        """Sends a message to a connection.

        Raises zmq.Again: there is no room. Other ZMQErrors: it is lost, or there is no memory.
        """
        if self._by_python:
            payload = zmq.Frame(data, copy=True)  # may fail; then no first frame is sent either
            self._router.send(to, zmq.SNDMORE | zmq.DONTWAIT)
            self._router.send(payload, zmq.DONTWAIT, copy=False)
        elif error := self._send(to, len(to), data, len(data)):
            raise _error(error)


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
