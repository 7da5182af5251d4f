"""One peer of three that differs is dropped with an error; the others' calls go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, in_threads

import pccl

COUNT = 200_000  # elements, which go around the ring, and begin before the master has answered
Arrays: TypeAlias = "np.ndarray | dict[str, np.ndarray]"


def ones(count: int = COUNT, dtype: str = "float32") -> np.ndarray:
    return np.ones(count, dtype)


def keyed(*names: str) -> dict[str, np.ndarray]:
    return {name: ones(COUNT // 2) for name in names}


# what most reduce, what one does, and its words
CASES: dict[str, tuple[Callable[[], Arrays], Callable[[], Arrays], str, str]] = {
    "longer": (ones, lambda: ones(COUNT + 1), "sum", f"{COUNT + 1} elements"),
    "small and longer": (lambda: ones(10), lambda: ones(11), "sum", "11 elements"),
    "dtype": (ones, lambda: ones(dtype="float64"), "sum", "elements of float64"),
    "op": (ones, ones, "max", f"{COUNT} elements of float32, max"),
    "keys": (lambda: keyed("a", "b"), lambda: keyed("a", "c"), "sum", "tensor 1 is b of "),
}


def first(arrays: Arrays) -> float:
    array = next(iter(arrays.values())) if isinstance(arrays, dict) else arrays
    assert np.unique(array).size == 1, "a sum of what different peers gave"
    return float(array[0])


def reduced(comm: pccl.Communicator, arrays: Arrays) -> float:
    """The sum over all who agree; a call that fails for a loss is made again."""
    while True:
        try:
            comm.all_reduce(arrays, op="sum")
        except pccl.PeerLostError:
            continue
        return first(arrays)


def odd(comm: pccl.Communicator, call: Callable[[], object]) -> str:
    """The error of the odd one out, and its later calls."""
    with pytest.raises(pccl.MismatchError) as caught:
        call()
    with pytest.raises(pccl.KickedError, match="odd one out"):
        comm.all_reduce(ones(), op="sum")
    listed(f"MismatchError: {caught.value}")
    return str(caught.value)


def synchronize(comm: pccl.Communicator, revision: int, *names: str) -> None:
    entries = [pccl.TensorInfo.from_numpy(ones(10), name) for name in names]
    state = pccl.SharedState(entries)
    state.revision = revision
    comm.sync_shared_state(state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("who", ["fresh", "veteran", "newcomer"])
def test_one_of_three_that_reduces_something_else_is_dropped(case: str, who: str) -> None:
    mine, other, op, words = CASES[case]
    with Cluster(2 if who == "newcomer" else 3) as cluster:
        if who != "fresh":
            cluster.each(lambda _, comm: comm.all_reduce(ones(), op="sum"))
        if who == "newcomer":
            cluster.join()
        *most, one = cluster.comms
        told = in_threads(
            [
                lambda: odd(one, lambda: one.all_reduce(other(), op=op)),
                *(lambda c=c: reduced(c, mine()) for c in most),  # type: ignore[misc]
            ]
        )
        assert words in str(told[0]) and "is the odd one out" in str(told[0])
        assert told[1:] == [2.0, 2.0]
        again = in_threads([lambda c=c: reduced(c, ones()) for c in most])  # type: ignore[misc]
        assert again == [2.0, 2.0]
        assert [comm.world_size for comm in most] == [2, 2]


@pytest.mark.parametrize("who", ["fresh", "veteran", "newcomer"])
def test_one_of_three_with_other_keys_of_the_shared_state_is_dropped(who: str) -> None:
    with Cluster(2 if who == "newcomer" else 3) as cluster:
        if who != "fresh":
            cluster.each(lambda _, comm: synchronize(comm, 0, "a", "b"))
        if who == "newcomer":
            cluster.join()
        *most, one = cluster.comms

        def alone() -> None:
            with pytest.raises(pccl.KickedError, match=r"entry 1 \('b'\) is missing here"):
                synchronize(one, 1, "a", "c")

        in_threads([alone, *(lambda c=c: synchronize(c, 1, "a", "b") for c in most)])  # type: ignore[misc]
        again = in_threads([lambda c=c: reduced(c, ones()) for c in most])  # type: ignore[misc]
        assert again == [2.0, 2.0]


@pytest.mark.parametrize("veterans", [1, 2, 3])
def test_a_newcomer_in_another_call_than_the_veterans_is_dropped(
    veterans: int,
) -> None:
    with Cluster(veterans) as cluster:
        cluster.each(lambda _, comm: synchronize(comm, 0, "a"))
        one = cluster.join()
        most = cluster.comms[:-1]

        def go_on(comm: pccl.Communicator) -> float:
            return reduced(comm, ones()) if comm.world_size > 1 else 0.0

        def told(comm: pccl.Communicator) -> float:
            try:
                return go_on(comm)
            except pccl.TooFewPeersError:  # the only one that is left
                return 0.0

        why, *sums = in_threads(
            [lambda: odd(one, one.update_topology), *(lambda c=c: told(c) for c in most)]  # type: ignore[misc]
        )
        assert "can never meet: peer" in str(why) and "called update_topology()" in str(why)
        assert sums == [veterans if veterans > 1 else 0.0] * veterans
