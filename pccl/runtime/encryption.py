"""CURVE on sockets: encryption, and the authentication of connections.

For each connection, libzmq sends a ZAP request (ZeroMQ RFC 27) over inproc to a handler in the same
context. The handler decides whether the connection's key is allowed. Its owner's thread polls it
with the owner's other sockets, so it needs no locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pccl.errors import UnsupportedError
from pccl.runtime import limits
from pccl.security import KeyPair
from pccl.types import Result

log = logging.getLogger("pccl")

_ENDPOINT = "inproc://zeromq.zap.01"  # given by the RFC
_VERSION = b"1.0"


def require_curve() -> None:
    """Raises UnsupportedError if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        why = "this libzmq was built without CURVE: install pyzmq from one of its wheels"
        raise UnsupportedError(Result.INVALID_USAGE, "security", why)


def new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def secure_server(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Makes a socket that will bind accept only the keys that the context's `Zap` allows."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"pccl")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler all are refused


def secure_client(socket: zmq.Socket[bytes], keys: KeyPair, server: str) -> None:
    """Makes a socket that will connect accept only the holder of the public key `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())


class _Request(NamedTuple):
    route: bytes
    number: bytes
    address: str
    key: str


class Zap:
    """The ZAP handler of one context. Create it before a CURVE server binds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        # readable when a connection waits for `answer`
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self._waiting: list[_Request] = []

    def answer(self, decide: Callable[[str], bool | None]) -> None:
        """Answers the requests that have arrived.

        `decide` says whether the holder of a public key may connect. If it returns None, the answer
        is not known yet: the connection waits for a later call, within the handshake's time limit.
        """
        while self._read() or self._decided(decide):
            pass

    def _decided(self, decide: Callable[[str], bool | None]) -> bool:
        """Replies to the requests that can be decided. Returns whether there were any."""
        before = len(self._waiting)
        undecided = []
        for request in self._waiting:
            verdict = decide(request.key)
            if verdict is None:
                undecided.append(request)
            else:
                self._reply(request, verdict)
        for request in undecided[: -limits.HANDSHAKES_MAX]:
            self._reply(request, False)
        self._waiting = undecided[-limits.HANDSHAKES_MAX :]
        return len(self._waiting) < before

    def _read(self) -> bool:
        """Reads all requests. Returns whether there were any."""
        before = len(self._waiting)
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return len(self._waiting) > before
            route, _, _, number, _, address, _, mechanism, *credentials = frames
            assert mechanism == b"CURVE" and len(credentials) == 1  # its sockets use only CURVE
            key = z85.encode(credentials[0]).decode()
            self._waiting.append(_Request(route, number, address.decode(), key))

    def _reply(self, request: _Request, allowed: bool) -> None:
        if not allowed:
            log.info("refused %s: its key %s is not allowed", request.address, request.key)
        status = (b"200", b"OK") if allowed else (b"400", b"this key is not allowed")
        user = request.key.encode() if allowed else b""
        parts = [request.route, b"", _VERSION, request.number, *status, user, b""]
        frames = [zmq.Frame(part, copy=True) for part in parts]  # allocates all before it sends any
        self.socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        """Refuses all later connections."""
        self.socket.close()
