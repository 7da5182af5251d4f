"""Real engines, several in one process, on both backends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zmq
from peers.engines import ALIGNMENT, F32, NONCE, PATIENCE_S, RUN, SUM, AllReduce, Peer

from pccl.ext import lib, tables
from pccl.protocol.peer.effects import End, StartOp, StartTransfer
from pccl.protocol.ring import RingPlace
from pccl.runtime.client.engine import (
    COMPLETE,
    FAILED,
    SETTLED,
    STREAM_LOST,
    STREAM_UP,
    UNREACHABLE,
    Engine,
    EngineOptions,
    Part,
)

I64, AVG = 7, 1
OPTIONS = EngineOptions(heartbeat_ms=0, connect_timeout_ms=2000)


Make = Callable[..., list[Peer]]


@pytest.fixture(params=["libzmq", "pyzmq"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("PCCL_ENGINE", request.param)
    tables.load.cache_clear()
    yield request.param
    tables.load.cache_clear()


@pytest.fixture
def make(backend: str) -> Iterator[Make]:
    """Makes engines in a ring: each one's stream 1 leads to the next."""
    made: list[Peer] = []

    def ring(n: int, transport: str = "tcp", *, lanes: int = 2, **changes: Any) -> list[Peer]:
        peers = [Peer(replace(OPTIONS, **changes)) for _ in range(n)]
        made.extend(peers)
        for i, peer in enumerate(peers):
            assert peer.engine.backend == backend
            to = peers[(i + 1) % n].endpoint(transport)
            peer.engine.open_stream(1)
            peer.engine.connect_stream(1, to, lanes=lanes, hwm=4)
        return peers

    yield ring
    for peer in made:
        peer.engine.close()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("n", [2, 3])
def test_all_reduce(make: Make, n: int, transport: str) -> None:
    peers = make(n, transport)
    for op, count in enumerate([0, 1, 65, 1000, 200_001], start=1):
        for in_place in (False, True):
            work = AllReduce(peers, 10 * op + in_place, count, in_place=in_place)
            for who in range(n):
                work.start(who)
            work.finish()
            if not in_place:
                np.testing.assert_array_equal(work.send, work.given)
    assert [peer.engine.dropped for peer in peers] == [0] * n


def test_averages_of_integers_are_sums(make: Make) -> None:
    peers = make(2)
    send = [np.array([7, -7, 2**40]), np.array([2, -2, 1])]
    recv = [np.zeros(3, np.int64) for _ in peers]
    for who, peer in enumerate(peers):
        peer.engine.register_collective(
            1,
            run=RUN,
            tag=0,
            min_seq=0,
            what="all_reduce",
            redop=AVG,
            members=0,
            parts=[Part(send[who].ctypes.data, recv[who].ctypes.data, 3, I64)],
        )
        peer.engine.start(StartOp(1, 1, 1, (RingPlace(1, 2, who, 0, ALIGNMENT),), 4096))
    for who, peer in enumerate(peers):
        peer.wait(COMPLETE, 1)
        assert recv[who].tolist() == [9, -9, 2**40 + 1]  # their caller divides


def test_concurrent_ops_in_any_order(make: Make) -> None:
    peers = make(3)
    works = [AllReduce(peers, op, 5000 * op, in_place=op % 2 == 0) for op in range(1, 9)]
    for who, order in enumerate([works, works[::-1], works[4:] + works[:4]]):
        for work in order:
            work.start(who)
    for work in works:
        work.finish()


def test_late_start(make: Make) -> None:
    peers = make(3)
    work = AllReduce(peers, 1, 50_000, in_place=True)
    work.start(0)
    work.start(1)
    peers[0].engine.socket.poll(100)
    seen = [event for peer in peers for event in peer.engine.events()]
    assert not [event for event in seen if event.kind != STREAM_UP]
    work.start(2)
    work.finish()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_abort_restores(make: Make, transport: str) -> None:
    peers = make(2, transport)
    work = AllReduce(peers, 1, 4_000_000, in_place=True)
    work.start(0)
    work.start(1)
    for peer in peers:
        peer.engine.abort(1)
    for peer in peers:
        peer.wait(SETTLED, 1)
    np.testing.assert_array_equal(work.send, work.given)


