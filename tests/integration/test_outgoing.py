"""Peers that no other can connect to take part in all calls, by dialling out."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, grow, in_threads
from peers.waiting import wait_until

import pccl
from pccl.cli.main import main
from pccl.runtime import limits
from pccl.runtime.client.rendezvous import VERSION, WELCOME, RendezvousPoint

NOWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): nobody can connect to it


class Mixed(Cluster):
    """Peers on different machines; the `outgoing` ones cannot be reached."""

    def __init__(self, outgoing: list[bool]) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0")
        self.master.run()
        self.comms = []
        try:
            for hidden in outgoing:
                self.add(hidden)
        except BaseException:
            self.close()
            raise

    def add(self, hidden: bool, group: int = 0) -> pccl.Communicator:
        advertise = NOWHERE if hidden else None
        comm = pccl.Communicator(
            self.master.address, group, advertise=advertise, outgoing_only=hidden
        )
        size = len(self.comms) + 1
        in_threads([comm.connect, *(lambda c=c: grow(c, size) for c in self.comms)])  # type: ignore[misc]
        self.comms.append(comm)
        return comm


@pytest.fixture(autouse=True)
def _by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")


def reduced(comm: pccl.Communicator, index: int, size: int) -> bool:
    data = np.full(100_000, index, np.float32)
    comm.all_reduce(data, op=pccl.ReduceOp.SUM)
    return bool((data == size * (size - 1) // 2).all())


def synchronized(comm: pccl.Communicator, index: int) -> bool:
    state = np.full(50_000, 7 if index == 0 else 0, np.float32)
    shared = pccl.SharedState([pccl.TensorInfo.from_numpy(state, "x")])
    shared.revision = int(index == 0)
    comm.sync_shared_state(shared)
    return bool((state == 7).all())


def test_peers_behind_nat_take_part_in_everything() -> None:
    """They came last, one after the other: the ring does not leave them side by side."""
    with Mixed([False, False, True, True]) as cluster:

        def work(index: int, comm: pccl.Communicator) -> bool:
            done = reduced(comm, index, 4) and synchronized(comm, index)
            word = np.zeros(3, np.float32)
            if comm.rank == 0:
                comm.send(word + 5, 1)
            elif comm.rank == 1:
                comm.recv(word, 0)
                done &= (word == 5).all()
            return done

        assert all(cluster.each(work))
        hidden = [NOWHERE in name for name in cluster.comms[0].peers]
        assert hidden == [False, True, False, True]


def test_two_behind_nat_get_an_error_that_names_both() -> None:
    with Mixed([True, True]) as cluster:

        def work(index: int, comm: pccl.Communicator) -> str:
            with pytest.raises(pccl.PCCLError, match="only dial out") as caught:
                reduced(comm, index, 2)
            with pytest.raises(pccl.PCCLError, match="only dial out"):
                synchronized(comm, index)
            return str(caught.value)

        for text in cluster.each(work):
            assert "peer 1" in text and "peer 2" in text and "PCCL_RELAY=1" in text
            listed(f"PCCLError: {text}")


@pytest.mark.parametrize("keys", [False, True])
def test_a_peer_that_wants_to_relays_between_two(
    keys: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    if keys:
        assert main(["keys", str(tmp_path / "keys")]) == 0
        monkeypatch.setenv("PCCL_CURVE_DIR", str(tmp_path / "keys"))
    with Mixed([True, True]) as cluster:
        monkeypatch.setenv("PCCL_RELAY", "1")
        cluster.add(False, group=1)  # it has no other part in it
        assert all(cluster.each(lambda i, comm: i == 2 or reduced(comm, i, 2)))
        assert all(cluster.each(lambda i, comm: i == 2 or synchronized(comm, i)))
    assert "this peer relays from peer 1" in caplog.text
    assert "goes by way of peer 3" in caplog.text


def test_a_master_that_does_not_dial_lets_everybody_in(caplog: pytest.LogCaptureFixture) -> None:
    with pccl.MasterNode("127.0.0.1:0", dial_back=False) as master:
        with pccl.Communicator(master.address, advertise="8.8.8.8") as comm:
            assert comm.world_size == 1
        assert "cannot be reached" not in caplog.text


def test_a_rendezvous_point_without_descriptors_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, times = socket.socket.accept, list[float]()
    exhausted = threading.Event()

    def failing(its: socket.socket) -> tuple[socket.socket, object]:
        if exhausted.is_set():
            times.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(its)

    monkeypatch.setattr(socket.socket, "accept", failing)
    exhausted.set()
    point = RendezvousPoint("127.0.0.1", (), 5.0)  # its first look would accept the guest else
    with socket.create_connection(("127.0.0.1", point.port), 5.0) as guest:
        wait_until(lambda: len(times) >= 3)
        assert times[2] - times[0] > limits.DESCRIPTORS_REST_S
        exhausted.clear()
        guest.sendall(bytes((VERSION, 1, 0)))
        assert guest.recv(len(WELCOME)) == WELCOME
    point.close()


@pytest.mark.slow
def test_the_rings_are_optimized_around_them() -> None:
    with Mixed([False, False, True, True]) as cluster:

        def work(index: int, comm: pccl.Communicator) -> bool:
            comm.optimize_topology()
            return reduced(comm, index, 4)

        assert all(cluster.each(work))
        hidden = [NOWHERE in name for name in cluster.comms[0].peers]
        assert hidden == [False, True, False, True]
