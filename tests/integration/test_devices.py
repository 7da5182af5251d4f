"""The memory of devices: on a stand-in everywhere, on CUDA where there is a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster, client_of
from peers.device import Copy, Gpu
from peers.waiting import PATIENCE_S

import pccl
from pccl import cuda, extension, operands
from pccl.errors import UnsupportedError
from pccl.protocol import messages as m
from pccl.protocol import tuning
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call, End
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.memory import Copies, HostView, Operand, Operands, on_host
from pccl.runtime.config import Config
from pccl.tensors import Buffer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(cuda, "device", lambda: made)
    return made


def entry(
    name: str, address: int, numel: int, dtype: pccl.DataType, *, any_content: bool = False
) -> pccl.TensorInfo:
    return pccl.TensorInfo(
        name,
        address,
        numel=numel,
        dtype=dtype,
        device_type=pccl.DeviceType.CUDA,
        allow_content_inequality=any_content,
    )


def test_a_view_copies_device_memory_in_and_changes_out(gpu: Gpu) -> None:
    here = np.arange(3, dtype=np.float32)
    there = [gpu.hold(np.full(4, fill, np.uint8)) for fill in (1, 2)]
    buffers = [
        Buffer.of(here),
        *(
            Buffer.at(address, 4, pccl.DataType.UINT8, None, pccl.DeviceType.CUDA)
            for address in there
        ),
        Buffer.at(0, 0, pccl.DataType.UINT8, None, pccl.DeviceType.CUDA),
    ]
    view = HostView(buffers)
    assert view.buffers[0].address == here.ctypes.data
    assert view.buffers[3].address == 0
    assert gpu.read_addresses == there
    places = [(ctypes.c_uint8 * 4).from_address(view.buffers[i].address) for i in (1, 2)]
    seen = [np.ctypeslib.as_array(place) for place in places]
    assert [list(one) for one in seen] == [[1] * 4, [2] * 4]
    for one in seen:
        one[:] = 9
    view.write_back([0, 2, 3])
    assert gpu.written_addresses == there[1:]
    assert list(gpu.content(there[0])) == [1] * 4
    assert list(gpu.content(there[1])) == [9] * 4


def alone(settings: tuning.Settings = tuning.DEFAULTS) -> tuning.Conditions:
    return tuning.Conditions(1, 0, (), True, True, settings)


def staged(work: Operands) -> tuple[Operands, Copies | None]:
    known = alone()
    return on_host(work, tuning.choose(work.work, work.nbytes, known), known)


class Ended:
    """A client; its calls have these ends."""

    def __init__(self, end: End) -> None:
        self.end = end

    def ready(self, call: Call, offset: int, length: int) -> None:
        raise AssertionError("it is told of steps that nobody waits for")

    def time_out(self, call: Call, why: str) -> None:
        raise AssertionError(why)

    def on_end(self, call: Call, told: Callable[[End], None]) -> None:
        told(self.end)


def test_buffers_that_are_only_read_or_only_written(gpu: Gpu) -> None:
    """Input is only read, output is only written; the other buffer is empty."""
    float_, cuda_ = pccl.DataType.FLOAT, pccl.DeviceType.CUDA
    nothing = Buffer.at(0, 0, float_, None, cuda_)
    given, got = (
        Buffer.at(gpu.hold(np.full(4, fill, np.float32)), 4, float_, None, cuda_) for fill in (1, 2)
    )
    send = m.Spec("send", 0, float_.value, 4)
    for operand, rows, reads, writes in (
        (Operand(given, nothing, 4), ((0, 1), ()), [given.address], []),
        (Operand(nothing, got, 4), ((), (1, 0)), [], [got.address]),
    ):
        gpu.read_addresses.clear()
        work, copied = staged(Operands(send, (operand,), *rows, pair=(3, 4)))
        assert (work.send_rows, work.recv_rows, work.pair) == (*rows, (3, 4))
        assert [bool(each.address) for each in (work.each[0].send, work.each[0].recv)] == [
            bool(reads),
            bool(writes),
        ]
        assert copied is not None
        copied.begin()
        copied.go_on(Ended(effects.Answer(1, None)), Call(1))
        copied.settle()
        assert (gpu.read_addresses, gpu.written_addresses) == (reads, writes)


def test_memory_of_the_host_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cuda, "device")
    view = HostView([Buffer.of(np.ones(3))])
    view.write_back([0])


def test_a_receiver_writes_only_changed_entries(gpu: Gpu) -> None:
    """Of three entries one differs, and one that may differ is received by who is behind."""
    contents = [np.full(1000, 7, np.float32), np.arange(5, dtype=np.int64), np.ones(9, np.float16)]
    dtypes = [pccl.DataType.FLOAT, pccl.DataType.INT64, pccl.DataType.FLOAT16]
    with Cluster(2) as cluster:
        held: list[list[int]] = [[], []]
        for index in range(2):
            mine = [contents[0] + index, contents[1], contents[2] * (1 + index)]
            held[index] = [gpu.hold(content) for content in mine]

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            infos = [
                entry(f"t{i}", held[index][i], contents[i].size, dtypes[i], any_content=i == 2)
                for i in range(3)
            ]
            shared = pccl.SharedState(infos)
            shared.revision = 1 - index
            return comm.sync_shared_state(shared)

        infos = cluster.each(job)
    assert [info.rx_bytes for info in infos] == [0, 4000 + 18]
    assert sorted(gpu.written_addresses) == [held[1][0], held[1][2]]
    for content, address in zip(contents, held[1], strict=True):
        np.testing.assert_array_equal(gpu.content(address), content.view(np.uint8))


def test_a_call_that_fails_writes_nothing(gpu: Gpu) -> None:
    """Content has diverged, which one peer does not want to be repaired."""
    held = [gpu.hold(np.full(8, fill, np.uint8)) for fill in (0, 1)]
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = pccl.SharedState([entry("x", held[index], 8, pccl.DataType.UINT8)])
            shared.revision = 5
            with pytest.raises(pccl.DivergenceError):
                comm.sync_shared_state(shared, raise_on_divergence=True)

        cluster.each(job)
    assert gpu.written_addresses == []


def test_files(gpu: Gpu, tmp_path: Path) -> None:
    address, other = gpu.hold(np.arange(8, dtype=np.uint8)), gpu.hold(np.zeros(8, np.uint8))
    pccl.SharedState([entry("x", address, 8, pccl.DataType.UINT8)]).save(tmp_path / "f")
    pccl.SharedState([entry("x", other, 8, pccl.DataType.UINT8)]).load(tmp_path / "f")
    np.testing.assert_array_equal(gpu.content(other), np.arange(8))
    assert gpu.read_addresses == [address]
    assert gpu.written_addresses == [other]


# ---- collectives ----

FLOAT = pccl.DataType.FLOAT


def on_gpu(address: int, count: int) -> Buffer:
    return Buffer.at(address, count, FLOAT, None, pccl.DeviceType.CUDA)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_all_reduce(gpu: Gpu, in_place: bool, backend: str) -> None:
    count = 5000
    sends = [gpu.hold(np.full(count, 1 + index, np.float32)) for index in range(2)]
    recvs = sends if in_place else [gpu.hold(np.zeros(count, np.float32)) for _ in range(2)]

    def job(index: int, comm: pccl.Communicator) -> None:
        send, recv = on_gpu(sends[index], count), on_gpu(recvs[index], count)
        work = operands.of_buffers(send, recv, pccl.ReduceOp.SUM, None)
        assert extension.run(comm, "all_reduce", work, 0).world_size == 2

    with Cluster(2) as cluster:
        cluster.each(job)
    assert sorted(gpu.read_addresses) == sorted(sends)
    assert sorted(gpu.written_addresses) == sorted(recvs)
    for address in recvs:
        assert (gpu.content(address).view(np.float32) == 3).all()


def test_a_block_in_place_in_a_larger_buffer(gpu: Gpu) -> None:
    """An all-gather with send inside recv: both are one view."""
    count = 5000
    recvs = [gpu.hold(np.repeat(np.float32([1, 2]), count)) for _ in range(2)]
    for index, address in enumerate(recvs):
        gpu.content(address).view(np.float32).reshape(2, count)[1 - index] = 0

    def job(index: int, comm: pccl.Communicator) -> None:
        rank = comm.rank
        assert rank == index
        send, recv = on_gpu(recvs[rank] + 4 * count * rank, count), on_gpu(recvs[rank], 2 * count)
        work = m.Spec("all_gather", 0, FLOAT.value, count, members=2)
        extension.run(comm, "all_gather", Operands(work, (Operand(send, recv, count),)), 0)

    with Cluster(2) as cluster:
        cluster.each(job)
    assert sorted(gpu.read_addresses) == sorted(recvs) == sorted(gpu.written_addresses)
    for address in recvs:
        found = gpu.content(address).view(np.float32).reshape(2, count)
        assert (found[0] == 1).all() and (found[1] == 2).all()


def test_a_collective_that_fails_writes_nothing(gpu: Gpu) -> None:
    address = gpu.hold(np.ones(5000, np.float32))
    with Cluster(2) as cluster:
        both = on_gpu(address, 5000)
        work = operands.of_buffers(both, both, pccl.ReduceOp.SUM, None)
        with pytest.raises(pccl.PCCLTimeoutError):
            extension.run(cluster.comms[0], "all_reduce", work, 0, 0.05)
    assert gpu.written_addresses == []


STEPS, SMALL = 8, 1 << 16  # elements of a step in these tests: as many as a chunk has


@dataclass
class Pair:
    """Two peers, each with ones in an array of several steps on the device."""

    gpu: Gpu
    cluster: Cluster
    sends: list[int]
    recvs: list[int]

    def work(self, index: int) -> Operands:
        count = STEPS * SMALL
        each = on_gpu(self.sends[index], count), on_gpu(self.recvs[index], count)
        return operands.of_buffers(*each, pccl.ReduceOp.SUM, None)

    def run(self, index: int, comm: pccl.Communicator) -> None:
        extension.run(comm, "all_reduce", self.work(index), 0)

    def launch(self, index: int) -> pccl.AsyncReduceHandle:
        return extension.launch(self.cluster.comms[index], "all_reduce", self.work(index), 0)

    def reads(self, index: int) -> int:
        """How many steps of a peer have been read."""
        return self.count("read", self.sends[index])

    def writes(self, index: int) -> int:
        return self.count("write", self.recvs[index])

    def count(self, kind: str, address: int) -> int:
        made = [copy for copy in self.gpu.made if copy.kind == kind]
        return sum(copy.stretch.buffer.address == address for copy in made)

    def hold_the_last_read(self, until: Callable[[int], bool]) -> None:
        """The last step of each peer's array is read when that is so for it."""

        def may(copy: Copy) -> bool:
            if copy.kind == "write" or copy.stretch.buffer.address not in self.sends:
                return True
            index = self.sends.index(copy.stretch.buffer.address)
            return self.reads(index) % STEPS < STEPS - 1 or until(index)

        self.gpu.may = may

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.gpu.changed:
            assert self.gpu.changed.wait_for(condition, 30)

    def holds(self, number: int) -> bool:
        """Whether the results of both are that number."""
        return all((self.gpu.content(a).view(np.float32) == number).all() for a in self.recvs)


