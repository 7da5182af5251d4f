"""Garbage on real sockets, at the master's port and at an engine's, while peers go on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import socket
import struct
import threading

import numpy as np
import pytest
import zmq
from peers.cluster import Cluster, client_of, in_threads
from peers.strangers import (
    GREETING,
    HELLO,
    PATIENCE_S,
    READY_DEALER,
    READY_PUSH,
    Member,
    framed,
    raw,
    serving,
    shake_hands,
    speaker,
    welcome,
)
from peers.waiting import wait_until

import pccl
from pccl.protocol import messages as m
from pccl.protocol.master import Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.runtime import limits
from pccl.runtime.config import Config
from pccl.runtime.server.server import BATCH, Server
from pccl.runtime.sockets import RouterMail


def frames_of(draw: random.Random) -> list[bytes]:
    return [draw.randbytes(draw.choice([0, 1, 64, 65, 1000])) for _ in range(draw.randint(1, 4))]


def chunk_header(draw: random.Random) -> bytes:
    """A header that is almost right."""
    kind, seq = draw.choice([1, 2, 3, 9]), draw.choice([0, 1, 1 << 63])
    words = [draw.choice([0, 1, 65535]) for _ in range(3)]
    tail = (draw.choice([0, 64, 1 << 63]), draw.choice([0, 64, 1 << 31]), 0)
    return struct.pack("<IBBHQQQQHHHHQII", 0x4C434350, kind, 0, 2, 7, seq, 0, 1, *words, 0, *tail)


def bombard(port: int, kind: int, ready: bytes, draw: random.Random, member: Member | None) -> None:
    """All kinds of garbage, once each."""
    raw(port, draw.randbytes(5000))
    raw(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    raw(port, GREETING[: draw.randint(1, 63)])  # half a handshake
    raw(port, GREETING + draw.randbytes(200))
    raw(port, GREETING + ready + framed(b"too early"))
    raw(port, b"\x02" + struct.pack(">Q", 1 << 62), ready, member)  # a frame of 4 EiB
    raw(port, b"\x04\xff" + draw.randbytes(100), ready, member)  # half a command
    raw(port, b"\x01\x03abc" * 1000, ready, member)  # a message without an end
    with speaker(kind, port, member) as stranger, contextlib.suppress(zmq.Again):
        for _ in range(50):
            stranger.send_multipart(frames_of(draw))
        for _ in range(50):
            stranger.send_multipart([chunk_header(draw), draw.randbytes(256)])
        stranger.linger = 500
    with speaker(kind, port, member) as stranger, contextlib.suppress(zmq.Again):
        stranger.send(bytes(20 << 20))  # more than is read
        stranger.send(b"after it")
        stranger.linger = 500


def reduce_until(stop: threading.Event, index: int, comm: pccl.Communicator) -> int:
    """All-reduces with known results until all see the signal in the same step."""
    steps = 0
    while True:
        array = np.full(50_000, float(index + 1))
        array[-1] = stop.is_set()
        comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)
        assert (array[:-1] == 3.0).all()
        steps += 1
        if array[-1] > 0:
            return steps


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        ("master", "libzmq"),  # which has no engine
        *itertools.product(["engine", "engine, by a member"], ["libzmq", "pyzmq"]),
    ],
    indirect=["backend"],
)
def test_two_peers_reduce_on_while_strangers_send_garbage(target: str, backend: str) -> None:
    with Cluster(2) as cluster:
        stop = threading.Event()
        draw = random.Random(target)
        member: Member | None = None
        if target == "master":
            port, kind, ready = int(cluster.master.address.split(":")[1]), zmq.DEALER, READY_DEALER
        else:
            plan = client_of(cluster.comms[1]).knowledge.plan
            port, kind, ready = plan.peers[1].port, zmq.PUSH, READY_PUSH
        if target == "engine, by a member":
            member = (str(plan.peers[1].peer).encode(), f"{plan.nonce:016x}".encode())

        def attack() -> int:
            try:
                for _ in range(3):
                    bombard(port, kind, ready, draw, member)
            finally:
                stop.set()
            return 0

        peers = [
            lambda i=i, c=c: reduce_until(stop, i, c)  # type: ignore[misc]
            for i, c in enumerate(cluster.comms)
        ]
        steps = in_threads([*peers, attack])
        assert steps[0] == steps[1] > 0
        assert cluster.each(lambda _, comm: comm.are_peers_pending()) == [False, False]


# ---- the master's service ----


def test_a_connection_that_is_dropped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE_S", 0.2)
    server = Server("127.0.0.1", 0, Config(heartbeat_timeout_ms=60_000))
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            shake_hands(stranger, READY_DEALER)
            stranger.sendall(framed(b"garbage"))
            while stranger.recv(4096):  # until the master hangs up
                pass
        assert server.peers == 1


def test_a_kicked_peer_has_time_to_read_why_and_is_heard_no_more() -> None:
    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as stranger:
        for _ in range(5):  # twice is one too many; what follows must not register it again
            stranger.send(m.encode(HELLO))
        told = welcome(stranger)
        while not isinstance(told, m.Kicked):
            told = welcome(stranger)
        assert "hello twice" in told.why
        wait_until(lambda: server.peers == 0)
        assert not stranger.poll(200)
        assert server.peers == 0


def test_an_error_in_the_state_machine_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Master.feed

    def fail_once(master: Master, event: inputs.Event) -> list[Effect]:
        if isinstance(event, inputs.Received) and isinstance(event.message, m.Withdraw):
            raise RuntimeError("a bug")
        return feed(master, event)

    monkeypatch.setattr(Master, "feed", fail_once)
    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        with speaker(zmq.DEALER, server.port) as unlucky:
            unlucky.send(m.encode(HELLO))
            assert isinstance(welcome(unlucky), m.Welcome)
            unlucky.send(m.encode(m.Withdraw(1)))
            kicked = welcome(unlucky)
        assert isinstance(kicked, m.Kicked)
        assert "internal error" in kicked.why
        assert server.peers == 1
        honest.send(m.encode(m.PendingVote(1)))
        while not isinstance(welcome(honest), m.PendingResult):
            pass
    assert "caused an internal error" in caplog.text
    assert "RuntimeError: a bug" in caplog.text


def test_a_name_that_a_connection_gives_itself_is_refused() -> None:
    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        context = zmq.Context()
        named = context.socket(zmq.DEALER)
        named.routing_id = b"mine"
        named.connect(f"tcp://127.0.0.1:{server.port}")
        named.send(m.encode(HELLO))
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        assert not named.poll(100)
        assert server.peers == 1
        named.close(linger=0)
        context.term()


def test_unread_messages_of_closed_connections_do_not_hang_up_on_others() -> None:
    """Descriptors are used again: strangers that left much unread must not hang up on others."""
    server = Server("127.0.0.1", 0, Config())
    unread = limits.RECEIVED_MAX - 2
    number = 2 * BATCH // unread + 1

    def dial(stack: contextlib.ExitStack, message: bytes) -> list[socket.socket]:
        address = ("127.0.0.1", server.port)
        dialled = [stack.enter_context(socket.create_connection(address)) for _ in range(number)]
        for connection in dialled:
            shake_hands(connection, READY_DEALER)
            connection.sendall(message)
        return dialled

    with contextlib.ExitStack() as stack:
        for dead in dial(stack, unread * framed(b"garbage")):
            dead.shutdown(socket.SHUT_WR)
            while dead.recv(4096):  # until the server has read all, and let go of the descriptor
                pass
        dial(stack, framed(m.encode(HELLO)))
        stack.enter_context(serving(server))
        wait_until(lambda: server.peers == number)
        dial(stack, framed(m.encode(HELLO)))  # when these are in, all that came before was heard
        wait_until(lambda: server.peers >= 2 * number)
        assert server.peers == 2 * number


def test_a_peer_that_reads_nothing_does_not_fill_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "UNREAD_MAX", 100)
    monkeypatch.setattr(limits, "GRACE_S", 0.1)
    server = Server("127.0.0.1", 0, Config())
    entries = (m.Entry("x", 10, 4, False, b"a"),)
    first, wrong = (m.encode(m.SyncVote(1, m.Manifest(n, 0, entries))) for n in (1, 9))
    votes = 1000 * framed(wrong)  # to be answered by an error of many words
    with serving(server), socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stranger.connect(("127.0.0.1", server.port))
        shake_hands(stranger, READY_DEALER)
        stranger.sendall(framed(m.encode(HELLO)) + framed(first))
        wait_until(lambda: server.peers == 1)
        with pytest.raises(OSError, match=r"[Rr]eset|[Bb]roken"):  # the master hangs up
            while True:
                stranger.sendall(votes)
        wait_until(lambda: server.peers == 0)


def test_random_bytes_end_as_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("127.0.0.1", 0, Config())
    with (
        serving(server),
        caplog.at_level(logging.DEBUG, "pccl"),
        speaker(zmq.DEALER, server.port) as stranger,
    ):
        stranger.send(os.urandom(100))
        wait_until(lambda: "not a message" in caplog.text)


@pytest.mark.parametrize("lacking", ["for a message", "to handle a message"])
def test_a_master_out_of_memory_drops_no_peer(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its work may be half done, so it goes on as after a restart."""
    send, feed, failures = RouterMail.send, Master.feed, iter([True])

    def sent(mail: RouterMail, to: bytes, data: bytes) -> None:
        if next(failures, False):
            raise zmq.ZMQError(errno.ENOMEM)
        send(mail, to, data)

    def fed(master: Master, event: inputs.Event) -> list[Effect]:
        todo = feed(master, event)
        if isinstance(event, inputs.Received) and next(failures, False):
            raise MemoryError
        return todo

    def retried(_: int, comm: pccl.Communicator) -> float:
        while True:
            x = np.ones(10, np.float32)
            try:
                comm.all_reduce(x, op="sum", timeout=PATIENCE_S)
            except pccl.PeerLostError:
                continue
            return float(x[0])

    with Cluster(3) as cluster:
        if lacking == "for a message":
            monkeypatch.setattr(RouterMail, "send", sent)
        else:
            monkeypatch.setattr(Master, "feed", fed)
        assert cluster.each(retried) == [3, 3, 3]
    assert f"it had no memory {lacking}: it goes on as after a restart" in caplog.text