def test_abort_of_an_op_that_no_other_peer_starts(make: Make) -> None:
    peers = make(2)
    work = AllReduce(peers, 1, 4_000_000, in_place=True)
    work.start(0)
    peers[0].engine.socket.poll(100)
    for peer in peers:
        peer.engine.abort(1)  # peer 1 has taken chunks, though it was never started
        peer.wait(SETTLED, 1)
    np.testing.assert_array_equal(work.send, work.given)


def test_close_with_unsettled_ops_restores(make: Make) -> None:
    peers = make(2)
    work = AllReduce(peers, 1, 1_000_000, in_place=True)
    work.start(0)
    work.start(1)
    peers[0].wait(COMPLETE, 1)
    for peer in peers:
        peer.engine.close()
        peer.engine.close()
    np.testing.assert_array_equal(work.send, work.given)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_stream_is_lost_when_the_neighbor_closes(make: Make, transport: str) -> None:
    peers = make(2, transport)
    done = AllReduce(peers, 1, 10)
    done.start(0)
    done.start(1)
    done.finish()
    work = AllReduce(peers, 2, 4_000_000, in_place=True)
    work.start(0)
    peers[1].engine.close()
    assert "disconnected" in peers[0].wait(STREAM_LOST, 1).text
    failed = peers[0].wait(FAILED, 2)
    assert (failed.status, failed.stream) == (lib.PCCL_ESTREAM, 1)
    assert "disconnected" in failed.text
    peers[0].engine.abort(2)
    peers[0].wait(SETTLED, 2)
    np.testing.assert_array_equal(work.send, work.given)


def test_closed_stream_fails_its_ops(make: Make) -> None:
    peers = make(2)
    work = AllReduce(peers, 1, 1000)
    work.start(0)
    peers[0].engine.close_stream(1)
    assert peers[0].wait(FAILED, 1).status == lib.PCCL_ESTREAM
    again = AllReduce(peers[:1], 2, 1000)
    peers[0].engine.start(StartOp(2, 2, 1, (RingPlace(1, 2, 0, 0, 1024),), 64))
    failed = peers[0].wait(FAILED, 2)
    assert (failed.stream, failed.text) == (1, "it is not open")
    np.testing.assert_array_equal(again.send, again.given)