@pytest.fixture
def both(
    gpu: Gpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    monkeypatch.setattr(tuning, "STEP", SMALL)
    sends = [gpu.hold(np.ones(STEPS * SMALL, np.float32)) for _ in range(2)]
    in_place = getattr(request, "param", True)
    recvs = sends if in_place else [gpu.hold(np.zeros(STEPS * SMALL, np.float32)) for _ in "ab"]
    with Cluster(2) as cluster:
        yield Pair(gpu, cluster, sends, recvs)


@pytest.mark.parametrize("both", [True, False], indirect=True)
def test_all_three_go_on_at_the_same_time(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is read from the device when the first ones have been reduced and written to
    it; and none is voted for before it has been reached."""
    read = []
    collective = PeerClient.collective

    def watched(self: PeerClient, *args: Any) -> None:
        comms = [client_of(comm) for comm in both.cluster.comms]
        read.append(both.reads(comms.index(self)))
        collective(self, *args)

    monkeypatch.setattr(PeerClient, "collective", watched)
    both.hold_the_last_read(until=both.writes)
    both.cluster.each(both.run)
    assert both.holds(2)
    assert len(read) == 2 and all(0 < n < STEPS for n in read)
    for index in range(2):
        assert (both.reads(index), both.writes(index)) == (STEPS, STEPS)


def test_a_copy_to_the_device_does_not_hold_up_an_event_loop(both: Pair) -> None:
    """The collective has ended, and what is awaited waits for copies."""
    ended, released = threading.Semaphore(0), threading.Event()
    both.gpu.may = lambda copy: copy.kind == "read" or released.is_set()

    async def work() -> list[bool]:
        handles = [both.launch(index) for index in range(2)]
        tasks = [asyncio.ensure_future(handle) for handle in handles]
        for handle in handles:
            handle.add_done_callback(ended.release)
        for _ in handles:
            assert await asyncio.to_thread(ended.acquire, timeout=30)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        with both.gpu.changed:
            released.set()
            both.gpu.changed.notify_all()
        return [(await task)[0] for task in tasks]

    assert asyncio.run(asyncio.wait_for(work(), 20)) == [True, True]
    assert both.holds(2)


def test_a_failed_call_restores_the_device(both: Pair) -> None:
    ended: list[int] = []
    both.hold_the_last_read(until=lambda index: len(ended) == 2)
    handles = [both.launch(index) for index in range(2)]

    def tell() -> None:
        with both.gpu.changed:
            ended.append(1)
            both.gpu.changed.notify_all()

    for handle in handles:
        handle.add_done_callback(tell)
    both.wait_for(lambda: both.writes(0) > 0 and both.writes(1) > 0)
    assert not both.holds(1)
    assert not handles[0].wait(timeout=0)[0]
    assert not handles[1].wait()[0]
    assert both.holds(1)
    both.gpu.may = lambda copy: True
    both.cluster.each(both.run)
    assert both.holds(2)


def test_the_result_arrives_without_a_wait(both: Pair) -> None:
    for index in range(2):
        both.launch(index)  # and the handle is dropped
    both.wait_for(lambda: both.writes(0) == both.writes(1) == STEPS)
    assert both.holds(2)


def test_a_device_that_fails_ends_the_call(both: Pair) -> None:
    """Not when the first step cannot be read: then it does not begin."""
    bad = both.sends[1]
    both.gpu.fails = lambda copy: copy.stretch.buffer.address == bad and copy.number == STEPS
    # it fails when both have started; its writes fail, too, and are all waited for
    both.hold_the_last_read(until=lambda index: min(map(both.writes, range(2))))

    def job(index: int, comm: pccl.Communicator) -> None:
        with pytest.raises(RuntimeError if index else pccl.PCCLError) as caught:
            both.run(index, comm)
        assert index == 0 or "the device is lost" in str(caught.value)

    both.cluster.each(job)
    both.gpu.fails = lambda copy: False
    both.gpu.may = lambda copy: True
    assert both.holds(1)
    both.cluster.each(both.run)
    assert both.holds(2)


def test_an_exception_before_the_launch(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read any more when it has left, and the tag is free."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PeerClient, "collective", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.launch(0)
    assert both.reads(0) == STEPS
    both.cluster.each(both.run)
    assert both.holds(2)


class Told:
    """A client of a progressive collective. It is told of each step when that is on the host, and
    then may end the call.

    Attributes:
        steps: the offsets of each step, as it is told of them.
    """

    def __init__(self, steps: int) -> None:
        self.steps: list[tuple[int, int]] = []
        self._all, self._left = threading.Event(), steps

    def ready(self, call: Call, offset: int, length: int) -> None:
        self.steps.append((offset, offset + length))
        if len(self.steps) == self._left:
            self._all.set()

    def time_out(self, call: Call, why: str) -> None:
        raise AssertionError(why)

    def on_end(self, call: Call, callback: Callable[[End], None]) -> None:
        self.callback = callback

    def play(self, copied: Copies, *written: int) -> None:
        """All steps are read; the engine reports some as final, and then its success."""
        copied.begin()
        copied.go_on(self, Call(1))
        assert self._all.wait(PATIENCE_S)
        for number in written:
            copied.written(number)
        self.callback(effects.Answer(1, None))
        copied.settle()


def test_steps_cover_arrays_of_all_kinds(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, one of them twice, one on the host, one empty: each byte is read once, and written
    once, in the step in which its offset is."""
    monkeypatch.setattr(tuning, "STEP", 128)
    dtypes = [pccl.DataType.DOUBLE, FLOAT, pccl.DataType.UINT8, FLOAT, pccl.DataType.DOUBLE]
    counts, ours = [300, 5, 1000, 0, 300], np.zeros(5, np.float32)
    there = [gpu.hold(np.zeros(8 * max(n, 1), np.uint8)) for n in counts]
    there[4] = there[0]
    buffers = [
        Buffer.at(at, n, dtype, None, pccl.DeviceType.CUDA)
        for at, n, dtype in zip(there, counts, dtypes, strict=True)
    ]
    buffers[1] = Buffer.of(ours)
    parts = tuple(m.Part(each.dtype.value, each.count) for each in buffers)
    work = m.Spec("all_reduce", 0, dtypes[0].value, sum(counts), parts=parts)
    each = tuple(Operand(one, one, one.count) for one in buffers)
    moved, copied = staged(Operands(work, each))
    assert copied is not None and moved.step
    assert [one.send.device_type for one in moved.each] == [pccl.DeviceType.CPU] * 5
    steps = [(begin, min(begin + 128, 1728)) for begin in range(0, 1728, 128)]
    client = Told(len(steps))
    client.play(copied, 5, 0)
    assert client.steps == steps

    def bytes_of(begin: int, end: int) -> list[tuple[int, int, int]]:
        """Where the offsets of a step are: the number of the array, and its bytes."""
        places = [
            (i, max(begin - first, 0), min(end - first, counts[i]))
            for i, first in ((0, 0), (2, 384), (4, 1408))
        ]
        size = [dtype.itemsize for dtype in dtypes]
        return [(i, at * size[i], to * size[i]) for i, at, to in places if at < to]

    def copies(kind: str) -> list[tuple[int, int, int]]:
        hosts = [one.send.address for one in moved.each]
        found = [one.stretch for one in gpu.made if one.kind == kind]
        return [(hosts.index(one.host.data_ptr()), one.begin, one.end) for one in found]

    assert copies("read") == [place for step in steps for place in bytes_of(*step)]
    order = [steps[5], steps[0], *steps[1:5], *steps[6:]]  # those that were final, then the rest
    assert copies("write") == [place for step in order for place in bytes_of(*step)]


def test_progressive_input_never_travels_with_its_vote(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is sent before all of it is on the host, whatever PCCL_INLINE_BYTES says."""
    small, there = pccl.DataType.UINT8, pccl.DeviceType.CUDA
    least = tuning.STEP + 1  # elements of the fewest bytes
    monkeypatch.setenv("PCCL_INLINE_BYTES", str(least))
    with pytest.raises(ValueError, match="PCCL_INLINE_BYTES"):
        Config.from_env()

    def voted(counts: list[int]) -> tuple[bool, bool]:
        """Whether it is progressive, and travels with the vote, if as much does as may."""
        ends = [Buffer.at(gpu.hold(np.zeros(n, np.uint8)), n, small, None, there) for n in counts]
        parts = tuple(m.Part(small.value, n) for n in counts) if len(counts) > 1 else ()
        work = m.Spec("all_reduce", 0, small.value, 0 if parts else counts[0], parts=parts)
        each = tuple(Operand(end, end, end.count) for end in ends)
        moved, _ = staged(Operands(work, each))
        most = alone(tuning.Settings(m.INLINE_BYTES_MAX))
        return bool(moved.step), tuning.choose(work, 0, most).inline

    assert voted([least]) == (True, False)
    assert voted([m.INLINE_BYTES_MAX]) == (False, True)
    # of tiny arrays there may be many offsets in few bytes
    monkeypatch.setattr(tuning, "STEP", 64)
    assert voted([1, 1]) == (True, False)


@pytest.mark.parametrize("position", range(3))
def test_steps_are_read_in_the_order_of_sending(
    position: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STEP", 64)
    known = tuning.Conditions(5 + position, 3, (m.Ring((5, 6, 7), 1),), True, True)
    work, held = m.Spec("all_reduce", 0, 10, 64 * 9), gpu.hold(np.zeros(64 * 9, np.float32))
    there = Buffer.at(held, 64 * 9, FLOAT, None, pccl.DeviceType.CUDA)
    one = Operands(work, (Operand(there, there, there.count),))
    _, copied = on_host(one, tuning.choose(work, 0, known), known)
    assert copied is not None
    client = Told(9)
    client.play(copied)
    segments = [(position - i) % 3 for i in range(3)]
    read = [3 * segment + i for segment in segments for i in range(3)]
    assert client.steps == [(64 * i, 64 * i + 64) for i in read]
    assert [one.stretch.begin for one in gpu.made if one.kind == "read"] == [256 * i for i in read]


@pytest.mark.skipif(cuda.is_available(), reason="there is a GPU")
def test_a_tag_is_free_again_when_there_is_no_gpu() -> None:
    with Cluster(2) as cluster:
        comm, both = cluster.comms[0], on_gpu(1 << 40, 100)
        work = operands.of_buffers(both, both, pccl.ReduceOp.SUM, None)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="torch with CUDA"):
                extension.run(comm, "all_reduce", work, 7)
        results = cluster.each(lambda i, comm: comm.all_reduce(np.ones(3), op="sum", tag=7))
        assert [one.world_size for one in results] == [2, 2]


@pytest.mark.skipif(cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_before_anybody_is_involved() -> None:
    with Cluster(1) as cluster:
        shared = pccl.SharedState([entry("x", 1 << 40, 8, pccl.DataType.UINT8)])
        with pytest.raises(UnsupportedError, match="torch with CUDA"):
            cluster.comms[0].sync_shared_state(shared)
        with pytest.raises(UnsupportedError, match="torch with CUDA"):
            shared.save("never written")
        shared = pccl.SharedState.from_tensors({"x": np.ones(3)})
        assert cluster.comms[0].sync_shared_state(shared).hashed_bytes == 24


# ---- a real GPU ----

needs_gpu = pytest.mark.skipif(not cuda.is_available(), reason="torch finds no CUDA device here")


@needs_gpu
@pytest.mark.parametrize("by_address", [False, True])
def test_tensors_on_cuda(by_address: bool, tmp_path: Path) -> None:
    import torch

    dtypes = [dtype.to_torch_dtype() for dtype in pccl.DataType]
    count = 100_003

    def make(fill: int) -> dict[str, torch.Tensor]:
        """On the GPU, but for one."""
        made = {str(dtype): torch.full((count,), fill, device="cuda").to(dtype) for dtype in dtypes}
        return made | {"here": torch.full((5,), fill), "scalar": torch.tensor(fill, device="cuda")}

    def share(tensors: dict[str, torch.Tensor]) -> pccl.SharedState:
        if not by_address:
            return pccl.SharedState.from_tensors(tensors)
        infos = [pccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()]
        return pccl.SharedState(
            [
                pccl.TensorInfo(
                    info.name,
                    info.data_ptr,
                    numel=info.numel,
                    dtype=info.dtype,
                    device_type=info.device_type,
                    allow_content_inequality=False,
                )
                for info in infos
            ]
        )

    sets = [make(1), make(2)]
    with Cluster(2) as cluster:
        states = [share(tensors) for tensors in sets]
        kinds = {info.device_type for info in states[0].tensor_infos}
        assert kinds == {pccl.DeviceType.CPU, pccl.DeviceType.CUDA}
        states[0].revision = 1
        infos = cluster.each(lambda i, comm: comm.sync_shared_state(states[i]))
    assert infos[1].rx_bytes == sum(info.nbytes for info in states[0].tensor_infos)
    for name, tensor in sets[1].items():
        assert torch.equal(tensor, sets[0][name])
    states[1].save(tmp_path / "f")
    fresh = make(3)
    share(fresh).load(tmp_path / "f")
    for name, tensor in fresh.items():
        assert torch.equal(tensor, sets[0][name])


@needs_gpu
def test_collectives_on_cuda() -> None:
    import torch

    count = 100_003

    def job(index: int, comm: pccl.Communicator) -> None:
        def full(fill: float, *shape: int) -> torch.Tensor:
            return torch.full(shape or (count,), fill, device="cuda")

        x, y = full(1.0 + index), full(0.0)
        comm.all_reduce(x, y, op="sum")
        assert bool((y == 3).all()) and bool((x == 1 + index).all())
        comm.all_reduce({"a": x, "b": y})
        assert bool((x == 1.5).all()) and bool((y == 3).all())
        descriptor = pccl.ReduceDescriptor(
            count // 2, pccl.ReduceOp.MAX, 3, pccl.ReduceOperandDescriptor(FLOAT), None
        )
        x = full(float(index))
        comm.all_reduce_multiple_with_retry([pccl.ReduceOpDescriptor.from_torch(x, x, descriptor)])
        assert bool((x[: count // 2] == 1).all()) and bool((x[count // 2 :] == index).all())
        gathered = comm.all_gather(full(comm.rank))
        assert gathered.device.type == "cuda" and gathered.shape == (2, count)
        assert gathered.mean(1).tolist() == [0, 1]
        part = comm.reduce_scatter(full(2.0, 2, count), op="sum")
        assert part.shape == (1, count) and bool((part == 4).all())
        x = full(comm.rank)
        comm.broadcast(x, root=1)
        assert bool((x == 1).all())
        x = torch.arange(96.0, device="cuda").view(2, 3, 4, 4)
        y = x.to(memory_format=torch.channels_last).clone()
        comm.all_reduce(y, op="sum")
        assert torch.equal(y, 2 * x) and not y.is_contiguous()
        rank = comm.rank
        x = full(rank, 2, count)
        whole = comm.gather(x, root=1)
        part = comm.scatter(whole, torch.empty_like(x), root=1)
        assert part.device.type == "cuda" and bool((part == rank).all())
        assert comm.all_to_all(x).mean(1).tolist() == [0, 1]
        y = torch.empty_like(x)
        comm.send_recv({1 - rank: x}, {1 - rank: y})
        assert bool((y == 1 - rank).all())
        comm.reduce(x, root=1, op="max")
        assert bool((x == rank).all())

    with Cluster(2) as cluster:
        cluster.each(job)
