"""Results that go to a device as codes: on a stand-in, in one run with peers in host memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import oracle
import pytest
from cluster import Cluster
from device import Copy, Gpu

import pccl
from pccl import cuda
from pccl.calls import operands
from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Answer, StartOp
from pccl.protocol.peer.knowledge import NO_PLAN
from pccl.protocol.ring import RingPlace
from pccl.runtime.client import copies
from pccl.runtime.client.call import Call
from pccl.runtime.client.memory import Operands
from pccl.tensors.arrays import Buffer

pytest.importorskip("torch")

STEP = 1 << 12
INT8 = pccl.QuantizationOptions(algorithm=pccl.QuantizationAlgorithm.BLOCKWISE_INT8)
FLOATS = [pccl.DataType[name] for name in ("FLOAT", "BFLOAT16", "FLOAT16", "DOUBLE")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(cuda, "device", lambda: made)
    monkeypatch.setattr(copies, "STEP", STEP)
    monkeypatch.setenv("PCCL_INLINE_BYTES", "0")  # for small arrays are not quantized
    return made


class Array:
    """An array of one peer, on the device or on the host."""

    def __init__(self, gpu: Gpu | None, content: np.ndarray, dtype: pccl.DataType) -> None:
        self.gpu, self.here, self.dtype, self.count = gpu, content.copy(), dtype, content.size
        self.there = gpu.hold(content) if gpu is not None else 0

    @property
    def buffer(self) -> Buffer:
        if self.gpu is None:
            return Buffer.at(self.here.ctypes.data, self.count, self.dtype, self.here)
        return Buffer.at(self.there, self.count, self.dtype, None, pccl.DeviceType.CUDA)

    @property
    def bits(self) -> bytes:
        return (self.here if self.gpu is None else self.gpu.content(self.there)).tobytes()


def drawn(dtype: pccl.DataType, count: int, seed: int) -> np.ndarray:
    made: np.ndarray = oracle.draw(oracle.DTYPES[dtype.value], count, seed)
    return made


def run(comm: pccl.Communicator, send: Array, recv: Array, op: pccl.ReduceOp) -> None:
    work = operands.of_buffers(send.buffer, recv.buffer, op, INT8)
    comm._launcher.run("all_reduce", work, 0, None)


def written(gpu: Gpu) -> set[int]:
    """The addresses to which something was copied."""
    return {copy.piece.buffer.address for copy in gpu.made if copy.kind == "write"}


def bits_of_all(cluster: Cluster, gpus: list[Gpu | None], in_place: bool) -> list[list[bytes]]:
    """The results of many calls, by peer."""
    ops = pccl.ReduceOp.SUM, pccl.ReduceOp.AVG, pccl.ReduceOp.MAX, pccl.ReduceOp.MIN
    cases = list(zip(itertools.cycle(ops), FLOATS, (70_001, 20_000, 4_163, 8_256), strict=False))

    def job(index: int, comm: pccl.Communicator) -> list[bytes]:
        found = []
        for number, (op, dtype, count) in enumerate(cases):
            send = Array(gpus[index], drawn(dtype, count, 10 * number + index), dtype)
            recv = send if in_place else Array(gpus[index], np.zeros_like(send.here), dtype)
            before = send.bits
            run(comm, send, recv, op)
            assert in_place or send.bits == before
            found.append(recv.bits)
        return found

    return cluster.each(job)


@pytest.mark.parametrize(("peers", "in_place"), [(2, True), (3, False), (5, True)])
def test_all_peers_have_the_same_bits(gpu: Gpu, peers: int, in_place: bool) -> None:
    """Those that are all in host memory have them as well; and a quarter goes to the device."""
    with Cluster(peers) as cluster:
        wanted = bits_of_all(cluster, [None] * peers, in_place)
        assert all(each == wanted[0] for each in wanted)
        mixed: list[Gpu | None] = [gpu, *[None] * (peers - 2), gpu]
        assert bits_of_all(cluster, mixed, in_place) == wanted
    assert {copy.kind for copy in gpu.made} == {"read", "write", "decode"}
    assert written(gpu) == set(gpu.rooms)
    nbytes = sum(c.piece.end - c.piece.begin for c in gpu.made if c.kind == "write")
    sizes = [(70_001, 4), (20_000, 4), (4_163, 4), (8_256, 8)]
    assert nbytes <= 2 * sum(n + (n // 64 + 1) * size for n, size in sizes)


def test_two_who_send_each_other_everything(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reduces what the other one has sent with what it has itself, quantized."""
    near = "pccl.protocol.peer.collectives.is_direct"
    monkeypatch.setattr(near, lambda work, rings, peers: len(peers) == 2)
    with Cluster(2) as cluster:
        wanted = bits_of_all(cluster, [None, None], True)
        for gpus in ([gpu, None], [gpu, gpu]):
            assert bits_of_all(cluster, gpus, True) == wanted
        assert bits_of_all(cluster, [None, gpu], False) == wanted


