"""The collectives besides a plain all_reduce, and lists and dicts of arrays, end to end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from oracles import collectives as oracle
from peers.cluster import Cluster, client_of, to
from peers.waiting import wait_until

import pccl
from pccl import operands
from pccl.membership import KnownRanks
from pccl.operands import Ranks

Array = np.ndarray[Any, Any]
DTYPES = [name for name in oracle.DTYPES if name != "bfloat16"]
WORDS = {pccl.ReduceOp.SUM: "sum", pccl.ReduceOp.AVG: "avg", pccl.ReduceOp.MAX: "max"}


def make(dtype: str, count: int, seed: int) -> Array:
    """Small whole numbers: any order of adding them is exact."""
    return np.random.default_rng(seed).integers(0, 9, count).astype(dtype)


def test_all_gather(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        for count in (0, 1, size - 1, size + 1, 997, 30_011):
            for tag, dtype in enumerate(DTYPES):
                expected = np.stack([make(dtype, count, r) for r in range(size)])
                send = make(dtype, count, rank)
                got = comm.all_gather(send, tag=tag)
                assert got.shape == (size, count) and got.dtype == send.dtype
                np.testing.assert_array_equal(got, expected)
                np.testing.assert_array_equal(send, expected[rank])
        flat = np.zeros(size * 7, np.float32)
        flat[rank * 7 : rank * 7 + 7] = rank
        assert comm.all_gather(flat[rank * 7 : rank * 7 + 7], flat) is flat  # in place
        np.testing.assert_array_equal(flat, np.repeat(np.arange(size, dtype=np.float32), 7))
        assert comm.all_gather(np.array(rank)).tolist() == list(range(size))

    cluster.each(job)


def test_reduce_scatter(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        for rows in (0, 1, size - 1, size + 1, 331):
            for tag, dtype in enumerate(DTYPES):
                sends = [make(dtype, size * rows * 3, r).reshape(-1, 3) for r in range(size)]
                expected = np.sum(sends, axis=0, dtype=dtype).reshape(size, rows, 3)[rank]
                send = sends[rank].copy()
                got = comm.reduce_scatter(send, op="sum", tag=tag)
                assert got.shape == (rows, 3)
                np.testing.assert_array_equal(got, expected)
                np.testing.assert_array_equal(send, sends[rank])
                place = send.reshape(size, rows, 3)[rank]
                comm.reduce_scatter(send, place, op=pccl.ReduceOp.SUM, tag=tag)
                np.testing.assert_array_equal(place, expected)
        assert comm.reduce_scatter(np.full(size, 1.0 + rank)).tolist() == [(1 + size) / 2]

    cluster.each(job)


def test_broadcast(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        for root in range(size):
            for count in (0, 1, 64 * size + 1, 100_003):
                array = make("float32", count, rank)
                info = comm.broadcast(array, root=root)
                np.testing.assert_array_equal(array, make("float32", count, root))
                assert info.world_size == size
                assert info.rx_bytes == (0 if rank == root else array.nbytes)
        for tag, dtype in enumerate(DTYPES):
            array = make(dtype, 100, rank)
            comm.broadcast(array, root=size - 1, tag=tag)
            np.testing.assert_array_equal(array, make(dtype, 100, size - 1))

    cluster.each(job)


def test_a_barrier_returns_after_all_have_entered(cluster: Cluster) -> None:
    size = len(cluster.comms)
    arrived: list[int] = []

    def job(index: int, comm: pccl.Communicator) -> None:
        for step in range(1, 6):
            arrived.append(index)
            comm.barrier(tag=7)
            assert len(arrived) >= step * size

    cluster.each(job)


def test_the_timeout_of_a_barrier_names_the_missing_peers() -> None:
    with Cluster(4) as cluster:
        numbers = [comm.peers[comm.rank] for comm in cluster.comms]

        handle = cluster.comms[0].barrier_async(tag=9)
        with pytest.raises(pccl.PCCLTimeoutError) as caught:
            cluster.comms[1].barrier(tag=9, timeout=0.1)
        assert [each in caught.value.message for each in numbers] == [False, False, True, True]
        assert not handle.wait(timeout=0.0)[0] and isinstance(handle.error, pccl.PCCLTimeoutError)
        assert [each in handle.error.message for each in numbers] == [False, True, True, True]


def test_async_forms_under_way_at_the_same_time(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        x, y = np.full(5000, float(rank)), np.full(5000, float(rank))
        launches = [
            lambda: comm.all_gather_async(x, tag=1),
            lambda: comm.reduce_scatter_async(np.ones((size, 9)), op="sum", tag=2),
            lambda: comm.broadcast_async(y, root=1, tag=3),
            lambda: comm.barrier_async(tag=4),
            lambda: comm.all_reduce_async(np.ones(3), op="sum", tag=5),
        ]
        handles = [launch() for launch in (launches if index else launches[::-1])]
        handles = handles if index else handles[::-1]
        assert all(handle.wait()[0] for handle in handles)
        results: list[Any] = [handle.result for handle in handles]
        np.testing.assert_array_equal(
            results[0], np.repeat(np.arange(size), 5000).reshape(size, -1)
        )
        np.testing.assert_array_equal(results[1], np.full((1, 9), size))
        assert results[2] is y and (y == 1).all()
        np.testing.assert_array_equal(results[4], np.full(3, size))

    cluster.each(job)


def test_all_reduce_is_by_default_an_average_in_place(cluster: Cluster) -> None:
    size = len(cluster.comms)

    def job(index: int, comm: pccl.Communicator) -> None:
        x = np.full(100, float(index))
        assert comm.all_reduce(x).world_size == size
        np.testing.assert_array_equal(x, np.full(100, (size - 1) / 2))
        for op, word in WORDS.items():
            a, b = make("int32", 50, index), make("int32", 50, index)
            comm.all_reduce(a, op=op)
            comm.all_reduce(b, op=word)
            np.testing.assert_array_equal(a, b)

    cluster.each(job)


@pytest.mark.parametrize("in_place", [False, True])
def test_lists_and_dicts_of_arrays(cluster: Cluster, in_place: bool) -> None:
    size = len(cluster.comms)
    shapes = {"c": (3, 5), "a": (0,), "b": (64 * size + 1,), "e": (), "d": (70_001,)}
    kinds = {"c": "float32", "a": "int8", "b": "float64", "e": "float16", "d": "int64"}

    def content(rank: int) -> dict[str, Array]:
        return {
            name: make(kinds[name], int(np.prod(shape)), rank).reshape(shape)
            for name, shape in shapes.items()
        }

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        everyone = [content(r) for r in range(size)]
        total = {name: sum(each[name] for each in everyone) for name in shapes}
        send = content(rank)
        if index == 1:  # the order of a dict is nobody's business
            send = dict(reversed(send.items()))
        recv = send if in_place else {name: np.empty_like(array) for name, array in send.items()}
        comm.all_reduce(send, None if in_place else recv, op="sum")
        for name in shapes:
            np.testing.assert_array_equal(recv[name], total[name], name)
            if not in_place:
                np.testing.assert_array_equal(send[name], content(rank)[name])
        listed = list(content(rank).values())
        gathered = comm.all_gather(listed)
        for got, name in zip(gathered, shapes, strict=True):
            np.testing.assert_array_equal(got, np.stack([each[name] for each in everyone]))
        scattered = comm.reduce_scatter(
            {"x": np.ones((size, 2)), "y": np.ones(size, int)}, op="sum"
        )
        assert scattered["x"].tolist() == [[size, size]]
        assert scattered["y"].tolist() == [size]
        mine = content(rank)
        comm.broadcast(mine, root=size - 1)
        for name in shapes:
            np.testing.assert_array_equal(mine[name], everyone[-1][name])

    cluster.each(job)


@pytest.mark.parametrize("in_place", [False, True])
def test_many_small_arrays_share_chunks(cluster: Cluster, in_place: bool) -> None:
    """Lists like a model's: biases, norms and matrices, of two types, and empty ones.

    132,000 elements are over 512 KiB.
    """
    size = len(cluster.comms)
    counts = [1, 64, 0, 63, 700, 132_000, 65, 1, 130_000, *range(1, 60), 0, 2]

    def content(rank: int) -> list[Array]:
        kinds = ["float64" if 20 < i < 30 else "float32" for i in range(len(counts))]
        return [make(kind, count, rank) for kind, count in zip(kinds, counts, strict=True)]

    def job(index: int, comm: pccl.Communicator) -> None:
        send, everyone = content(comm.rank), [content(rank) for rank in range(size)]
        recv = send if in_place else [np.empty_like(array) for array in send]
        for _ in range(3):  # from the second one on, data travels before the master has answered
            for array, given in zip(send, content(comm.rank), strict=True):
                array[...] = given
            comm.all_reduce(send, None if in_place else recv, op="sum")
            for got, *given in zip(recv, *everyone, strict=True):
                np.testing.assert_array_equal(got, sum(given))
        mine = content(comm.rank)
        comm.broadcast(mine, root=size - 1)
        for got, wanted in zip(mine, everyone[-1], strict=True):
            np.testing.assert_array_equal(got, wanted)

    cluster.each(job)


@pytest.mark.parametrize("how", ["int8", "int4", "uint8"])
def test_quantized_lists_and_scatters(cluster: Cluster, how: str) -> None:
    """The same bits on all peers, as near to the mean as these codes can be."""
    size = len(cluster.comms)

    def values(seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {"w": rng.random((size, 901)), "b": rng.random(70).astype(np.float16)}

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        means = {name: np.mean([values(r)[name] for r in range(size)], axis=0) for name in "wb"}
        near = {"atol": 0.2 if how == "int4" else 0.02}
        given = values(rank)
        part = comm.reduce_scatter(given["w"], quantization=how)
        np.testing.assert_allclose(part[0], means["w"][rank], **near)
        comm.all_reduce(given, quantization=how)
        for name, mean in means.items():
            np.testing.assert_allclose(given[name], mean, **near)
            everyone = comm.all_gather(given[name])
            assert (everyone == everyone[0]).all()
        with pytest.raises(pccl.PCCLError, match="only floats can"):
            comm.all_reduce([given["w"], np.ones(5, int)], quantization=how)

    cluster.each(job)


def test_torch(backend: str) -> None:
    torch = pytest.importorskip("torch")
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            rank = comm.rank
            half = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
            gathered = comm.all_gather(half)
            assert gathered.shape == (3, 2, 3) and gathered.dtype is torch.bfloat16
            assert gathered.float().mean(dim=(1, 2)).tolist() == [0, 1, 2]
            torch.testing.assert_close(
                comm.reduce_scatter(gathered), torch.full((1, 2, 3), float(rank)).bfloat16()
            )
            model = torch.nn.Linear(3, 5)
            comm.broadcast(dict(model.named_parameters()), root=2)
            digests = comm.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert (digests == digests[0]).all()
            comm.all_reduce([p.detach() for p in model.parameters()])
            rows = torch.full((3, 4), float(rank), dtype=torch.bfloat16)
            whole = comm.gather(rows, root="first")
            part = comm.scatter(whole, torch.empty_like(rows), root="first")
            assert (part == rank).all() and part.dtype is torch.bfloat16
            assert comm.all_to_all(rows)[:, 0].tolist() == [0, 1, 2]
            comm.reduce(rows, root="first", op="sum")
            assert (rows == (rank if whole is None else 3)).all()

        cluster.each(job)


def test_alone(backend: str) -> None:
    with Cluster(1) as cluster:
        comm = cluster.comms[0]
        x = np.arange(4.0)
        for call in (
            lambda: comm.all_reduce([x]),
            lambda: comm.all_gather(x),
            lambda: comm.reduce_scatter(x),
            lambda: comm.broadcast(x),
        ):
            with pytest.raises(pccl.TooFewPeersError):
                call()
        np.testing.assert_array_equal(x, np.arange(4.0))
        comm.barrier()
        assert comm.barrier_async().wait() == (True, 0, pccl.ReduceInfo(1, 0, 0))


X = np.ones((2, 8), np.float32)
MISMATCHES = {
    "other call": (lambda c: c.broadcast(X[0]), lambda c: c.all_gather(X[0]), "broadcast(8 ele"),
    "barrier": (lambda c: c.barrier(), lambda c: c.broadcast(X[0]), "barrier()"),
    "other root": (
        lambda c: c.broadcast(X[0], root=0),
        lambda c: c.broadcast(X[0], root=1),
        "root 1",
    ),
    "other size": (lambda c: c.all_gather(X[0]), lambda c: c.all_gather(X), "16 elements"),
    "other operation": (
        lambda c: c.reduce_scatter(X, op="sum"),
        lambda c: c.reduce_scatter(X, op="max"),
        "max",
    ),
    "one or a list": (lambda c: c.all_reduce(X), lambda c: c.all_reduce([X]), "1 tensors"),
    "other tensor": (
        lambda c: c.all_reduce([X[0], X[1]]),
        lambda c: c.all_reduce([X[0], X[1, :7]]),
        "tensor 1 is a tensor of",
    ),
    "other keys": (
        lambda c: c.all_reduce({"a": X[0], "b": X[1]}),
        lambda c: c.all_reduce({"a": X[0], "c": X[1]}),
        "b of 8 elements of float32",
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
            assert comm.all_gather(np.array([1])).sum() == 2  # usable afterwards
            return caught.value.message

        messages = cluster.each(job)
        for number, message in zip(numbers, messages, strict=True):
            assert all(f"{each} called" in to(number, message) for each in numbers), message
        assert any(words in message for message in messages), messages


def test_impossible_arguments_are_refused() -> None:
    with Cluster(2) as cluster:
        comm = cluster.comms[0]
        x = np.ones((4, 3))
        rank = comm.rank
        for error, words, call in (
            (ValueError, "2 times as many", lambda: comm.all_gather(x, np.ones((3, 4, 3)))),
            (ValueError, "recv is FLOAT", lambda: comm.all_gather(x, np.ones(24, np.float32))),
            (ValueError, "multiple of the 2 peers", lambda: comm.reduce_scatter(x[:3])),
            (ValueError, "multiple of the 2 peers", lambda: comm.reduce_scatter(np.array(1.0))),
            (ValueError, "2 times as many", lambda: comm.reduce_scatter(x, np.ones(7))),
            (ValueError, "are not contiguous", lambda: comm.broadcast(x[:, 1])),
            (ValueError, "same keys", lambda: comm.all_reduce({"a": x}, {"b": x})),
            (ValueError, "2 arrays, recv 1", lambda: comm.all_reduce([x, x], [x])),
            (ValueError, "not the part of it", lambda: comm.all_gather(x[1 - rank], x[:2])),
            (
                ValueError,
                "not the part of it",
                lambda: comm.reduce_scatter(x, x[2 - 2 * rank :][:2]),
            ),
            (ValueError, "ranks are 0 to 1", lambda: comm.broadcast(x, root=2)),
            (ValueError, "ranks are 0 to 1", lambda: comm.broadcast(x, root=-1)),
            (ValueError, "root is 'last': it may be", lambda: comm.broadcast(x, root="last")),
            (TypeError, r"root is 1\.0: it must be", lambda: comm.broadcast(x, root=1.0)),
            (ValueError, "overlap", lambda: comm.all_reduce([x, x])),
            (ValueError, "overlap", lambda: comm.all_reduce([x, x[1:2]])),
            (ValueError, "0 arrays", lambda: comm.all_reduce([])),
            (ValueError, "list or dict", lambda: comm.all_gather(3.5)),  # type: ignore[type-var]
            (ValueError, "list: str is neither", lambda: comm.all_reduce(["x"])),  # type: ignore[list-item]
            (ValueError, "keys", lambda: comm.all_reduce({"k" * 257: x})),
            (ValueError, "it may be sum, avg", lambda: comm.all_reduce(x, op="median")),
            (OverflowError, "tag", lambda: comm.barrier(tag=-1)),
        ):
            with pytest.raises(error, match=words):
                call()  # type: ignore[no-untyped-call]
        y = np.ones((4, 3))  # only read, so it may be there twice
        handle = comm.all_reduce_async([y, y], [np.ones((4, 3)), np.ones((4, 3))])
        other = np.zeros((4, 3))
        cluster.comms[1].all_reduce([other, other.copy()])
        assert handle.wait()[0]


def test_ranks_that_have_changed_unseen_are_an_error_first(backend: str) -> None:
    """No other peer becomes the source before the program has got an error for the lost root."""
    with Cluster(3) as cluster:
        cluster.comms.sort(key=lambda comm: comm.rank)
        first = cluster.comms.pop(0)
        first.close()

        def job(index: int, comm: pccl.Communicator) -> None:
            assert not comm.are_peers_pending()  # the answer comes when the first one is gone
            assert comm.all_reduce(np.ones(3)).world_size == 2  # goes on with who is left
            x = np.full(1000, float(index))
            with pytest.raises(pccl.PeerLostError, match="2 peers by now, and ranks have changed"):
                comm.broadcast(x, root=0)
            assert (x == index).all()
            assert comm.rank == index
            comm.broadcast(x, root=0)
            assert (x == 0).all()
            assert comm.all_gather(np.array([index])).tolist() == [[0], [1]]

        cluster.each(job)


def test_root_first_is_the_oldest_member() -> None:
    with Cluster(3) as cluster:
        cluster.comms.sort(key=lambda comm: client_of(comm).knowledge.number)

        def job(index: int, comm: pccl.Communicator) -> None:
            x = [np.full(1000, float(index)), np.full(3, index)]
            comm.broadcast(x, root="first")
            assert all((each == 0).all() for each in x)
            y = np.full(5, index)
            assert comm.broadcast_async(y, root="first").wait()[0]
            assert (y == 0).all()

        cluster.each(job)
        cluster.join()
        cluster.each(job)
        cluster.comms.pop(0).close()

        def survive(index: int, comm: pccl.Communicator) -> None:
            assert not comm.are_peers_pending()  # the answer comes when the first one is gone
            x = np.full(1000, float(index))
            with pytest.raises(pccl.PeerLostError, match="3 peers by now, and ranks have changed"):
                comm.broadcast(x, root="first")
            assert (x == index).all()
            comm.broadcast(x, root="first")
            assert (x == 0).all()

        cluster.each(survive)


def test_the_first_may_have_any_rank() -> None:
    known = KnownRanks()
    known.update((7, 3, 9))
    assert known.of(9) == Ranks(rank=2, members=3, first=1)
    assert operands.broadcast(np.zeros(3), "first", known.of(9)).work.root == 1
    assert operands.broadcast(np.zeros(3), np.int64(2), known.of(9)).work.root == 2


LARGE = 1_500_000


def in_place_work(rank: int) -> dict[str, tuple[list[Array], Any]]:
    """Of each collective that writes to what it was given: its arrays, and the call."""
    whole = np.full((12, LARGE // 12), float(rank))
    pair = [np.full(LARGE, float(rank)), np.full(5, rank)]
    blocks = np.full(LARGE, float(rank))
    return {
        "all_reduce of a list": (pair, lambda c: c.all_reduce_async(pair, op="sum")),
        "broadcast": (pair, lambda c: c.broadcast_async(pair, root=1)),
        "all_gather": ([blocks], lambda c: c.all_gather_async(blocks)),
        "reduce_scatter": (
            [whole],
            lambda c: c.reduce_scatter_async(whole, whole[4 * rank : 4 * rank + 4], op="sum"),
        ),
    }


@pytest.mark.parametrize("what", in_place_work(0))
def test_the_loss_of_a_peer_leaves_inputs_unchanged(backend: str, what: str) -> None:
    with Cluster(3) as cluster:
        cluster.comms.sort(key=lambda comm: comm.rank)
        works = [in_place_work(comm.rank)[what] for comm in cluster.comms]
        handles = [call(comm) for comm, (_, call) in zip(cluster.comms, works, strict=True)]
        cluster.comms.pop().close()
        ends = [handle.wait() for handle in handles[:2]]
        assert ends[0][:2] == ends[1][:2]
        if not ends[0][0]:
            for rank, (arrays, _) in enumerate(works[:2]):
                assert all((array == rank).all() for array in arrays), what

        def again(index: int, comm: pccl.Communicator) -> None:
            x = [np.full(LARGE, float(index)), np.full(5, index)]
            comm.broadcast(x, root=1)
            assert all((array == 1).all() for array in x)

        with pytest.raises(pccl.PeerLostError) if ends[0][0] else nullcontext():
            cluster.each(again)
        cluster.each(again)


def test_a_step_is_committed_if_all_vote_for_it() -> None:
    with Cluster(3) as cluster:
        assert cluster.each(lambda i, comm: comm.commit()) == [True] * 3
        assert cluster.each(lambda i, comm: comm.commit(i != 1, tag=7)) == [False] * 3
        assert cluster.each(lambda i, comm: comm.commit(True)) == [True] * 3

        def job(index: int, comm: pccl.Communicator) -> bool | None:
            if index != 2:
                return comm.commit()
            comm.close()
            return None

        first, second, _ = cluster.each(job)
        assert first == second
        cluster.comms[1].close()
        wait_until(lambda: cluster.comms[0].world_size == 1)
        assert [cluster.comms[0].commit(ok) for ok in (True, False)] == [True, False]
