"""Several all-reduces in one call: which of them become one collective, and what that changes."""

from __future__ import annotations

import numpy as np
import pytest
from peers.cluster import Cluster

import pccl
from pccl.operands import BUNDLE_BYTES, BUNDLE_PARTS, bundles

SUM, MAX = pccl.ReduceOp.SUM, pccl.ReduceOp.MAX
INT8 = pccl.QuantizationOptions.of("int8")


def described(
    x: np.ndarray,
    tag: int,
    op: pccl.ReduceOp = SUM,
    quantization: pccl.QuantizationOptions | None = None,
) -> pccl.ReduceOpDescriptor:
    kind = pccl.ReduceOperandDescriptor(pccl.DataType.from_numpy_dtype(x.dtype))
    work = pccl.ReduceDescriptor(x.size, op, tag, kind, quantization)
    return pccl.ReduceOpDescriptor.from_numpy(x, x, work)


def sizes(made: list[list[pccl.ReduceOpDescriptor]]) -> list[int]:
    return [len(bundle) for bundle in made]


def test_neighbors_of_a_kind_are_bundled() -> None:
    x, y = np.ones(5, np.float32), np.ones(5, np.float64)
    listed = [described(x, 0), described(x, 1), described(y, 2), described(x, 3), described(x, 4)]
    assert sizes(bundles(listed)) == [2, 1, 2]
    listed = [
        described(x, 0),
        described(x, 1, MAX),
        described(x, 2, MAX),
        described(x, 3, SUM, INT8),
    ]
    assert sizes(bundles(listed)) == [1, 2, 1]
    large, small = np.ones(BUNDLE_BYTES // 4 - 5, np.float32), np.ones(1, np.float32)
    listed = [described(large, 0), *(described(x, tag) for tag in range(1, 3)), described(large, 3)]
    assert sizes(bundles(listed)) == [2, 2]
    assert sizes(bundles([described(large, 0), described(large, 1)])) == [1, 1]
    assert sizes(bundles([described(small, tag) for tag in range(BUNDLE_PARTS + 1)])) == [
        BUNDLE_PARTS,
        1,
    ]
    assert bundles([]) == []


def values(peer: int) -> list[np.ndarray]:
    rng = np.random.default_rng(peer)
    return [rng.standard_normal(count).astype(np.float32) for count in (1, 5000, 0, 7, 300)]


def test_all_get_the_same_bits_and_few_votes_are_cast() -> None:
    with Cluster(3) as cluster:
        found = [values(peer) for peer in range(3)]

        def job(index: int, comm: pccl.Communicator) -> pccl.ReduceInfo:
            listed = [described(x, tag) for tag, x in enumerate(found[index])]
            listed.append(described(np.ones(3), 9))
            info = comm.all_reduce_multiple_with_retry(listed)
            comm.all_reduce(np.ones(2), tag=4)  # the tags of the bundle are free again
            return info

        infos = cluster.each(job)
        made = [sum(comm.stats().collectives.values()) for comm in cluster.comms]
    assert made == [2 + 1] * 3
    assert {info.world_size for info in infos} == {3}
    assert all(info.rx_bytes > 5308 * 4 for info in infos)
    for i, arrays in enumerate(zip(*found, strict=True)):
        expected = np.sum([values(peer)[i].astype(np.float64) for peer in range(3)], axis=0)
        np.testing.assert_allclose(arrays[0], expected, rtol=1e-5, atol=1e-5)
        assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()


def test_all_tags_of_a_bundle_are_occupied() -> None:
    with Cluster(2) as cluster:
        comm, (x, y) = cluster.comms[0], np.ones((2, 3), np.float32)
        comm.all_reduce_async(np.ones(3), tag=6)
        with pytest.raises(pccl.PCCLError, match="tag 6 is in use"):
            comm.all_reduce_multiple_with_retry([described(x, 5), described(y, 6)])
        assert (x == 1).all() and (y == 1).all()
        with pytest.raises(ValueError, match="overlap"):
            comm.all_reduce_multiple_with_retry([described(x, 5), described(x, 7)])
        for tag in (5, 7):
            cluster.each(lambda _, one, tag=tag: one.all_reduce(np.ones(2), tag=tag))  # type: ignore[misc]


def test_a_bundle_is_repeated_when_a_peer_is_lost() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            if index == 2:
                comm.barrier(tag=9)
                comm.close()
                return
            x, y = np.ones((2, 9000), np.float32)
            handle = comm.barrier_async(tag=9)
            info = comm.all_reduce_multiple_with_retry([described(x, 0), described(y, 1)])
            assert handle.wait()[0]
            assert info.world_size == 2 and (x == 2).all() and (y == 2).all()

        cluster.each(job)
