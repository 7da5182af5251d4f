"""reduce, gather, scatter and all_to_all, end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import collectives as oracle
from pages import listed
from peers.cluster import Cluster, to
from peers.waiting import wait_until

import pccl

Array = np.ndarray[Any, Any]
DTYPES = [name for name in oracle.DTYPES if name != "bfloat16"]
COUNTS = (0, 1, 64 * 5 + 1, 30_011)


def make(dtype: str, count: int, seed: int) -> Array:
    """Small whole numbers: any order of adding them is exact."""
    return np.random.default_rng(seed).integers(0, 9, count).astype(dtype)


def test_reduce(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        cases = [(count, "float32", "sum") for count in COUNTS]
        cases += [(100, dtype, "sum") for dtype in DTYPES]
        cases += [(100, "int64", op) for op in ("max", "min", "prod")]
        for i, (count, dtype, op) in enumerate(cases):
            root = i % size
            sends = [make(dtype, count, r) for r in range(size)]
            total = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[op](
                sends, axis=0
            ).astype(dtype)
            send, recv = sends[rank].copy(), np.full(count, 77, dtype)
            info = comm.reduce(send, recv, root=root, op=op)
            np.testing.assert_array_equal(send, sends[rank])
            np.testing.assert_array_equal(recv, total if rank == root else np.full(count, 77))
            assert info.world_size == size
            assert info.tx_bytes == (0 if rank == root else send.nbytes)  # each sends it once
            comm.reduce(send, root=root, op=op)  # in place, on the root alone
            np.testing.assert_array_equal(send, total if rank == root else sends[rank])
        mean = np.full(5, 1.0 + rank)
        comm.reduce(mean, root=size - 1)
        assert mean.tolist() == [(1 + size) / 2 if rank == size - 1 else 1.0 + rank] * 5

    cluster.each(job)


def test_a_quantized_reduce_is_near_to_the_mean(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        values = [np.random.default_rng(r).random(9001) for r in range(size)]
        for how in ("int8", "uint8"):
            x = values[comm.rank].copy()
            comm.reduce([x], root=1, quantization=how)
            if comm.rank == 1:
                np.testing.assert_allclose(x, np.mean(values, axis=0), atol=0.02)
            else:
                np.testing.assert_array_equal(x, values[comm.rank])

    cluster.each(job)


def test_gather(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        cases = [(count, "float32") for count in COUNTS] + [(100, dtype) for dtype in DTYPES]
        for i, (count, dtype) in enumerate(cases):
            root = i % size
            send = make(dtype, count, rank)
            got = comm.gather(send, root=root)
            np.testing.assert_array_equal(send, make(dtype, count, rank))
            if rank != root:
                assert got is None
                continue
            assert got is not None and got.shape == (size, count) and got.dtype == send.dtype
            np.testing.assert_array_equal(got, [make(dtype, count, r) for r in range(size)])
        flat = np.zeros(size * 7, np.float32)
        mine = flat[rank * 7 : rank * 7 + 7]
        mine[:] = rank + 1
        got = comm.gather(mine, flat, root=1)  # in place, on the root
        whole = np.repeat(np.arange(size, dtype=np.float32), 7) + 1
        alone = np.zeros(size * 7, np.float32)
        alone[rank * 7 : rank * 7 + 7] = rank + 1
        np.testing.assert_array_equal(flat, whole if rank == 1 else alone)
        assert (got is flat) == (rank == 1)

    cluster.each(job)


def test_scatter(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        cases = [(count, "float32") for count in COUNTS] + [(100, dtype) for dtype in DTYPES]
        for i, (count, dtype) in enumerate(cases):
            root = i % size
            whole = make(dtype, size * count, root).reshape(size, count)
            send = whole.copy() if rank == root else None
            recv = None if rank == root and i % 2 else np.full((1, count), 77, dtype)
            got = comm.scatter(send, recv, root=root)
            np.testing.assert_array_equal(got, whole[rank : rank + 1])
            assert recv is None or got is recv
            if send is not None:
                np.testing.assert_array_equal(send, whole)
        part = np.zeros(3)
        if rank == 1:
            whole = np.arange(3.0 * size)
            part = whole[3:6]
            comm.scatter(whole, part, root=1)  # in place
            np.testing.assert_array_equal(whole, np.arange(3.0 * size))
        else:
            comm.scatter(None, part, root=1)
        np.testing.assert_array_equal(part, np.arange(3.0) + 3 * rank)

    cluster.each(job)


def test_all_to_all(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def rows(dtype: str, count: int, source: int) -> Array:
        return make(dtype, size * count, 100 + source).reshape(size, count)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        cases = [(count, "float32") for count in COUNTS] + [(100, dtype) for dtype in DTYPES]
        for i, (count, dtype) in enumerate(cases):
            send = rows(dtype, count, rank)
            recv = np.empty_like(send) if i % 2 else None
            got = comm.all_to_all(send, recv)
            assert got.shape == send.shape and (recv is None or got is recv)
            np.testing.assert_array_equal(
                got, np.stack([rows(dtype, count, r)[rank] for r in range(size)])
            )
            np.testing.assert_array_equal(send, rows(dtype, count, rank))

    cluster.each(job)


def test_all_to_all_of_uneven_rows(cluster: Cluster) -> None:
    size = len(cluster.comms)
    counts = np.random.default_rng(1).integers(0, 4, (size, size)) * np.arange(size)[:, None]

    def block(source: int, target: int, dtype: str, width: int) -> Array:
        n = int(counts[source, target])
        return make(dtype, n * width, 10 * source + target).reshape(n, width)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank, peers = comm.rank, range(size)
        gives, takes = counts[rank].tolist(), counts[:, rank].tolist()
        for i, (dtype, width) in enumerate(
            (("float32", 1), ("int8", 3), ("int64", 5000), ("float16", 0), ("uint8", 65))
        ):
            send = np.concatenate([block(rank, r, dtype, width) for r in peers])
            expected = np.concatenate([block(r, rank, dtype, width) for r in peers])
            recv = np.empty_like(expected) if i % 2 else None
            got = comm.all_to_all(send, recv, send_rows=gives, recv_rows=takes)
            np.testing.assert_array_equal(got, expected)
            lists = comm.all_to_all_async([send, send], send_rows=gives, recv_rows=takes)
            assert lists.wait()[0]
            for each in lists.result:  # type: ignore[attr-defined]
                np.testing.assert_array_equal(each, expected)
        with pytest.raises(pccl.MismatchError) as caught:
            more = [*takes[:-1], takes[-1] + 1] if rank == 0 else takes
            comm.all_to_all(np.ones(sum(gives)), send_rows=gives, recv_rows=more)
        listed(f"MismatchError: {caught.value}")

    cluster.each(job)


def test_lists_dicts_orders_in_memory_and_async_forms(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def content(rank: int) -> dict[str, Array]:
        return {
            "c": make("float32", size * 15, rank).reshape(size, 3, 5),
            "a": make("int8", size * 1001, rank).reshape(size, 1001),
            "t": make("float64", size * 6, rank).reshape(size, 2, 3).transpose(0, 2, 1),
        }

    def job(index: int, comm: pccl.Communicator) -> None:
        rank, last = comm.rank, size - 1
        everyone = [content(r) for r in range(size)]
        mine = {name: array.copy(order="K") for name, array in everyone[rank].items()}
        parts = {name: np.empty_like(array[0]) for name, array in mine.items()}
        launches = [
            lambda: comm.reduce_async(list(mine.values()), root=last, op="max", tag=1),
            lambda: comm.gather_async(parts_of(everyone[rank]), root=last, tag=2),
            lambda: comm.scatter_async(everyone[0] if rank == 0 else None, parts, tag=3),
            lambda: comm.all_to_all_async(everyone[rank], tag=4),
        ]
        handles = [launch() for launch in (launches if index else launches[::-1])]
        handles = handles if index else handles[::-1]
        for handle in handles:
            assert handle.wait()[0], handle.error
        reduced, gathered, scattered, traded = (handle.result for handle in handles)
        assert scattered is parts and (gathered is None) == (rank != last)
        for i, name in enumerate(mine):
            every = [one[name] for one in everyone]
            expected = np.max(every, axis=0) if rank == last else every[rank]
            np.testing.assert_array_equal(reduced[i], expected)  # type: ignore[index]
            np.testing.assert_array_equal(parts[name], every[0][rank])
            np.testing.assert_array_equal(
                traded[name],  # type: ignore[index]
                [one[rank] for one in every],
            )
            if rank == last:
                np.testing.assert_array_equal(
                    gathered[name],  # type: ignore[index]
                    [one[0] for one in every],
                )

    def parts_of(arrays: dict[str, Array]) -> dict[str, Array]:
        return {name: array[0] for name, array in arrays.items()}

    cluster.each(job)


def test_alone(backend: str) -> None:
    with Cluster(1) as cluster:
        comm, x = cluster.comms[0], np.arange(4.0)
        for call in (comm.reduce, comm.gather, comm.scatter, comm.all_to_all):
            with pytest.raises(pccl.TooFewPeersError):
                call(x)
        np.testing.assert_array_equal(x, np.arange(4.0))


X = np.ones((2, 8), np.float32)
MISMATCHES = {
    "other root": (lambda c: c.reduce(X), lambda c: c.reduce(X, root=1), "root 1"),
    "other call": (
        lambda c: c.gather(X[0]),
        lambda c: c.reduce(X[0]),
        "gather(8 elements of float32, root 0)",
    ),
    "other operation": (lambda c: c.reduce(X), lambda c: c.reduce(X, op="sum"), "avg, root 0"),
    "other size": (lambda c: c.all_to_all(X), lambda c: c.all_to_all(X[:, :4].copy()), "8 ele"),
    "two sources": (
        lambda c: c.scatter(X, X[0].copy(), root=c.rank),
        lambda c: c.scatter(X, X[0].copy(), root=c.rank),
        "root 1",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_different_calls_are_an_error_on_all_peers_with_names(case: str) -> None:
    first, second, words = MISMATCHES[case]
    with Cluster(2) as cluster:
        numbers = [comm.peers[comm.rank] for comm in cluster.comms]

        def job(index: int, comm: pccl.Communicator) -> str:
            with pytest.raises(pccl.MismatchError, match="INVALID_ARGUMENT") as caught:
                (second if index else first)(comm)
            assert comm.all_to_all(np.array([1, 2])).sum() == 2 + 2 * comm.rank  # usable
            return caught.value.message

        for number, message in zip(numbers, cluster.each(job), strict=True):
            assert all(f"{each} called" in to(number, message) for each in numbers), message
            assert words in message, message


def test_impossible_arguments_are_refused() -> None:
    with Cluster(2) as cluster:
        comm, other = sorted(cluster.comms, key=lambda each: each.rank)
        x, y = np.ones((4, 3)), np.ones((4, 3))
        for error, words, call in (
            (ValueError, "ranks are 0 to 1", lambda: comm.reduce(x, root=2)),
            (ValueError, "it may be a rank", lambda: comm.gather(x, root="last")),  # type: ignore[arg-type]
            (TypeError, "root is 1.0", lambda: comm.scatter(x, root=1.0)),  # type: ignore[arg-type]
            (ValueError, "recv has 3", lambda: comm.reduce(x, x[0].copy())),
            (ValueError, "it may be sum, avg", lambda: comm.reduce(x, op="median")),
            (ValueError, "2 times as many", lambda: comm.gather(x, y)),
            (ValueError, "not the part of it", lambda: comm.gather(x[2:], x)),
            (ValueError, "send is needed", lambda: comm.scatter(None, x)),
            (ValueError, "recv is needed", lambda: other.scatter(x)),
            (ValueError, "multiple of the 2 peers", lambda: comm.scatter(x[:3])),
            (ValueError, "2 times as many", lambda: comm.scatter(x, y)),
            (ValueError, "not the part of it", lambda: comm.scatter(x, x[2:])),
            (ValueError, "multiple of the 2 peers", lambda: comm.all_to_all(x[:3])),
            (ValueError, "multiple of the 2 peers", lambda: comm.all_to_all(np.array(1.0))),
            (ValueError, "the outermost one", lambda: comm.all_to_all(x.T.copy().T)),
            (ValueError, "cannot be in place", lambda: comm.all_to_all(x, x)),
            (ValueError, "both send_rows and", lambda: comm.all_to_all(x, send_rows=[2, 2])),
            *(
                (
                    error,
                    words,
                    lambda gives=gives: comm.all_to_all(x, y, send_rows=gives, recv_rows=(0, 4)),
                )
                for error, words, gives in (
                    (ValueError, "for each of the 2 peers", [4]),
                    (ValueError, "for each of the 2 peers", [5, -1]),
                    (TypeError, "float", [2.0, 2.0]),
                    (ValueError, "must have 3 rows", [2, 1]),
                )
            ),
            (ValueError, "recv has 6", lambda: comm.all_to_all(x, y[:2])),
            (ValueError, "read-only", lambda: other.scatter(None, np.broadcast_to(1.0, (1,)))),
        ):
            with pytest.raises(error, match=words):
                call()


def test_ranks_that_have_changed_unseen_are_an_error_first(backend: str) -> None:
    with Cluster(3) as cluster:
        cluster.comms.sort(key=lambda comm: comm.rank)
        cluster.comms.pop(0).close()

        def job(index: int, comm: pccl.Communicator) -> None:
            assert not comm.are_peers_pending()  # the answer comes when the first one is gone
            x = np.full((6, 2), float(index))
            with pytest.raises(pccl.PeerLostError) as caught:
                comm.gather(x)
            listed(f"PeerLostError: {caught.value}")
            assert comm.all_to_all(x)[:, 0].tolist() == [0, 0, 0, 1, 1, 1]

        cluster.each(job)


LARGE = 1_500_000


def work(rank: int, what: str) -> tuple[Array, Any]:
    """A peer's input of a large collective, in place where that is possible, and the call."""
    whole = np.full((12, LARGE // 12), float(rank))
    part = whole[4 * rank : 4 * rank + 4]
    return {
        "reduce": (whole, lambda c: c.reduce_async(whole, root=0, op="sum")),
        "gather": (part, lambda c: c.gather_async(part, whole, root=0)),
        "scatter": (
            part,
            lambda c: c.scatter_async(whole if rank == 0 else None, part.copy(), root=0),
        ),
        "all_to_all": (whole, lambda c: c.all_to_all_async(whole)),
    }[what]


@pytest.mark.parametrize("what", ["reduce", "gather", "scatter", "all_to_all"])
def test_the_loss_of_a_peer_leaves_inputs_unchanged(backend: str, what: str) -> None:
    with Cluster(3) as cluster:
        cluster.comms.sort(key=lambda comm: comm.rank)
        works = [work(comm.rank, what) for comm in cluster.comms]
        handles = [call(comm) for comm, (_, call) in zip(cluster.comms, works, strict=True)]
        cluster.comms.pop().close()
        ends = [handle.wait() for handle in handles[:2]]
        assert ends[0][:2] == ends[1][:2]
        for rank, (array, _) in enumerate(works[:2]):
            assert (array == rank).all() or (ends[0][0] and what == "reduce")
        wait_until(lambda: {comm.world_size for comm in cluster.comms} == {2})

        def again(index: int, comm: pccl.Communicator) -> None:
            x = np.full((comm.world_size, LARGE), float(index))  # that this thread knows the ranks
            assert (comm.all_to_all(x)[:, 0] == [0, 1]).all()

        cluster.each(again)
