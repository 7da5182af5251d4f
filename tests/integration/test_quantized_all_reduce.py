"""Quantized all_reduce end to end: bit for bit what the oracle says, on every peer alike."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from oracles import collectives as oracle
from oracles import quantized
from oracles.quantized import FORMATS
from peers.cluster import Cluster

import pccl
from pccl import extension, operands
from pccl.ext import lib

DTYPES = dict(zip(oracle.DTYPES, pccl.DataType, strict=True))
OPS = {op: pccl.ReduceOp[op.upper()] for op in ("sum", "avg", "max", "min")}
Algorithm = pccl.QuantizationAlgorithm
OPTIONS = {  # what asks for a format, and its name
    pccl.QuantizationOptions: "MIN_MAX_8",
    lambda: pccl.QuantizationOptions(algorithm=Algorithm.BLOCKWISE_INT8): "BLOCK_8",
    lambda: pccl.QuantizationOptions(algorithm=Algorithm.BLOCKWISE_INT4): "BLOCK_4",
    lambda: pccl.QuantizationOptions(pccl.DataType.INT8): "MIN_MAX_8",
    lambda: pccl.QuantizationOptions(pccl.DataType.UINT16): "MIN_MAX_16",
    lambda: pccl.QuantizationOptions(pccl.DataType.INT16): "MIN_MAX_16",
    lambda: pccl.QuantizationOptions(algorithm=Algorithm.ZERO_POINT_SCALE): "ZERO_POINT_8",
    lambda: pccl.QuantizationOptions(pccl.DataType.INT8, Algorithm.ZERO_POINT_SCALE): (
        "ZERO_POINT_8"
    ),
    lambda: pccl.QuantizationOptions(pccl.DataType.UINT16, Algorithm.ZERO_POINT_SCALE): (
        "ZERO_POINT_16"
    ),
    lambda: pccl.QuantizationOptions(pccl.DataType.INT16, Algorithm.ZERO_POINT_SCALE): (
        "ZERO_POINT_16"
    ),
}
ALL = [(make(), name) for make, name in OPTIONS.items()]
EACH = list({name: (options, name) for options, name in ALL}.values())
BEST = [case for case in ALL if "BLOCK" in case[1]]

Array = np.ndarray[Any, Any]
Case = tuple[str, str, int, pccl.QuantizationOptions, str]  # dtype, op, count, options, format


@pytest.fixture(autouse=True)
def over_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays too: what travels with the votes is not quantized."""
    monkeypatch.setenv("PCCL_INLINE_BYTES", "0")


def make(dtype: str, count: int, seed: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal(count)
    return oracle.encode(values.astype(quantized.real(dtype)), dtype)


def check(cluster: Cluster, cases: list[Case]) -> None:
    """Runs all cases, many at a time, and compares every peer's bits with the oracle's."""
    size = len(cluster.comms)
    inputs = [
        [make(dtype, count, 1000 * peer + i) for i, (dtype, _, count, _, _) in enumerate(cases)]
        for peer in range(size)
    ]

    def run(sends: list[list[Array]], recvs: list[list[Array]]) -> list[int]:
        """The peers' ranks."""

        def describe(peer: int, i: int) -> pccl.ReduceOpDescriptor:
            dtype, op, count, options, _ = cases[i]
            operand = pccl.ReduceOperandDescriptor(DTYPES[dtype])
            work = pccl.ReduceDescriptor(count, OPS[op], i, operand, options)
            send, recv = sends[peer][i], recvs[peer][i]
            return pccl.ReduceOpDescriptor(send.ctypes.data, recv.ctypes.data, work)

        def job(index: int, comm: pccl.Communicator) -> int:
            descriptors = [describe(index, i) for i in range(len(cases))]
            info = comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=16)
            assert info.world_size == size
            return comm.rank

        return cluster.each(job)

    in_place = [[array.copy() for array in arrays] for arrays in inputs]
    sends = [[array.copy() for array in arrays] for arrays in inputs]
    recvs = [[np.empty_like(array) for array in arrays] for arrays in inputs]
    ranks = run(sends, recvs)
    assert run(in_place, in_place) == ranks
    for i, (dtype, op, count, _, name) in enumerate(cases):
        in_ring_order = [inputs[ranks.index(position)][i] for position in range(size)]
        expected = quantized.all_reduce(in_ring_order, op, dtype, FORMATS[name]).tobytes()
        for peer in range(size):
            assert recvs[peer][i].tobytes() == expected, (dtype, op, count, name)
            assert in_place[peer][i].tobytes() == expected, (dtype, op, count, name)
            assert sends[peer][i].tobytes() == inputs[peer][i].tobytes()


