"""The limits on what strangers can cost a master: memory, descriptors, and time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import zmq
from peers.cluster import gather, grow, in_threads
from peers.processes import Master
from peers.strangers import HELLO, READY_DEALER, framed, serving, shake_hands, speaker, welcome
from peers.waiting import wait_until

import pccl
from pccl.protocol import messages as m
from pccl.runtime import limits, tcp
from pccl.runtime.config import Config
from pccl.runtime.server.connections import PATIENCE, SHARE, Connections, Guard
from pccl.runtime.server.server import Server

COUNTED = pytest.mark.skipif(not tcp.COUNTED, reason="the system does not count bytes")


class GuardHarness:
    """A guard, and the connections that it sees."""

    def __init__(self, lines_max: int = 200) -> None:
        self.bytes: dict[int, int] = {}
        self.guard = Guard(self.bytes.get, lines_max, lambda: 0.0)
        self.now_s = 1000.0

    def come(self, descriptor: int, received: int = 0) -> None:
        self.guard.accepted(descriptor, self.now_s)
        self.bytes[descriptor] = received

    def hear(self, descriptor: int) -> None:
        line = self.guard.at(descriptor)
        assert line is not None
        line.hear()

    def cut(self, after_s: float = limits.KNOWN_LOOK_S, drained: bool = True) -> list[int]:
        self.now_s += after_s
        return [line.descriptor for line, _ in self.guard.look(self.now_s, drained)]


def test_a_message_without_an_end() -> None:
    harness = GuardHarness()
    harness.come(1)
    harness.come(2)
    harness.bytes[1] = limits.STRANGER_BYTES
    assert harness.cut() == []
    harness.bytes[1] += 10_000
    assert harness.cut() == [1]
    assert harness.cut() == []  # once is enough
    harness.hear(2)
    harness.bytes[2] = 1 << 40  # it has said whole messages of so much
    assert harness.cut() == []
    harness.bytes[2] += limits.KNOWN_BYTES
    assert harness.cut() == []
    harness.bytes[2] += 10_000
    assert harness.cut() == [2]


def test_heartbeats_are_no_message_without_an_end() -> None:
    harness = GuardHarness()
    harness.come(1)
    harness.hear(1)
    assert harness.cut() == []
    for _ in range(1000):
        harness.bytes[1] += 3600 * limits.HEARTBEAT_BYTES_S
        assert harness.cut(3600) == []


def test_a_connection_without_a_hello_is_cut() -> None:
    harness = GuardHarness()
    harness.come(1)
    harness.come(2)
    assert harness.cut(limits.HELLO_S) == []
    harness.hear(2)
    assert harness.cut() == [1]
    assert harness.cut(limits.HELLO_S) == []
    harness.come(3)
    assert harness.cut(limits.HELLO_S + 1, drained=False) == []  # perhaps it is only not read yet
    assert harness.cut(PATIENCE * limits.HELLO_S, drained=False) == [3]


def test_descriptors_are_used_again() -> None:
    harness = GuardHarness()
    harness.come(1, received=10)
    assert harness.cut(limits.HELLO_S - 1) == []
    harness.guard.gone(1)
    harness.come(1)
    assert harness.cut(2.0) == []
    ((line, _),) = harness.guard.look(harness.now_s + limits.HELLO_S, True)
    assert harness.guard.holds(line)
    harness.come(1)
    assert not harness.guard.holds(line)


def test_a_crowd_of_strangers() -> None:
    harness = GuardHarness(lines_max=6)
    for descriptor in range(5):
        harness.come(descriptor)
        harness.now_s += 0.001
    assert harness.cut() == [0, 1]
    for descriptor in range(2, 5):
        harness.guard.gone(descriptor)
    harness = GuardHarness()
    for descriptor in range(10):
        harness.come(descriptor, received=limits.STRANGERS_BYTES // 10)
    assert harness.cut() == []
    harness.bytes[4] += 1000
    assert harness.cut() == [4]


def test_looks_take_a_small_share_of_the_time() -> None:
    ticks = iter(range(100))
    watch = Guard(lambda _: 0, 10, lambda: float(next(ticks)))  # each look takes a second
    watch.accepted(1, 0.0)
    assert watch.look(limits.HELLO_S + 1, True)
    watch.accepted(2, 0.0)
    assert not watch.look(limits.HELLO_S + 1 + SHARE, True)
    assert watch.look(limits.HELLO_S + 3 + SHARE, True)


# ---- on real sockets ----


@COUNTED
def test_the_kernel_counts_received_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as here:
            there, _ = listening.accept()
            with there:
                assert tcp.received(there.fileno()) == 0
                here.sendall(bytes(1234))
                wait_until(lambda: tcp.received(there.fileno()) == 1234)
                number = there.fileno()
            assert tcp.received(number) is None
    with open(os.devnull) as file:
        assert tcp.received(file.fileno()) is None


def flood(port: int, frames: bytes) -> None:
    """Sends until the other side does not want any more."""
    with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
        shake_hands(stranger, READY_DEALER)
        stranger.settimeout(1.0)  # some systems do not say that it is closed, while data waits
        while True:
            stranger.sendall(frames)


@COUNTED
@pytest.mark.parametrize(
    "frames",
    [b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20), b"\x01\x00" * (1 << 17)],
    ids=["large", "empty"],
)
def test_a_message_without_an_end_takes_little_memory(frames: bytes) -> None:
    import resource

    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood(server.port, frames)
        honest.send(m.encode(m.PendingVote(1)))
        while not isinstance(welcome(honest), m.PendingResult):
            pass
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 1 << 20


def test_a_message_of_many_frames_is_dropped_with_its_connection() -> None:
    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        for told in (b"", m.encode(HELLO)):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                shake_hands(stranger, READY_DEALER)
                stranger.sendall(framed(told) if told else b"")
                stranger.sendall(b"\x01\x00" * 100_000 + framed(b"the end"))
                while stranger.recv(4096):  # until the master hangs up
                    pass
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        wait_until(lambda: server.peers == 1)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLO_S", 0.2)
    server = Server("127.0.0.1", 0, Config())
    with serving(server), speaker(zmq.DEALER, server.port) as honest:
        honest.send(m.encode(HELLO))
        assert isinstance(welcome(honest), m.Welcome)
        for greeting in (b"", b"\xff", None):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.settimeout(20)
                if greeting is None:
                    shake_hands(stranger, READY_DEALER)
                else:
                    stranger.sendall(greeting)
                while stranger.recv(4096):
                    pass
        assert server.peers == 1


def seconds_used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits another process")
def test_a_master_out_of_descriptors_serves_on_and_rests() -> None:
    import resource

    master = Master()
    pid = master.process.pid
    try:
        with pccl.Communicator(master.address) as comm, contextlib.ExitStack() as stack:
            used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, limits[1]))
            host, port = master.address.split(":")
            for _ in range(20):
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(socket.create_connection((host, int(port))))
            before_s, began_s = seconds_used(pid), time.monotonic()
            assert comm.are_peers_pending() is False
            with pytest.raises(pccl.PCCLTimeoutError):
                comm.wait_for_peers(2, timeout=2)
            assert comm.are_peers_pending() is False
            used_s, took_s = seconds_used(pid) - before_s, time.monotonic() - began_s
            assert used_s < took_s / 3, "it spins"
            stack.close()
            late = pccl.Communicator(master.address)
            in_threads([lambda: gather(late, 2), lambda: grow(comm, 2)])  # there is room again
            late.close()
    finally:
        master.kill()


class Monitor:
    """The monitor of a listening socket; events are pairs of a kind and a descriptor or errno."""

    def __init__(self, *events: tuple[int, int]) -> None:
        self._events = [*events]
        self.flood = True  # of failed accepts, as fast as it is read

    def recv_multipart(self, flags: int) -> list[bytes]:
        if self._events:
            kind, value = self._events.pop(0)
        elif self.flood:
            kind, value = zmq.EVENT_ACCEPT_FAILED, errno.ENFILE
        else:
            raise zmq.Again
        return [struct.pack("=hi", kind, value), b"tcp://127.0.0.1:1"]


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors of sockets are others there")
def test_a_flood_of_failed_accepts_stops_nothing_and_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as it lasts, nobody knows whose descriptor that of a connection is by now."""
    monkeypatch.setattr(limits, "HELLO_S", 0.0)
    with contextlib.ExitStack() as opened:
        near, far = (opened.enter_context(end) for end in socket.socketpair())
        connections = Connections(opened)
        monitor = Monitor((zmq.EVENT_ACCEPTED, near.fileno()))
        connections.monitor = monitor  # type: ignore[assignment]
        connections.read_monitor()  # returns, and the master's loop goes on
        assert connections.flooded, "it is to be read again at once"
        later_s = time.monotonic() + 10 * limits.STRANGERS_LOOK_S
        connections.cut(later_s, drained=True)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        monitor.flood = False
        connections.read_monitor()
        assert not connections.flooded
        connections.cut(later_s + 10 * limits.STRANGERS_LOOK_S, drained=True)
        assert far.recv(1) == b"", "it has said nothing"
