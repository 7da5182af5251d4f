"""all_reduce end to end: real sockets, every dtype and operation, bit for bit as the oracle."""

from __future__ import annotations

import itertools
from operator import itemgetter

import numpy as np
import pytest
from oracles import collectives as oracle
from pages import listed
from peers.cluster import Cluster

import pccl
from pccl import extension
from pccl.errors import ArgumentError

DTYPES = dict(zip(oracle.DTYPES, pccl.DataType, strict=True))
OPS = dict(zip(oracle.OPS, pccl.ReduceOp, strict=True))


def describe(dtype: str, op: str, count: int, tag: int, send, recv) -> pccl.ReduceOpDescriptor:  # type: ignore[no-untyped-def]
    work = pccl.ReduceDescriptor(
        count, OPS[op], tag, pccl.ReduceOperandDescriptor(DTYPES[dtype]), None
    )
    return pccl.ReduceOpDescriptor(send.ctypes.data, recv.ctypes.data, work)


def check(cluster: Cluster, cases: list[tuple[str, str, int]], in_place: bool) -> None:
    """Runs all cases, many at a time, and compares every peer's bits with the oracle's."""
    size = len(cluster.comms)
    cases = sorted(cases, key=itemgetter(2))  # neighbors differ, or they would be bundled
    sends = [
        [oracle.draw(dtype, count, 1000 * peer + i) for i, (dtype, _, count) in enumerate(cases)]
        for peer in range(size)
    ]
    before = [[array.copy() for array in arrays] for arrays in sends]
    recvs = sends if in_place else [[np.empty_like(a) for a in arrays] for arrays in sends]

    def job(index: int, comm: pccl.Communicator) -> int:
        descriptors = [
            describe(dtype, op, count, tag, sends[index][tag], recvs[index][tag])
            for tag, (dtype, op, count) in enumerate(cases)
        ]
        assert comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=16).world_size == size
        return comm.rank

    ranks = cluster.each(job)
    for i, (dtype, op, count) in enumerate(cases):
        in_ring_order = [before[ranks.index(position)][i] for position in range(size)]
        expected = oracle.all_reduce(in_ring_order, op, dtype)
        for peer in range(size):
            np.testing.assert_array_equal(
                recvs[peer][i].view(np.uint8), expected.view(np.uint8), f"{dtype} {op} {count}"
            )
            if not in_place:
                np.testing.assert_array_equal(sends[peer][i], before[peer][i])


@pytest.mark.parametrize("in_place", [False, True])
def test_every_dtype_and_operation(cluster: Cluster, in_place: bool) -> None:
    size = len(cluster.comms)
    counts = [0, 1, size - 1, size + 1, 1000]
    check(cluster, list(itertools.product(oracle.DTYPES, oracle.OPS, counts)), in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_larger_odd_size(cluster: Cluster, in_place: bool) -> None:
    check(cluster, list(itertools.product(oracle.DTYPES, ["sum", "avg"], [203530])), in_place)


def test_alone(backend: str) -> None:
    with Cluster(1) as cluster:
        comm = cluster.comms[0]
        array = np.arange(5, dtype=np.float32)
        with pytest.raises(pccl.TooFewPeersError):
            comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)
        np.testing.assert_array_equal(array, np.arange(5))
        comm.update_topology()
        assert comm.are_peers_pending() is False
        assert comm.world_size == 1


def test_forty_tags_launched_in_opposite_orders(backend: str) -> None:
    with Cluster(2) as cluster:
        sends = [np.full(1000, float(i + 1), np.float32) for i in range(2)]
        recvs = [[np.empty_like(sends[0]) for _ in range(40)] for _ in range(2)]

        def job(index: int, comm: pccl.Communicator) -> None:
            order = range(40) if index == 0 else reversed(range(40))
            handles = [
                comm.all_reduce_async(
                    sends[index], recvs[index][tag], op=pccl.ReduceOp.SUM, tag=tag
                )
                for tag in order
            ]
            with pytest.raises(pccl.PCCLError, match="PENDING_ASYNC_OPS"):
                comm.update_topology()
            for handle in handles:
                assert handle.wait() == (True, 0, pccl.ReduceInfo(2, 4000, 4000))

        cluster.each(job)
        assert all((recv == 3).all() for peer in recvs for recv in peer)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"count": 999}, "999 elements"),
        ({"dtype": np.float64}, "1000 elements of float64"),
        ({"op": pccl.ReduceOp.MAX}, "max"),
    ],
)
def test_another_size_dtype_or_operation_is_an_error_on_both(second, words: str) -> None:  # type: ignore[no-untyped-def]
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            wish = second if index else {}
            array = np.ones(wish.get("count", 1000), wish.get("dtype", np.float32))
            with pytest.raises(pccl.PCCLError, match="INVALID_ARGUMENT") as caught:
                comm.all_reduce(array, array, op=wish.get("op", pccl.ReduceOp.SUM))
            assert words in str(caught.value)
            array = np.ones(10, np.float32)
            comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)
            assert (array == 2).all()

        cluster.each(job)


