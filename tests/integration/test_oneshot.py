"""All-reduces of two peers that send each other everything, as those on different machines do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import collectives as oracle
from oracles import quantized
from oracles.quantized import FORMATS
from peers.cluster import Cluster

import pccl
from pccl.protocol.peer.effects import StartOp
from pccl.protocol.tuning import Algorithm
from pccl.runtime.client.engine import Engine


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whether each op that is started is a one-shot."""
    started: list[object] = []
    start = Engine.start

    def watched(self: Engine, effect: StartOp) -> None:
        started.append(effect.algorithm is Algorithm.ONE_SHOT)
        start(self, effect)

    monkeypatch.setattr(Engine, "start", watched)
    return started


def two_hosts() -> Cluster:
    """Two peers that the plan has at different hosts, although both are here."""
    return Cluster(2, hosts=["127.0.0.1", "127.0.0.2"])


@pytest.mark.parametrize("in_place", [False, True])
def test_quantized(in_place: bool, started: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the bits of what both have sent, decoded and reduced: rounded once, not twice."""
    monkeypatch.setenv("PCCL_INLINE_BYTES", "0")
    cases = list(itertools.product(["int8", "int4", "uint8"], ["sum", "avg", "max"], [1, 70_001]))
    formats = {"int8": "BLOCK_8", "int4": "BLOCK_4", "uint8": "MIN_MAX_8"}
    given = [
        [oracle.draw("float32", n, 100 * peer + i) for i, (_, _, n) in enumerate(cases)]
        for peer in range(2)
    ]

    def job(peer: int, comm: pccl.Communicator) -> tuple[int, list[bytes]]:
        results = []
        for (how, op, _), send in zip(cases, given[peer], strict=True):
            mine = send.copy()
            recv = mine if in_place else np.empty_like(mine)
            comm.all_reduce(mine, recv, op=op, quantization=how)
            results.append(recv.tobytes())
        return comm.rank, results

    with two_hosts() as cluster:
        found = cluster.each(job)
    assert len(started) == 2 * len(cases) and all(started)
    first, second = sorted(range(2), key=lambda peer: found[peer][0])
    for i, (how, op, _) in enumerate(cases):
        wanted = quantized.all_reduce_oneshot(
            given[first][i], given[second][i], op, "float32", FORMATS[formats[how]]
        )
        assert found[0][1][i] == found[1][1][i] == wanted.tobytes(), cases[i]


@pytest.mark.parametrize("in_place", [False, True])
def test_every_dtype_and_operation(backend: str, in_place: bool, started: list[object]) -> None:
    """Both have the same bits: those of rank 0 and rank 1, in this order."""
    cases = list(itertools.product(oracle.DTYPES, oracle.OPS, [1, 300]))
    sends = [
        [oracle.draw(dtype, n, 100 * peer + i) for i, (dtype, _, n) in enumerate(cases)]
        for peer in range(2)
    ]
    before = [[array.copy() for array in arrays] for arrays in sends]
    recvs = sends if in_place else [[np.empty_like(a) for a in arrays] for arrays in sends]

    def job(peer: int, comm: pccl.Communicator) -> int:
        described = []
        for tag, (dtype, op, count) in enumerate(cases):
            kind = pccl.ReduceOperandDescriptor(list(pccl.DataType)[oracle.DTYPES.index(dtype)])
            chosen = list(pccl.ReduceOp)[oracle.OPS.index(op)]
            work = pccl.ReduceDescriptor(count, chosen, tag, kind, None)
            pointers = sends[peer][tag].ctypes.data, recvs[peer][tag].ctypes.data
            described.append(pccl.ReduceOpDescriptor(*pointers, work))
        comm.all_reduce_multiple_with_retry(described)
        large = np.arange(700_000, dtype=np.float32) % 97
        result = large if in_place else np.empty_like(large)
        comm.all_reduce(large, result, op="sum")
        assert (result == 2 * (np.arange(700_000) % 97)).all()
        return comm.rank

    with two_hosts() as cluster:
        ranks = cluster.each(job)
    assert all(started)
    for i, (dtype, op, _) in enumerate(cases):
        first, second = (before[ranks.index(rank)][i] for rank in range(2))
        expected = oracle.reduce(first, second, op, dtype, 2)
        if op == "avg" and "int" in dtype:
            expected = oracle.mean([first, second])
        for peer in range(2):
            np.testing.assert_array_equal(recvs[peer][i].view(np.uint8), expected.view(np.uint8))
            if not in_place:
                np.testing.assert_array_equal(sends[peer][i], before[peer][i])