def test_every_dtype_format_and_operation(cluster: Cluster) -> None:
    size = len(cluster.comms)
    counts = [0, 1, size - 1, size + 1, 1009]
    cases = [
        *itertools.product(oracle.FLOATS, ["sum", "avg"], counts, EACH),
        *itertools.product(oracle.FLOATS, ["max", "min"], [1009], EACH),
        *itertools.product(["float32"], ["sum"], [1009], ALL),
    ]
    check(cluster, [(d, op, n, *options) for d, op, n, options in cases])


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        *(("libzmq", 2), ("libzmq", 3), ("pyzmq", 3)),
        pytest.param("libzmq", 5, marks=pytest.mark.slow),
        pytest.param("pyzmq", 5, marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
def test_several_chunks_to_a_segment(backend: str, size: int) -> None:
    """A chunk has 65,536 elements at most."""
    cases = itertools.product(["float32"], ["avg", "max"], [66_001 * size], BEST)
    with Cluster(size) as cluster:
        check(cluster, [(d, op, n, *options) for d, op, n, options in cases])


@pytest.mark.parametrize(
    ("name", "format"), [("int8", "BLOCK_8"), ("int4", "BLOCK_4"), ("uint8", "MIN_MAX_8")]
)
def test_by_its_short_name(name: str, format: str) -> None:
    with Cluster(2) as cluster:
        inputs = [make("float32", 1000, i) for i in range(2)]

        def job(index: int, comm: pccl.Communicator) -> tuple[np.ndarray[Any, Any], int]:
            out = np.empty_like(inputs[index])
            info = comm.all_reduce(inputs[index], out, op=pccl.ReduceOp.SUM, quantization=name)
            # both segments go out of each of the two peers and come in once
            number = getattr(lib, f"PCCL_{format}")
            nbytes = sum(lib.pccl_quantized_size(number, 10, n) for n in (512, 488))
            assert (info.tx_bytes, info.rx_bytes) == (nbytes, nbytes)
            handle = comm.all_reduce_async(
                inputs[index], np.empty_like(out), op=pccl.ReduceOp.SUM, quantization=name
            )
            assert handle.wait() == (True, 0, info)
            return out, comm.rank

        results = cluster.each(job)
        order = sorted(range(2), key=lambda i: results[i][1])
        expected = quantized.all_reduce(
            [inputs[i] for i in order], "sum", "float32", FORMATS[format]
        )
        assert all(out.tobytes() == expected.tobytes() for out, _ in results)


def test_eight_peers_round_no_more_often_than_three_and_send_two_bytes_for_an_element() -> None:
    count = 1 << 17
    inputs = [make("float32", count, i) for i in range(8)]
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    with Cluster(8) as cluster:

        def job(index: int, comm: pccl.Communicator) -> tuple[np.ndarray[Any, Any], int]:
            out = np.empty_like(inputs[index])
            info = comm.all_reduce(inputs[index], out, op="sum", quantization="int8")
            return out, info.tx_bytes

        results = cluster.each(job)
    out = results[0][0]
    assert all(each.tobytes() == out.tobytes() for each, _ in results)
    # of one rounding 0.6 % of the signal; a ring would add up eight, to 1.5 %
    assert np.linalg.norm(out - exact) < 0.01 * np.linalg.norm(exact)
    size = lib.pccl_quantized_size(lib.PCCL_BLOCK_8, 10, count)
    assert sum(sent for _, sent in results) == 2 * 7 * size


@pytest.mark.parametrize("size", [2, 3])  # around the ring, and in two stages
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_all_contributions_are_the_results_and_the_errors_of_all(
    name: pccl.QuantizationName, size: int
) -> None:
    """With error feedback, over several rounds, to the rounding of float32."""
    count, options = 12_345, pccl.QuantizationOptions.of(name)
    format = lib.PCCL_BLOCK_8 if name == "int8" else lib.PCCL_BLOCK_4

    def job(index: int, comm: pccl.Communicator) -> tuple[Array, Array, Array, int]:
        given, applied, sent = np.zeros(count), np.zeros(count), 0
        error = np.zeros(count, np.float32)
        for i in range(4):
            each = make("float32", count, 10 * i + index)
            lost, out = np.zeros_like(error), np.empty_like(error)
            work = operands.all_reduce(each + error, out, "avg", options, error=lost)
            sent = extension.run(comm, "all_reduce", work, 0).tx_bytes
            given, applied, error = given + each, applied + size * out.astype(float), lost
        return given, applied, error, sent

    with Cluster(size) as cluster:
        results = cluster.each(job)
    applied = results[0][1]
    assert all(np.array_equal(each, applied) for _, each, _, _ in results)
    errors = [error for _, _, error, _ in results]
    missing = sum(given for given, _, _, _ in results) - applied
    assert errors[0].any() and np.allclose(missing, sum(errors), atol=1e-4)
    wanted = 2 * (size - 1) * lib.pccl_quantized_size(format, 10, count)
    assert wanted <= sum(sent for _, _, _, sent in results) <= 1.02 * wanted


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> Any:
            x = torch.linspace(-1, 1, 1000, dtype=torch.bfloat16) * (index + 1)
            comm.all_reduce(x, x, op=pccl.ReduceOp.AVG, quantization="int8")
            return x

        first, *others = cluster.each(job)
        exact = torch.linspace(-1, 1, 1000, dtype=torch.bfloat16).float() * 2
        assert (first.float() - exact).abs().max() < 0.06
        assert all(torch.equal(first, other) for other in others)


def test_inline_collectives_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_INLINE_BYTES", "4000")
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> np.ndarray[Any, Any]:
            x = np.linspace(0, 1, 1000, dtype=np.float32)
            comm.all_reduce(x, x, op=pccl.ReduceOp.AVG, quantization="int4")
            return x

        for x in cluster.each(job):
            np.testing.assert_array_equal(x, np.linspace(0, 1, 1000, dtype=np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_reach_all_peers(bad: float) -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> np.ndarray[Any, Any]:
            x = np.ones(5000, np.float32)
            x[700 if index == 1 else 0] = bad if index == 1 else 1
            comm.all_reduce(x, x, op=pccl.ReduceOp.SUM, quantization="int8")
            return x

        results = cluster.each(job)
        for x in results:
            assert np.isnan(x[700])
            assert np.isnan(x).sum() == 256
            assert np.abs(x[~np.isnan(x)] - 3).max() < 0.1
            assert x.tobytes() == results[0].tobytes()


def test_a_peer_that_leaves_in_the_middle() -> None:
    """The others hold either the sum of three or, in place, what they held; and go on as two."""
    with Cluster(3) as cluster:
        count = 1 << 21
        given = [make("float32", count, i) for i in range(3)]

        def job(index: int, comm: pccl.Communicator) -> tuple[int, np.ndarray[Any, Any]]:
            x = given[index].copy()
            handle = comm.all_reduce_async(x, x, op=pccl.ReduceOp.SUM, quantization="int8")
            if index == 2:
                comm.close()
                return 0, x
            if not handle.wait()[0]:
                assert x.tobytes() == given[index].tobytes(), "the input was not restored"
                comm.all_reduce(x, x, op=pccl.ReduceOp.SUM, quantization="int8")
            return comm.world_size, x

        results = cluster.each(job)[:2]
        assert results[0][1].tobytes() == results[1][1].tobytes()
        sums = [np.sum(given[:n], axis=0) for n in (2, 3)]
        assert min(np.abs(results[0][1] - exact).max() for exact in sums) < 0.2


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, "elements of float32, sum) with"),
        ({"quantization": "int4"}, "quantized by BLOCKWISE_INT4"),
        (
            {"quantization_options": pccl.QuantizationOptions(pccl.DataType.INT8)},
            "quantized by MIN_MAX to int8",
        ),
    ],
)
def test_another_quantization_is_an_error_on_both(second: dict[str, Any], words: str) -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            wish = second if index else {"quantization": "int8"}
            array = np.ones(1000, np.float32)
            with pytest.raises(pccl.MismatchError, match="INVALID_ARGUMENT") as caught:
                comm.all_reduce(array, array, op=pccl.ReduceOp.SUM, **wish)
            assert words in str(caught.value)
            assert "quantized by BLOCKWISE_INT8" in str(caught.value)
            assert (array == 1).all()
            comm.all_reduce(array, array, op=pccl.ReduceOp.SUM, quantization="int8")
            assert np.abs(array - 2).max() < 0.02

        cluster.each(job)


def test_unquantizable_arguments_are_refused() -> None:
    with Cluster(2) as cluster:
        comm = cluster.comms[0]
        floats, integers = np.ones(10, np.float32), np.ones(10, np.int32)
        wide = pccl.QuantizationOptions(pccl.DataType.UINT32)
        for array, op, options, words in (
            (integers, pccl.ReduceOp.SUM, pccl.QuantizationOptions(), "INT32.*only floats"),
            (floats, pccl.ReduceOp.PROD, pccl.QuantizationOptions(), "PROD.*only SUM, AVG, MAX"),
            (floats, pccl.ReduceOp.SUM, wide, "cannot quantize to UINT32"),
        ):
            with pytest.raises(pccl.PCCLError, match=f"INVALID_ARGUMENT.*{words}"):
                comm.all_reduce(array, array, op=op, quantization_options=options)
        with pytest.raises(ValueError, match="int8, int4, uint8"):
            comm.all_reduce(floats, floats, op=pccl.ReduceOp.SUM, quantization="int2")
        with pytest.raises(ValueError, match="not both"):
            comm.all_reduce(
                floats,
                floats,
                op=pccl.ReduceOp.SUM,
                quantization="int8",
                quantization_options=pccl.QuantizationOptions(),
            )
