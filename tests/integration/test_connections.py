"""The master's connections: which are gone is known whatever is read first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import zmq
from peers.waiting import wait_until

from pccl.runtime.server.connections import Connections
from pccl.runtime.sockets import RouterMail

Sockets = tuple[zmq.Socket[bytes], Connections, zmq.Context[zmq.Socket[bytes]]]


@pytest.fixture
def master() -> Iterator[Sockets]:
    """A ROUTER socket and its connections."""
    with contextlib.ExitStack() as opened:
        context = zmq.Context()
        opened.callback(context.destroy, linger=0)
        router = context.socket(zmq.ROUTER)
        connections = Connections(opened)
        connections.watch(router, opened)
        router.bind("tcp://127.0.0.1:*")
        yield router, connections, context


def say_and_go(master: Sockets) -> None:
    """Somebody connects, says something, and is gone."""
    router, _, context = master
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(router.get_string(zmq.LAST_ENDPOINT))
        dealer.send(b"hello")
        assert router.poll(10_000)


def heard(router: zmq.Socket[bytes]) -> tuple[bytes, tuple[int, str] | None]:
    """The connection of the next message, and its origin."""
    mail = RouterMail(router)
    taken = mail.take()
    assert taken is not None
    return taken[0], mail.origin()


def is_empty(connections: Connections) -> bool:
    """Whether the monitor reports no connection."""
    connections.read_monitor()
    return connections.patience_s is None


def test_a_connection_closed_before_its_first_message_is_read_is_lost(master: Sockets) -> None:
    router, connections, _ = master
    say_and_go(master)
    wait_until(lambda: is_empty(connections))
    conn, origin = heard(router)
    assert connections.learn(conn, origin)
    assert connections.take_lost(0.0, drained=False) == [conn]


def test_an_unreachable_connection_is_lost_after_its_messages_are_read(master: Sockets) -> None:
    router, connections, _ = master
    say_and_go(master)
    conn, origin = heard(router)
    assert connections.learn(conn, origin)
    connections.unreachable(conn)
    lost = [*connections.take_lost(0.0, drained=False), *connections.take_lost(0.0, drained=True)]
    assert conn in lost
