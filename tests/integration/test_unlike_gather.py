"""All-gathers to which peers give different numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster

import pccl
from pccl import operands
from pccl.operands import Ranks

Array = np.ndarray[Any, Any]
ROWS = [(0, 1, 5), (3, 0, 0), (0, 0, 0), (64, 65, 63), (1, 1, 1), (1000, 3, 40_000)]


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def make(rows: int, rank: int, dtype: str = "float32", width: int = 3) -> Array:
    return np.random.default_rng(rank).integers(0, 99, (rows, width)).astype(dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_every_peer_has_the_rows_of_all_by_rank(three: Cluster, rows: tuple[int, ...]) -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        for tag, dtype in enumerate(("float32", "uint8", "int64")):
            wanted = np.concatenate([make(n, r, dtype) for r, n in enumerate(rows)])
            send = make(rows[rank], rank, dtype)
            got = comm.all_gather(send, rows=rows, tag=tag)
            assert got.dtype == send.dtype
            np.testing.assert_array_equal(got, wanted)
            whole = np.full_like(wanted, 77)
            place = whole[sum(rows[:rank]) : sum(rows[: rank + 1])]
            place[...] = send
            assert comm.all_gather(place, whole, rows=list(rows), tag=tag) is whole  # in place
            np.testing.assert_array_equal(whole, wanted)

    three.each(job)


def test_a_dict_of_arrays_of_the_same_rows(three: Cluster) -> None:
    rows = (2, 7, 1)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        send = {"b": make(rows[rank], rank, "float64", 100), "a": np.arange(rows[rank]) + rank}
        handle = comm.all_gather_async(send, rows=rows, tag=3)
        committed, _, info = handle.wait()
        assert committed and info.world_size == 3
        row = 8 + 8 * 100
        assert info.rx_bytes == (10 - rows[rank]) * row
        got = handle.result
        assert list(got) == ["b", "a"]
        for name, array in got.items():
            each = [
                make(n, r, "float64", 100) if name == "b" else np.arange(n) + r
                for r, n in enumerate(rows)
            ]
            np.testing.assert_array_equal(array, np.concatenate(each))

    three.each(job)


def test_lengths_are_gathered_first_where_peers_do_not_know_them(three: Cluster) -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        own = np.full(5 + index, index, np.int16)
        lengths = comm.all_gather(np.array(own.size)).tolist()
        got = comm.all_gather(own, rows=lengths)
        assert sorted(got.tolist()) == sorted([0] * 5 + [1] * 6 + [2] * 7)

    three.each(job)


def test_different_rows_are_an_error() -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        rows = [1, 1]
        if index == 1:
            rows[(rank + 1) % 2] = 2
        with pytest.raises(pccl.MismatchError, match=r"times .* rows.*; rank \d gives [12] rows, "):
            comm.all_gather(np.zeros((1, 4)), rows=rows)
        if index == 1:
            with pytest.raises(pccl.MismatchError, match=r"times 1, 1 rows"):
                comm.all_gather(np.zeros((1, 4)), rows=[1, 1], tag=1)
        else:
            with pytest.raises(pccl.MismatchError, match=r"times 1, 1 rows"):
                comm.all_gather(np.zeros((1, 4)), tag=1)
        comm.barrier()

    with Cluster(2) as cluster:
        cluster.each(job)


def test_a_loss_leaves_inputs_unchanged_and_changes_ranks() -> None:
    with Cluster(3) as cluster:
        rows = (3, 50_000, 10)
        comms = cluster.comms
        leaver = comms[2]

        def job(index: int, comm: pccl.Communicator) -> None:
            send = make(rows[comm.rank], index)
            before = send.copy()
            if comm is leaver:
                comm.close()
                return
            with pytest.raises(pccl.PeerLostError):
                comm.all_gather(send, rows=rows)
            np.testing.assert_array_equal(send, before)
            with pytest.raises(ValueError, match="a number of rows for each of the 2 peers"):
                comm.all_gather(send, rows=rows)
            lengths = comm.all_gather(np.array(len(send))).tolist()
            got = comm.all_gather(send, rows=lengths)
            assert len(got) == sum(lengths)

        cluster.each(job)


HERE = Ranks(rank=1, members=3, first=0)


@pytest.mark.parametrize(
    ("send", "recv", "rows", "error", "why"),
    [
        (np.zeros((2, 3)), None, [1, 2], ValueError, "a number of rows for each of the 3 peers"),
        (np.zeros((2, 3)), None, [1, 2, -1], ValueError, "a number of rows for each of the 3"),
        (np.zeros((2, 3)), None, [1, 2.5, 1], TypeError, "interpreted as an integer"),
        (np.zeros((2, 3)), None, [1, 3, 1], ValueError, "have 3 rows, as rows has for rank 1"),
        (np.array(1.0), None, [1, 1, 1], ValueError, "have 1 rows, as rows has for rank 1"),
        (np.zeros((2, 3)), np.zeros((3, 3)), [1, 2, 1], ValueError, "have 4 rows, as rows add"),
        (np.zeros((2, 3)), np.zeros((4, 2)), [1, 2, 1], ValueError, "a row of send is 3 elem"),
        (np.zeros((2, 3)), np.zeros((4, 3), "f4"), [1, 2, 1], ValueError, "elements of DOUBLE"),
        (np.zeros((3, 2)).T, None, [1, 2, 1], ValueError, "in C's order"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    send: Any, recv: Any, rows: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        operands.all_gather(send, recv, HERE, rows)


def test_an_input_inside_recv_must_be_at_its_place() -> None:
    whole = np.zeros((4, 3))
    operands.all_gather(whole[1:3], whole, HERE, [1, 2, 1])
    with pytest.raises(ValueError, match="is not its part of rank 1, which begins with row 1"):
        operands.all_gather(whole[:2], whole, HERE, [1, 2, 1])
