"""send, recv and send_recv, end to end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster

import pccl

Array = np.ndarray[Any, Any]


def make(dtype: str, count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 100, count).astype(dtype)


def test_to_each_other_in_both_directions_at_once(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        others = [r for r in range(size) if r != rank]
        for tag, (count, dtype) in enumerate(
            ((0, "float32"), (1, "int8"), (65, "float64"), (300_001, "float32"), (9, "uint16"))
        ):
            sends = {r: make(dtype, count, 10 * rank + r) for r in others}
            recvs = {r: np.full(count, 101, dtype) for r in others}
            comm.send_recv(sends, recvs, tag=tag)
            for r in others:
                np.testing.assert_array_equal(recvs[r], make(dtype, count, 10 * r + rank))
                np.testing.assert_array_equal(sends[r], make(dtype, count, 10 * rank + r))

    cluster.each(job)


def test_lists_tags_and_handles_beside_a_collective() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            rank, total = comm.rank, np.ones(70_000)
            reduced = comm.all_reduce_async(total, op="sum", tag=1)  # the same tag as below
            if rank == 0:
                info = comm.send([np.arange(7.0), make("int8", 5, 1).reshape(5, 1).T], 2, tag=1)
                assert info == pccl.ReduceInfo(2, 61, 0)
                handles = [comm.send_async(np.full(9, tag), 2, tag=tag) for tag in (5, 4, 3)]
                assert all(handle.wait()[0] for handle in handles)
            if rank == 2:
                x, y = np.empty(7), np.empty((1, 5), np.int8)
                assert comm.recv([x, y], 0, tag=1) == pccl.ReduceInfo(2, 0, 61)
                np.testing.assert_array_equal(x, np.arange(7.0))
                np.testing.assert_array_equal(y, make("int8", 5, 1).reshape(5, 1).T)
                got = {tag: np.empty(9, int) for tag in (3, 4, 5)}
                handles = [comm.recv_async(got[tag], 0, tag=tag) for tag in got]
                for tag, handle in zip(got, handles, strict=True):
                    assert handle.wait()[0] and handle.result is got[tag]
                    assert (got[tag] == tag).all()
            assert reduced.wait()[0] and (total == 3).all()

        cluster.each(job)


def test_different_arrays_are_an_error_on_the_two_peers_only() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            rank, x = comm.rank, np.ones(2 + index)
            if rank:
                with pytest.raises(pccl.MismatchError, match="do not ask for the same") as caught:
                    comm.send(x, 2) if rank == 1 else comm.recv(x, 1)
                assert "called send(" in caught.value.message
                assert "called recv(" in caught.value.message
            assert comm.all_reduce(np.ones(2)).world_size == 3

        cluster.each(job)


def test_impossible_arguments_are_refused() -> None:
    with Cluster(2) as cluster:
        comm = min(cluster.comms, key=lambda each: each.rank)
        x = np.ones(4)
        for error, words, call in (
            (ValueError, "0 is not another peer's rank", lambda: comm.send(x, 0)),
            (ValueError, "they are 0 to 1, and this peer's is 0", lambda: comm.recv(x, 2)),
            (ValueError, "-1 is not", lambda: comm.recv(x, -1)),
            (TypeError, "interpreted", lambda: comm.send(x, 1.0)),  # type: ignore[arg-type]
            (ValueError, "read-only", lambda: comm.recv(np.broadcast_to(1.0, (1,)), 1)),
            (ValueError, "is neither", lambda: comm.send(3.0, 1)),  # type: ignore[arg-type]
            (OverflowError, "tag is -1", lambda: comm.send(x, 1, tag=-1)),
            (ValueError, "9 is not", lambda: comm.send_recv({1: x}, {9: x})),
            (
                pccl.PCCLTimeoutError,
                "waited for peer",
                lambda: comm.send(x, 1, timeout=0.05),
            ),
        ):
            with pytest.raises(error, match=words):
                call()
        handle = comm.send_async(x, 1, tag=3)
        with pytest.raises(pccl.PCCLError, match="tag 3 from peer 1 to peer 2 is in use"):
            comm.send_async(x, 1, tag=3)
        with pytest.raises(pccl.PCCLError, match="PENDING_ASYNC_OPS"):
            comm.update_topology()
        assert not handle.wait(timeout=0.0)[0]
        assert isinstance(handle.error, pccl.PCCLTimeoutError)


def test_a_lost_peer_ends_only_the_sends_of_its_partners(backend: str) -> None:
    """In the middle of the data too; and the streams of the others stay."""
    with Cluster(4) as cluster:
        a, b, c, gone = sorted(cluster.comms, key=lambda each: each.rank)
        small, large = np.ones(5), np.ones(4_000_000)
        assert [a.send_async(small, 1), b.recv_async(small.copy(), 0)][0].wait()[0]
        waits = [a.recv_async(small.copy(), 3, tag=1), b.send_async(large, 3, tag=2)]
        gone.recv_async(np.empty_like(large), 1, tag=2)
        between = [b.send_async(large, 2, tag=3), c.recv_async(np.empty_like(large), 1, tag=3)]
        late = a.send_async(small, 2, tag=4)
        cluster.comms.remove(gone)
        gone.close()
        for handle in waits:
            if not handle.wait()[0]:
                assert isinstance(handle.error, pccl.PeerLostError)
                assert "peer 4" in str(handle.error)  # lost in it, or before its vote has arrived
        assert isinstance(waits[0].error, pccl.PeerLostError)
        assert all(handle.wait()[0] for handle in between)
        assert (large == 1).all()
        c.recv(small, 0, tag=4)
        assert late.wait()[0]
        with pytest.raises(pccl.PeerLostError) as caught:
            c.send(small, 3)  # it has not been told of the loss
        listed(f"PeerLostError: {caught.value}")

        def job(index: int, comm: pccl.Communicator) -> None:
            rank = comm.rank
            x = np.empty(1000)
            comm.send_recv({(rank + 1) % 3: np.full(1000, float(rank))}, {(rank - 1) % 3: x}, tag=6)
            assert (x == (rank - 1) % 3).all()

        cluster.each(job)


PROGRAMS = {
    "each sends": (lambda c: c.send(np.ones(3), 1 - c.rank), "called send(3 elements of float64)"),
    "one sends, one reduces": (
        lambda c: c.all_reduce(np.ones(3)) if c.rank else c.send(np.ones(3), 1),
        "called all_reduce(3 elements of float64, avg)",
    ),
    "one receives, one waits": (
        lambda c: c.are_peers_pending() if c.rank else c.recv(np.ones(3), 1),
        "called are_peers_pending()",
    ),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_deadlock_is_an_error_that_names_peers_and_calls(case: str) -> None:
    """Programs with one thread each, which make no other call before that one returns."""
    call, words = PROGRAMS[case]
    with pccl.MasterNode("127.0.0.1:0") as master:

        def program(_: int) -> str:
            with pccl.Communicator(master.address) as comm:
                comm.wait_for_peers(2)
                with pytest.raises(pccl.MismatchError, match="calls that can never meet") as caught:
                    call(comm)
                x = np.full(3, comm.rank)
                if comm.rank:
                    comm.recv(x, 0)
                else:
                    comm.send(x, 1)
                assert (x == 0).all()
                return caught.value.message

        with ThreadPoolExecutor() as threads:
            for message in threads.map(program, range(2)):
                assert words in message and "peer 1 (" in message and "peer 2 (" in message
