"""A server in a thread of this process, and connections of strangers to it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import zmq
from zmtp import PATIENCE_S, Member

from pccl.protocol import messages as m
from pccl.runtime.server.server import Server

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
