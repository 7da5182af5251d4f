"""Messages that are sent and received in one call each, with the interpreter's lock."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from peers.waiting import PATIENCE_S, wait_until

from pccl.ext import ffi, lib, tables
from pccl.runtime.sockets import COPIED_BYTES, Mail, RouterMail

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ends[0].bind("inproc://mail")
    ends[1].connect("inproc://mail")
    yield ends
    context.destroy(linger=0)


def test_all_that_waits_is_taken_in_its_order(backend: str, pair: Pair) -> None:
    here, there = map(Mail, pair)
    assert here.take() == []
    sent = [b"", b"\0x\0", *(b"%d" % i for i in range(3 * lib.PCCL_MAIL_MAX))]
    for data in sent:
        there.send(data)
    assert here.take() == sent
    assert here.take() == []
    here.send(b"back")
    assert there.take() == [b"back"]


def test_an_emptied_socket_signals_the_next_message(backend: str, pair: Pair) -> None:
    """As often as it is needed: its descriptor is edge-triggered."""
    here, there = map(Mail, pair)
    poller = zmq.Poller()
    poller.register(pair[0].FD, zmq.POLLIN)
    for times in range(20):
        while here.take():
            pass
        assert not poller.poll(0)
        there.send(b"%d" % times)
        assert poller.poll(5000)
        assert here.take() == [b"%d" % times]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_messages_are_not_kept(pair: Pair) -> None:
    here, there = map(Mail, pair)
    size = 64 << 20

    def taken() -> int:
        """The size of the next message; nothing but the reader can refer to it then."""
        found: list[bytes | memoryview] = []
        while not found:
            found = here.take()
        return len(found[0])

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    there.send(b"x")
    assert taken() == 1
    before = resident()
    there.send(bytes(size))
    assert taken() == size > COPIED_BYTES
    wait_until(lambda: resident() < before + size // 2)


def test_a_large_message_keeps_its_bytes(backend: str, pair: Pair) -> None:
    here, there = map(Mail, pair)
    sent = [bytes([i]) * (COPIED_BYTES + i) for i in range(3 * lib.PCCL_MAIL_MAX)]
    for data in sent:
        there.send(data)
    taken = here.take()
    there.send(b"x")
    assert here.take() == [b"x"]
    del here
    assert taken == sent


def test_errors_of_sending_and_receiving_are_raised(backend: str) -> None:
    with zmq.Context() as context:
        lonely = context.socket(zmq.DEALER)
        lonely.setsockopt(zmq.IMMEDIATE, 1)
        mail = Mail(lonely)
        with pytest.raises(zmq.Again):
            mail.send(b"to nobody")
        lonely.close()
        for use in (mail.take, lambda: mail.send(b"x")):
            with pytest.raises(zmq.ZMQError, match="non-socket"):
                use()


def test_no_other_thread_gets_in_between(pair: Pair) -> None:
    if tables.load().name != "libzmq":
        pytest.skip("libzmq's functions are out of reach here")
    here, there = map(Mail, pair)
    ready, seen = threading.Lock(), list[int]()
    ready.acquire()

    def eager() -> None:
        with ready:
            seen.append(1)

    other, interval_s = threading.Thread(target=eager), sys.getswitchinterval()
    other.start()
    try:
        sys.setswitchinterval(100.0)  # nobody has to give up the interpreter's lock
        ready.release()
        began = time.process_time()
        while time.process_time() - began < 0.1:  # long enough for it to wake up and want the lock
            there.send(b"x" * 200)
            assert len(here.take()) == 1
        assert not seen, "the interpreter's lock was given up"
        other.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval_s)
        other.join()
    assert seen


def test_a_dropped_mail_releases_its_messages(pair: Pair) -> None:
    """Run under a sanitizer this is more than a smoke test."""
    here, there = map(Mail, pair)
    there.send(b"x" * 1000)
    assert here.take() == [b"x" * 1000]
    assert ffi.sizeof("pccl_mail") < 4096
    del here


def test_a_router_sends_to_one_of_its_connections(backend: str) -> None:
    with zmq.Context() as context:
        router, one, other = (context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER, zmq.DEALER))
        for socket in (router, one, other):
            socket.linger = 0
        router.router_mandatory = 1
        router.bind("inproc://router")
        for name, dealer in ((b"\0one", one), (b"\0two", other)):
            dealer.routing_id = name
            dealer.connect("inproc://router")
            dealer.rcvhwm = 1
        mail = RouterMail(router)
        assert mail.take() is None
        one.send_multipart([b"x"] * 1000)
        one.send(b"to \0 you")
        assert router.poll(5000)
        assert mail.take() == (b"\0one", None)
        assert mail.take() == (b"\0one", b"to \0 you")
        one.send(large := bytes(COPIED_BYTES + 1))
        assert router.poll(5000)
        taken = mail.take()
        assert mail.take() is None
        assert mail.origin() is None  # of this transport there is no descriptor
        assert taken == (b"\0one", large)
        mail.send(b"\0two", b"to \0 two")
        mail.send(b"\0one", b"")
        assert other.recv() == b"to \0 two" and one.recv() == b""
        with pytest.raises(zmq.ZMQError) as lost:
            mail.send(b"three", b"x")
        assert lost.value.errno == zmq.EHOSTUNREACH
        with pytest.raises(zmq.Again):
            while True:
                mail.send(b"\0one", b"x")
        mail.send(b"\0two", b"after a failure")
        assert other.recv() == b"after a failure"
        for socket in (router, one, other):
            socket.close()