def test_calls_that_never_meet_are_an_error_on_both() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = np.ones(10, np.float32)
            reduce = lambda: comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)  # noqa: E731
            with pytest.raises(pccl.PCCLError, match="INVALID_USAGE") as caught:
                comm.update_topology() if index else reduce()
            assert "update_topology" in str(caught.value)
            assert "all_reduce" in str(caught.value)
            comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)
            assert (array == 2).all()

        cluster.each(job)


def test_the_same_tag_twice() -> None:
    with Cluster(2) as cluster:
        array = np.ones(10, np.float32)
        first = cluster.comms[0]
        handle = first.all_reduce_async(array, array, op=pccl.ReduceOp.SUM, tag=3)
        with pytest.raises(pccl.PCCLError, match="INVALID_ARGUMENT"):
            first.all_reduce_async(array, array, op=pccl.ReduceOp.SUM, tag=3)
        other = np.ones(10, np.float32)
        cluster.comms[1].all_reduce(other, other, op=pccl.ReduceOp.SUM, tag=3)
        assert handle.wait()[0]
        first.all_reduce_async(array, array, op=pccl.ReduceOp.SUM, tag=3)  # free again; never met


def test_bad_arguments_are_refused_before_anything_happens() -> None:
    with Cluster(2) as cluster:
        comm = cluster.comms[0]
        array = np.ones(10, np.float32)
        with pytest.raises(OverflowError):
            comm.all_reduce(array, array, op=pccl.ReduceOp.SUM, tag=-1)
        with pytest.raises(ArgumentError):
            comm.all_reduce(array, np.ones(11, np.float32), op=pccl.ReduceOp.SUM)
        with pytest.raises(pccl.PCCLError, match="descriptor"):
            comm.all_reduce(
                array,
                array,
                op=pccl.ReduceOp.SUM,
                operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.DOUBLE),
            )


def test_before_connect() -> None:
    comm = pccl.Communicator("127.0.0.1:1")
    for call in (
        comm.update_topology,
        comm.are_peers_pending,
        comm.optimize_topology,
        lambda: comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE),
        lambda: comm.all_reduce(np.ones(1), np.ones(1), op=pccl.ReduceOp.SUM),
    ):
        with pytest.raises(pccl.PCCLError, match="INVALID_USAGE"):
            call()


def test_a_mean_has_two_names() -> None:
    with Cluster(2) as two:
        for op in ("mean", "Mean", "avg"):
            found = two.each(lambda i, comm, op=op: reduced(comm, float(2 * i), op))  # type: ignore[misc]
            assert found == [1.0, 1.0]


def reduced(comm: pccl.Communicator, value: float, op: str) -> float:
    x = np.full(3, value)
    comm.all_reduce(x, op=op)
    return float(x[0])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_numbers_that_are_not_finite_name_their_peer(library: str) -> None:
    """On all peers, before anything is reduced; the next call is as if nothing had happened."""
    torch = pytest.importorskip("torch") if library == "torch" else None

    def body(index: int, comm: pccl.Communicator) -> list[float]:
        whole, bad = np.ones(8, np.float32), np.ones(3, np.float32)
        if index == 1:
            bad[1] = np.nan
        given = {"count": np.arange(2), "bad": bad, "whole": whole}
        arrays = {k: torch.from_numpy(v) for k, v in given.items()} if torch else given
        with pytest.raises(pccl.NotFiniteError, match=rf"peer {number} .* not finite") as told:
            comm.all_reduce(arrays, op="sum", check="finite")
        listed(f"NotFiniteError: {told.value}")
        assert (whole == 1).all() and given["count"].tolist() == [0, 1]
        bad[1] = 1
        comm.all_reduce(arrays, op="sum", check="finite")
        with pytest.raises(ValueError, match="check is 'nan'"):
            comm.all_reduce(whole, check="nan")  # type: ignore[arg-type]
        return [float(x) for x in [*bad, *whole]]

    with Cluster(3) as cluster:
        number = extension.member(cluster.comms[1]).number
        assert cluster.each(body) == [[3.0] * 11] * 3
