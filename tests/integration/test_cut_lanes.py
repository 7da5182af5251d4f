"""Connections between peers that are reset at a chosen byte: no call waits for lost data."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, client_of
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.protocol.peer.calls import State
from pccl.runtime import limits
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import PeerClient

COUNT = 250_000  # floats
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset, and drops what is queued


class Gate:
    """Stands before a peer's port. Passes so many bytes to it, then none, then resets the lane.

    Attributes:
        port: where others are to connect.
        target: the peer's own port.
        left: bytes that may still pass; None: any number.
        full: set when no more may pass.
    """

    def __init__(self) -> None:
        self.target = 0
        self.left: int | None = None
        self.full = threading.Event()
        self._reset = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._pairs += [near, far]
                for job in (self._pass_on, self._pass_back):
                    thread = threading.Thread(target=job, args=(near, far), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                if self.left is not None:
                    data, self.left = data[: self.left], max(0, self.left - len(data))
                far.sendall(data)
                if self.left == 0:
                    self.full.set()
                    self._reset.wait(PATIENCE_S)
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    break
        _hang_up(near, far)

    def _pass_back(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(65536):
                near.sendall(data)

    def reset(self) -> None:
        """Resets what is held up; from now on everything passes."""
        self.left = None
        self._reset.set()

    def close(self) -> None:
        self.reset()
        _hang_up(self._listener, *self._pairs)
        for thread in self._threads:
            thread.join(PATIENCE_S)


def _hang_up(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):  # wakes who reads there
            each.shutdown(socket.SHUT_RD)
        each.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def run(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two peers; the second is reached through the gate."""
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    joins = []
    real = PeerClient.join

    def join(client: PeerClient, call: Call) -> None:
        joins.append(client)
        if len(joins) == 2:
            gate.target = client.hello.port
            client.hello = msgspec.structs.replace(client.hello, port=gate.port)
        real(client, call)

    monkeypatch.setattr(PeerClient, "join", join)
    with Cluster(2) as cluster:
        yield cluster


def broadcast(index: int, comm: pccl.Communicator, root: int) -> str:
    x = np.full(COUNT, 1 - index, np.float32)
    try:
        comm.broadcast(x, root=root)
    except pccl.PeerLostError as error:
        return f"{type(error).__name__}: {error}"
    assert (x == 1).all()
    return ""


def test_a_lane_that_is_lost_after_completion(run: Cluster, gate: Gate) -> None:
    """The root is done when it has handed over all that it holds."""
    root = run.comms[0].rank
    gate.left = COUNT * 2  # half of it; the rest is in the kernel's buffers

    def strike() -> None:
        assert gate.full.wait(PATIENCE_S)
        client = client_of(run.comms[0])
        started = client.peer.collectives.started
        wait_until(lambda: any(one.state is State.COMPLETE for one in [*started.values()]))
        gate.reset()

    striker = threading.Thread(target=strike)
    striker.start()
    began = time.monotonic()
    first, second = run.each(lambda i, c: broadcast(i, c, root))
    assert time.monotonic() - began < PATIENCE_S / 2
    striker.join()
    for said in (first, second):
        assert "could not pass on its data: its connection to peer 2" in said
        listed(said)
    root = run.comms[0].rank
    assert run.each(lambda i, c: broadcast(i, c, root)) == ["", ""]


def test_a_lane_that_is_lost_while_it_serves(
    run: Cluster, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's own stream, for its requests, stands: it cannot know."""
    monkeypatch.setattr(limits, "REMIND_S", 0.05)  # which must do no harm
    reminded = []
    remind = PeerClient.remind
    monkeypatch.setattr(
        PeerClient,
        "remind",
        lambda *a: (reminded.append(a), remind(*a)),  # type: ignore[func-returns-value]
    )
    gate.left = COUNT * 4 * 5 // 8

    def strike() -> None:
        assert gate.full.wait(PATIENCE_S)
        wait_until(lambda: len(reminded) >= 3)
        gate.reset()

    def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
        x = np.arange(COUNT, dtype=np.float32) if index == 0 else np.zeros(COUNT, np.float32)
        shared = pccl.SharedState.from_tensors({"x": x})
        shared.revision = 1 - index
        info = comm.sync_shared_state(shared)
        assert (x == np.arange(COUNT)).all()
        return info

    striker = threading.Thread(target=strike)
    striker.start()
    _, received = run.each(job)
    striker.join()
    assert received.rx_bytes == COUNT * 4