def test_several_at_once_and_lists(gpu: Gpu) -> None:
    """Lists of arrays of several types and lengths, in calls that overlap."""
    counts = [
        (pccl.DataType.FLOAT, 5_001),
        (pccl.DataType.BFLOAT16, 3),
        (pccl.DataType.DOUBLE, 9_000),
    ]

    def lists(index: int, where: Gpu | None, seed: int) -> list[Array]:
        return [
            Array(where, drawn(dtype, count, seed + 100 * index), dtype) for dtype, count in counts
        ]

    def work(arrays: list[Array]) -> Operands:
        parts = tuple(m.Part(each.dtype.value, each.count) for each in arrays)
        total = m.Work("all_reduce", 0, 0, 0, INT8.algorithm.value, parts=parts)
        each = (one.buffer for one in arrays)
        return Operands(total, tuple(operands.Operand(one, one, one.count) for one in each))

    def job(index: int, comm: pccl.Communicator) -> list[list[bytes]]:
        all_lists = [lists(index, gpu if index else None, seed) for seed in range(3)]
        handles = [
            comm._launcher.launch("all_reduce", work(arrays), tag)
            for tag, arrays in enumerate(all_lists)
        ]
        assert all(handle.wait()[0] for handle in handles)
        return [[one.bits for one in arrays] for arrays in all_lists]

    with Cluster(2) as cluster:
        first, second = cluster.each(job)
    assert first == second


def test_nothing_of_the_tensor_changes_if_the_call_fails(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a moment, although codes of the result are there already."""
    monkeypatch.setattr(copies, "STEP", 1 << 16)  # about a chunk, all of which must be read
    arrays = [Array(gpu, np.ones(8 << 16, np.float32), pccl.DataType.FLOAT) for _ in range(2)]
    before = arrays[0].bits

    ended: list[int] = []

    def tell() -> None:
        with gpu.changed:
            ended.append(1)
            gpu.changed.notify_all()

    def all_but_the_last(copy: Copy) -> bool:
        reads = sum(c.kind == "read" and c.piece.buffer == copy.piece.buffer for c in gpu.made)
        return copy.kind != "read" or reads < 7 or bool(ended)

    gpu.may = all_but_the_last
    with Cluster(2) as cluster:

        def launch(index: int) -> pccl.AsyncReduceHandle:
            both = arrays[index].buffer
            work = operands.of_buffers(both, both, pccl.ReduceOp.SUM, INT8)
            return cluster.comms[index]._launcher.launch("all_reduce", work, 0)

        handles = [launch(index) for index in range(2)]
        for handle in handles:
            handle.add_done_callback(tell)
        with gpu.changed:
            assert gpu.changed.wait_for(lambda: written(gpu) == set(gpu.rooms), 30)
        assert not handles[0].wait(timeout=0)[0]
        assert not handles[1].wait()[0]
        assert [one.bits for one in arrays] == [before, before]
        assert not [copy for copy in gpu.made if copy.kind == "decode"]
        cluster.each(lambda i, comm: run(comm, arrays[i], arrays[i], pccl.ReduceOp.SUM))
    np.testing.assert_allclose(np.frombuffer(arrays[0].bits, np.float32), 2, rtol=1e-6)
    assert arrays[0].bits == arrays[1].bits


def test_a_device_that_cannot_decode_is_told(gpu: Gpu) -> None:
    gpu.fails = lambda copy: copy.kind == "decode"
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = Array(gpu if index else None, np.ones(STEP * 2, np.float32), FLOATS[0])
            if index == 0:
                run(comm, array, array, pccl.ReduceOp.SUM)
                return
            with pytest.raises(RuntimeError, match="the device is lost"):
                run(comm, array, array, pccl.ReduceOp.SUM)

        cluster.each(job)


class Alone:
    """A client whose call ends with the contribution as the result: nobody else was left."""

    def __init__(self, told: list[tuple[int, int]]) -> None:
        self.told = told

    def ready(self, call: Call, offset: int, length: int) -> None:
        self.told.append((offset, length))

    def withdraw(self, call: Call, why: str) -> None:
        raise AssertionError(why)

    def hear(self, call: Call, told: object) -> None:
        told(Answer(1, None))  # type: ignore[operator]


def test_the_last_one_left_keeps_its_contribution(gpu: Gpu) -> None:
    send, recv = (
        Array(gpu, content, FLOATS[0])
        for content in (drawn(FLOATS[0], 9_000, 1), np.zeros(9_000, np.float32))
    )
    work = operands.of_buffers(send.buffer, recv.buffer, pccl.ReduceOp.SUM, INT8)
    moved, copied = copies.on_host(work, NO_PLAN, 1)
    assert moved.gradual is not None and moved.gradual.coded and copied is not None
    copied.begin()
    moved.gradual.started(StartOp(1, 1, 1, (RingPlace(0, 1, 0, 0, (0,), 0, 9_024),)))
    told: list[tuple[int, int]] = []
    copied.go_on(Alone(told), Call(1))  # type: ignore[arg-type]
    copied.settle()
    assert recv.bits == send.bits
    assert len(told) == 3


def test_what_a_device_cannot_decode_goes_there_as_it_is(gpu: Gpu) -> None:
    """Other quantizations, lists of which one array is on the host, and odd addresses."""
    on_device = Array(gpu, np.ones(9_000, np.float32), FLOATS[0]).buffer
    on_host = Array(None, np.ones(9_000, np.float32), FLOATS[0]).buffer
    int4 = pccl.QuantizationOptions(algorithm=pccl.QuantizationAlgorithm.BLOCKWISE_INT4)
    for send, recv, how in (
        (on_device, on_device, int4),
        (on_device, on_device, None),
        (on_host, on_device, INT8),
        (on_device, on_host, INT8),
        (on_device, replace(on_device, address=on_device.address + (1 << 30) + 1), INT8),
    ):
        work = operands.of_buffers(send, recv, pccl.ReduceOp.SUM, how)
        moved, _ = copies.on_host(work, NO_PLAN, 1)
        assert moved.gradual is not None and not moved.gradual.coded
    assert gpu.rooms == []