def test_refused_connection(make: Make) -> None:
    (peer,) = make(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peer.engine.open_stream(2)
    peer.engine.connect_stream(2, f"tcp://127.0.0.1:{port}", lanes=3, hwm=1)
    assert "connected" in peer.wait(STREAM_LOST, 2).text


def test_malformed_endpoint(make: Make) -> None:
    (peer,) = make(1)
    peer.engine.open_stream(2)
    peer.engine.connect_stream(2, "nonsense://1", lanes=1, hwm=1)
    assert peer.wait(STREAM_LOST, 2).status == lib.PCCL_EZMQ
    with pytest.raises(ValueError, match="too long"):
        peer.engine.open_stream(3)
        peer.engine.connect_stream(3, "tcp://" + "1" * 300, lanes=1, hwm=1)


def test_connection_that_hangs(make: Make) -> None:
    """A full backlog drops what arrives, as a black hole does; an open one never says hello."""
    (peer,) = make(1, connect_timeout_ms=300)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            peer.engine.open_stream(2)
            peer.engine.connect_stream(2, f"tcp://127.0.0.1:{address[1]}", lanes=2, hwm=1)
            peer.engine.open_stream(3)
            peer.engine.connect_stream(
                3, f"tcp://127.0.0.1:{mute.getsockname()[1]}", lanes=2, hwm=1
            )
            assert peer.wait(STREAM_LOST, 2).status == UNREACHABLE
            assert peer.wait(STREAM_LOST, 3).status == UNREACHABLE
        for filler in fillers:
            filler.close()


ENGINE_ALONE = """
from pccl.runtime.client.engine import Engine, EngineOptions
engine = Engine(EngineOptions(heartbeat_ms=100, heartbeat_timeout_ms=400), host="127.0.0.1")
print(engine.port, flush=True)
input()
engine.close()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGSTOP")
def test_frozen_neighbor(make: Make) -> None:
    (peer,) = make(1)
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE_ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as frozen:
        assert frozen.stdout is not None
        port = int(frozen.stdout.readline())
        peer.engine.open_stream(2)
        peer.engine.connect_stream(2, f"tcp://127.0.0.1:{port}", lanes=1, hwm=1)
        for stream in (1, 2):
            peer.wait(STREAM_UP, stream)
        assert not peer.engine.socket.poll(600), "a healthy neighbor pings"
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            assert peer.wait(STREAM_LOST, 2).status == lib.PCCL_ESTREAM
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
            frozen.communicate(b"\n")


ENGINE_THAT_TAKES_NOTHING_YET = """
import threading
from pccl.runtime.client.engine import Engine, EngineOptions
run, go = threading.Thread.run, threading.Event()
threading.Thread.run = lambda thread: (go.wait(), run(thread))
engine = Engine(EngineOptions(heartbeat_ms=200, heartbeat_timeout_ms=2000), host="127.0.0.1")
print(engine.port, flush=True)
input()
go.set()
input()
engine.close()
"""


@pytest.mark.parametrize("lanes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_neighbor_that_takes_nothing_for_long_is_not_lost(make: Make, lanes: int) -> None:
    """Its own successor may be slow: heartbeats must not wait behind what it has not taken."""
    (peer,) = make(1, heartbeat_ms=200, heartbeat_timeout_ms=2000)
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE_THAT_TAKES_NOTHING_YET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as busy:
        assert busy.stdout is not None
        assert busy.stdin is not None
        port = int(busy.stdout.readline())
        peer.engine.open_stream(2)
        peer.engine.connect_stream(2, f"tcp://127.0.0.1:{port}", lanes=lanes, hwm=4)
        x = np.ones(16 << 20, np.float32)
        part = Part(x.ctypes.data, x.ctypes.data, x.size, F32)
        peer.engine.register_collective(
            5, run=RUN, tag=5, min_seq=4, what="broadcast", redop=SUM, members=0, parts=[part]
        )
        peer.engine.start(StartOp(5, 5, NONCE, (RingPlace(2, 2, 0, 0, x.size),), 1 << 18))
        for stream in (1, 2):
            peer.wait(STREAM_UP, stream)
        assert not peer.engine.socket.poll(5000), peer.engine.events()
        busy.stdin.write(b"\n")
        busy.stdin.flush()
        assert peer.wait(COMPLETE, 5).tx_bytes == x.nbytes
        assert not [event for event in peer.seen if event.kind == STREAM_LOST]
        busy.communicate(b"\n")


@pytest.mark.parametrize("holders", [1, 2, 11])
def test_serve_and_fetch(make: Make, holders: int) -> None:
    fetcher, *others = make(1 + holders, lanes=1)
    rng = np.random.default_rng(5)
    held = [rng.integers(0, 256, size, np.uint8) for size in (10, 0, 3_000_001, 70_000)]
    got = [np.zeros_like(piece) for piece in held]
    gets = [(number, piece.ctypes.data, piece.nbytes) for number, piece in enumerate(got)]
    fetcher.engine.register_fetch(1, run=RUN, tag=4, min_seq=0, pieces=gets[::-1])
    for number, holder in enumerate(others):
        pieces = [(number, piece.ctypes.data, piece.nbytes) for number, piece in enumerate(held)]
        holder.engine.open_stream(9)
        holder.engine.connect_stream(9, fetcher.endpoint("tcp"), lanes=2, hwm=2)
        holder.engine.register_serve(1, run=RUN, tag=4, min_seq=0, pieces=pieces)
        holder.engine.start_transfer(StartTransfer(1, 1, 1, (End(9, 5),), 0))
        fetcher.engine.open_stream(20 + number)
        fetcher.engine.connect_stream(20 + number, holder.endpoint("tcp"), lanes=1, hwm=8)
    ends = tuple(End(20 + number, 5) for number in range(holders))
    fetcher.engine.start_transfer(StartTransfer(1, 1, 1, ends, 1 << 16))
    complete = fetcher.wait(COMPLETE, 1)
    assert complete.settled
    assert complete.rx_bytes == sum(piece.nbytes for piece in held)
    for mine, theirs in zip(got, held, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    sent = 0
    for holder in others:
        holder.engine.commit(1)
        sent += holder.wait(SETTLED, 1).tx_bytes
    assert sent == complete.rx_bytes


def test_foreign_traffic_is_dropped(make: Make) -> None:
    """Messages of another protocol are counted, other bytes end their connection; work goes on."""
    peers = make(2)
    port = peers[0].engine.port
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{port}")
        for frames in ([b""], [b"x" * 64], [b"x" * 64, b"y"], [b"x"] * 5, [b"x" * 1000]):
            push.send_multipart(frames)
        deadline = time.monotonic() + PATIENCE_S
        while peers[0].engine.dropped < 5:
            assert time.monotonic() < deadline
            peers[0].engine.socket.poll(1)
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        work = AllReduce(peers, 1, 10_000)
        work.start(0)
        work.start(1)
        work.finish()
    assert peers[0].engine.dropped == 5


def test_oversized_messages_end_their_connection(make: Make) -> None:
    (peer,) = make(1)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.reconnect_ivl = -1
        monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        push.connect(f"tcp://127.0.0.1:{peer.engine.port}")
        push.send(bytes(lib.PCCL_CHUNK_MAX + 65))
        assert monitor.poll(int(PATIENCE_S * 1000))
        push.disable_monitor()
        monitor.close()
    assert peer.engine.dropped == 0


def test_a_silent_connection_is_closed(make: Make) -> None:
    (peer,) = make(1, connect_timeout_ms=300)
    peer.wait(STREAM_UP, 1)
    with socket.create_connection(("127.0.0.1", peer.engine.port)) as mute:
        mute.settimeout(PATIENCE_S)
        while mute.recv(64):
            pass


def test_ipc_path_is_private_and_removed(make: Make) -> None:
    (peer,) = make(1)
    directory = os.path.dirname(peer.engine.ipc)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    peer.engine.close()
    assert not os.path.exists(directory)


def test_impossible_engine_options_are_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="forward_max=0"):
        Engine(EngineOptions(forward_max=0))
    engine = Engine(host="127.0.0.1")
    with pytest.raises(OSError, match="cannot listen"):
        Engine(host="127.0.0.1", ports=[engine.port])
    engine.close()


def test_choice_of_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables.load("libzmq").name == "libzmq"
    assert tables.load("pyzmq").reason
    with pytest.raises(ValueError, match="nonsense"):
        tables.load("nonsense")
    tables.load.cache_clear()
    monkeypatch.setattr(tables, "EXTENSION_SUFFIXES", [".none"])
    fallback = tables.load("auto")
    assert fallback.name == "pyzmq"
    assert "does not show" in fallback.reason
    with pytest.raises(ImportError, match="out of reach"):
        tables.load("libzmq")
    tables.load.cache_clear()


FAULTS = {  # functions of libzmq that do not do what they should
    "no context": "void *zmq_ctx_new(void) { errno = EMFILE; return 0; }",
    "no socket": "void *zmq_socket(void *context, int kind) { errno = EMFILE; return 0; }",
    "no message": "int zmq_msg_init_size(void *message, size_t n) { errno = EMFILE; return -1; }",
    "nothing is sent": "int zmq_msg_send(void *message, void *socket, int flags) { return 100; }",
    "another version": "void zmq_version(int *a, int *b, int *c) { *a = *b = *c = 1; }",
}


@pytest.mark.skipif(sys.platform == "win32", reason="pyzmq's wheels hide libzmq there")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_libzmq_that_does_not_work(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of the functions of pyzmq's extension module stands a faulty one."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    name = next(name for name in sys.modules if name.endswith("._zmq"))
    real = Path(str(sys.modules[name].__file__))
    (tmp_path / "faulty.c").write_text(
        f"#include <errno.h>\n#include <stddef.h>\n{FAULTS[fault]}\n"
    )
    command = ["cc", "-shared", "-fPIC", "faulty.c", "-o", real.name]
    subprocess.run([*command, "-Wl,--no-as-needed", str(real)], cwd=tmp_path, check=True)
    faulty = ModuleType(name)
    faulty.__file__ = str(tmp_path / real.name)
    monkeypatch.setitem(sys.modules, name, faulty)
    tables.load.cache_clear()
    try:
        if fault.startswith("no "):
            # there may be memory enough without descriptors, and to say the contrary would mislead
            with pytest.raises(MemoryError, match="no socket or message: Too many open files"):
                tables.load("auto")
            return
        why = "did not arrive" if fault == "nothing is sent" else r"found libzmq \[1, 1, 1\]"
        with pytest.raises(ImportError, match=why):
            tables.load("libzmq")
        assert tables.load("auto").name == "pyzmq"
    finally:
        tables.load.cache_clear()
