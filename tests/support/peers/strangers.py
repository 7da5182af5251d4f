"""A server in a thread of this process, and strangers: ZMTP on plain TCP, and ZeroMQ sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import zmq

from pccl.protocol import messages as m
from pccl.runtime.server.server import Server
from peers.waiting import PATIENCE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY_DEALER = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
AS_PUSH = b"\x0bSocket-Type\x00\x00\x00\x04PUSH"
READY_PUSH = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
HANDSHAKE_MAX = 256  # bytes that a socket of ZeroMQ sends before its first message, at most
Member = tuple[bytes, bytes]  # whom a stream wants, and the epoch's nonce


def raw(port: int, data: bytes, ready: bytes = b"", member: Member | None = None) -> None:
    """Bytes on a plain TCP connection; whether the other side still wants them does not matter."""
    with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(OSError):
        connection.settimeout(PATIENCE_S)
        if ready:
            shake_hands(connection, ready, member)
        connection.sendall(data)


def shake_hands(connection: socket.socket, ready: bytes, member: Member | None = None) -> None:
    """The beginning of ZMTP 3, as far as the other side wants to hear it."""
    connection.settimeout(PATIENCE_S)
    if member is None:
        connection.sendall(GREETING + ready)
    else:
        hello = b"".join(bytes((len(each),)) + each for each in (b"HELLO", *member))
        connection.sendall(GREETING.replace(b"NULL\0", b"PLAIN") + command(hello))
        hear(connection, 64 + len(command(b"\x07WELCOME")))
        connection.sendall(command(b"\x08INITIATE" + AS_PUSH))
    answer = hear(connection, 66 if member is None else 2)
    hear(connection, answer[-1] if answer else 0)


def command(body: bytes) -> bytes:
    """A short command as ZMTP has it."""
    return bytes((4, len(body))) + body


def hear(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or as many as come."""
    heard = b""
    while len(heard) < size and (more := connection.recv(size - len(heard))):
        heard += more
    return heard


def framed(message: bytes) -> bytes:
    """A short message as ZMTP has it."""
    return bytes((0, len(message))) + message


HELLO = m.Hello(m.PROTOCOL_VERSION, "1", 0, "nowhere", 1, "", "x", b"")  # not dialled: a name


@contextlib.contextmanager
def serving(server: Server) -> Iterator[None]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def speaker(kind: int, port: int, member: Member | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket of a stranger, or of one that was a member."""
    context = zmq.Context()
    stranger = context.socket(kind)
    stranger.linger = 0
    stranger.sndtimeo = 1000  # who is refused has nobody to send to, in the end
    if member is not None:
        stranger.plain_username, stranger.plain_password = member
    stranger.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield stranger
    finally:
        stranger.close()
        context.term()


_told: weakref.WeakKeyDictionary[zmq.Socket[bytes], deque[bytes]] = weakref.WeakKeyDictionary()


def welcome(stranger: zmq.Socket[bytes]) -> m.MasterMessage:
    """The next message of the master."""
    told = _told.setdefault(stranger, deque())
    if told:
        return m.decode_from_master(told.popleft())
    assert stranger.poll(PATIENCE_S * 1000), "no answer"
    told.extend(m.opened(stranger.recv()))
    return m.decode_from_master(told.popleft())


class Proxy:
    """A TCP proxy between a peer and a master, which a test can cut."""

    def __init__(self, master: str) -> None:
        host, _, port = master.partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.seen = bytearray()  # all that has passed, in both directions
        self._sent = 0  # bytes that the peer has sent since the latest cut
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def is_back(self) -> bool:
        """True if the peer has sent a message since the latest cut."""
        return self._sent > HANDSHAKE_MAX

    def cut(self) -> None:
        """Breaks the connections; the peer may come back."""
        ends, self._ends = self._ends, []
        self._sent = 0
        for end in ends:
            with contextlib.suppress(OSError):  # the other side was faster
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):  # it refuses already
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends a call of `accept`
        self._listener.close()

    def close(self) -> None:
        self.refuse()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                self._ends += near, far
                self._threads.append(threading.Thread(target=self._connect, args=(near, far)))
                self._threads[-1].start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):  # the master is away, or it was cut
            far.connect(self._target)
            back = threading.Thread(target=self._pump, args=(far, near))
            back.start()
            self._pump(near, far)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side may close at any time
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
                if target.getpeername() == self._target and target in self._ends:
                    self._sent += len(data)
        with contextlib.suppress(OSError):  # closed already
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
