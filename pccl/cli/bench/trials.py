"""Measures a collective in one process: data, arrays, and the variants that take turns.

Each peer's contribution repeats a table of small whole numbers, so every partial result is exact in
every element type. The length of the table is a prime, so a chunk in the wrong place is detected.

The ways alternate in each iteration, so that other load on the machine affects all alike. Before
each timed call, the peers do an untimed all-reduce of one element with the same library. So all
start together, and no way pays for the end of the previous one.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pccl
from pccl.tensors import Array
from pccl.types import DataType, QuantizationName, QuantizationOptions, ReduceOp

PERIOD = 8191
EXACT_MAX = 256  # the largest sum that is exact in every element type: bfloat16 has 8 bits
VALUE_MAX = 15  # the largest value of a contribution, if there are few peers

Bits = NDArray[Any]  # elements as numpy knows them; bfloat16 as the upper halves of float32


def in_turns(
    ways: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    iterations: int,
    warmups: int,
    *,
    alternate: bool = False,
) -> dict[str, list[float]]:
    """The seconds of each timed iteration of calls that take turns, by name.

    A way is an untimed preparation and a timed call. With `alternate`, every second iteration runs
    the ways in reverse order, so that no way always follows the same other one.
    """
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for iteration in range(warmups + iterations):
        order = list(ways.items())
        for name, (prepare, call) in order[:: -1 if alternate and iteration % 2 else 1]:
            prepare()
            began_s = time.perf_counter()
            call()
            times_s[name].append(time.perf_counter() - began_s)
    return {name: times[warmups:] for name, times in times_s.items()}


def value_max(peers: int) -> int:
    return min(VALUE_MAX, EXACT_MAX // peers)


def contribution(dtype: DataType, op: ReduceOp, number: int, peers: int = 2) -> Bits:
    """The contribution of peer `number`: PERIOD elements."""
    table = np.random.default_rng(number)
    low, high = (1, 3) if op is ReduceOp.PROD else (0, value_max(peers) + 1)
    return _store(table.integers(low, high, PERIOD).astype(np.float32), dtype)


def expected(dtype: DataType, op: ReduceOp, peers: int) -> Bits:
    """The result on all peers: PERIOD elements."""
    exact = DataType.FLOAT if dtype is DataType.BFLOAT16 else dtype
    inputs = [contribution(exact, op, number, peers) for number in range(peers)]
    combine: dict[ReduceOp, np.ufunc] = {
        ReduceOp.PROD: np.multiply,
        ReduceOp.MAX: np.maximum,
        ReduceOp.MIN: np.minimum,
    }
    result: Bits = combine.get(op, np.add).reduce(inputs, dtype=inputs[0].dtype)
    if op is not ReduceOp.AVG:
        return _store(result, dtype)
    if result.dtype.kind in "iu":
        return _store(np.trunc(result / peers), dtype)
    wide = np.float64 if dtype is DataType.DOUBLE else np.float32
    return _store(np.divide(result, peers, dtype=wide), dtype)


def tiled(table: Bits, count: int) -> Bits:
    return np.resize(table, count)


def as_array(bits: Bits, dtype: DataType) -> Array:
    """The bits as an argument of collectives, without a copy; a torch tensor for bfloat16, which
    numpy lacks."""
    if dtype is not DataType.BFLOAT16:
        return bits
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def count_wrong(bits: Bits, table: Bits) -> int:
    """Elements that differ from the repeated table."""
    whole = bits.size // PERIOD * PERIOD
    body, rest = bits[:whole].reshape(-1, PERIOD), bits[whole:]
    return int(np.count_nonzero(body != table) + np.count_nonzero(rest != table[: rest.size]))


def error_max(dtype: DataType, op: ReduceOp, peers: int, quantization: QuantizationName) -> float:
    """How far a quantized sum or mean may be from `expected`.

    The bound has half a step for each of the `peers` quantizations, and as much again for rounding
    in `dtype`. A step is at most the largest magnitude there, over the codes on one side of zero.
    """
    codes = 7 if quantization == "int4" else 127
    largest = [value_max(peers) * contributors for contributors in range(1, peers + 1)]
    error = sum(largest) / codes / 2
    digits = {DataType.FLOAT16: 10, DataType.BFLOAT16: 7}.get(dtype, 23)
    error += largest[-1] * 2.0**-digits
    return error / peers if op is ReduceOp.AVG else error


def count_far(bits: Bits, table: Bits, dtype: DataType, distance: float) -> int:
    """Elements that are farther than `distance` from those of the repeated table."""
    table = _values(table, dtype)
    far = 0
    for begin in range(0, bits.size, PERIOD):
        part = _values(bits[begin : begin + PERIOD], dtype)
        far += int(np.count_nonzero(~(np.abs(part - table[: part.size]) <= distance)))
    return far


def _values(bits: Bits, dtype: DataType) -> NDArray[Any]:
    if dtype is DataType.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits


def _store(values: NDArray[Any], dtype: DataType) -> Bits:
    if dtype is not DataType.BFLOAT16:
        return values.astype(dtype.to_numpy_dtype())
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest even


def blocks(what: str, peers: int) -> int:
    """The size of a collective's larger buffer, as a multiple of the smaller one."""
    return peers if what in ("all_gather", "reduce_scatter", "all_to_all") else 1


# A device is "", for numpy arrays (torch tensors for bfloat16), or torch's name of one.


def of_process(device: str, number: int) -> str:
    """The device of process `number` of this machine: its own GPU, or a shared one if there are
    fewer than processes."""
    if device == "cpu":
        return ""
    import torch

    found = f"{device}:{number % torch.cuda.device_count()}"
    torch.cuda.set_device(found)
    return found


def put(bits: Bits, dtype: DataType, device: str) -> Any:
    """A new array on the device."""
    array = as_array(bits.copy(), dtype)
    if not device:
        return array
    import torch

    return torch.as_tensor(array).to(device, copy=True)


def fill(array: Any, bits: Bits) -> None:
    if isinstance(array, np.ndarray):
        array[:] = bits
        return
    import torch

    array.copy_(torch.as_tensor(as_array(bits, DataType.from_torch_dtype(array.dtype))))


def bits_of(array: Any) -> Bits:
    """The elements of an array as a numpy array on the host."""
    if isinstance(array, np.ndarray):
        return array
    import torch

    tensor = array.cpu()
    if tensor.dtype is torch.bfloat16:
        return bits_of(tensor.view(torch.int16).numpy().view(np.uint16))
    return bits_of(tensor.numpy())


def finish(device: str) -> None:
    """Waits for the work that a GPU has queued."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def missing(device: str) -> str:
    """Why this machine cannot measure on that device, and what to do; empty if it can."""
    if device == "cpu":
        return ""
    if importlib.util.find_spec("torch") is None:
        return "--device cuda needs torch, built with CUDA: pip install torch"
    import torch

    if torch.version.cuda is None:
        return f"--device cuda needs torch built with CUDA: torch {torch.__version__} is not"
    if not torch.cuda.is_available():
        return (
            f"--device cuda needs a GPU: torch {torch.__version__} is built with CUDA "
            f"{torch.version.cuda}, but finds none. See whether nvidia-smi lists one, and whether "
            "CUDA_VISIBLE_DEVICES hides it"
        )
    return ""


def described(device: str) -> str:
    """The device, for the head of a table."""
    if device == "cpu":
        return ""
    import torch

    return f", on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
GLOO = "gloo"
NCCL = "nccl"
TORCH = (GLOO, NCCL)  # backends of torch.distributed
UNQUANTIZED = "unquantized"
PIECES = "pieces"
TENSORS = "tensors"
OTHERS = (*TORCH, UNQUANTIZED, PIECES, TENSORS)  # what pccl may be measured against
REDUCING = ("all_reduce", "reduce_scatter")

_PIECES = 16
_WIDTH = 256  # a GPT of 512 tokens, 64 places, 12 blocks and a norm; its 148 tensors in rows:
_BLOCK = (1, 1, 1, 1, 3 * _WIDTH, 3, _WIDTH, 1, 4 * _WIDTH, 4, 4 * _WIDTH, 1)
_ROWS = (512, 64, *_BLOCK * 12, 1, 1)
ELEMENTS_MIN = {PIECES: _PIECES, TENSORS: sum(_ROWS)}  # so that none is empty

_TAG = 1  # of the timed collectives; the untimed ones before them have tag 0


@dataclass(frozen=True, slots=True)
class Way:
    meet: Callable[[], object]  # returns on all peers at about the same time
    run: Callable[[], object]  # what is timed
    sent: Callable[[], int]  # runs it once more; the bytes that this peer sent
    reset: Callable[[], None]  # gives the buffers known contents
    result: Callable[[], Bits]  # the result, on the host
    quantization: QuantizationName | None = None  # how the result is quantized; None: it is exact


@dataclass(frozen=True, slots=True)
class Job:
    what: str  # the collective, by its name
    peers: int
    counts: tuple[int, ...]  # elements, one size after the other; of the smaller buffer
    dtype: DataType
    op: ReduceOp
    iterations: int
    warmups: int  # iterations that are not timed
    check: bool  # whether to verify every element of one more call of each way
    against: str | None = None  # one of OTHERS, which takes turns with it
    quantization: QuantizationName | None = None  # as `Communicator.all_reduce` takes it
    lanes: int = 0  # connections to the next peer; 0: as pccl chooses
    device: str = "cpu"  # where the arrays are: "cpu" or "cuda"


class Trial:
    """A collective of `count` elements (of the smaller buffer) of each peer, on own buffers."""

    def __init__(self, comm: pccl.Communicator, job: Job, count: int, device: str = "") -> None:
        self._comm, self._job, self._count, self._device = comm, job, count, device
        self._rank, self._peers = comm.rank, comm.world_size
        send = count * (self._peers if job.what in ("reduce_scatter", "all_to_all") else 1)
        recv = count * (self._peers if job.what in ("all_gather", "all_to_all") else 1)
        self._content = tiled(self._brought(self._rank), send)
        self._send = put(self._content, job.dtype, device)
        self._recv = put(np.zeros(recv, self._content.dtype), job.dtype, device)

    def ways(self) -> dict[str, Way]:
        """All ways of this collective by name, and the requested one of OTHERS."""
        found, quantization = {}, self._job.quantization
        if self._job.what != "broadcast":
            found[OUT_OF_PLACE] = self._way(self._send, self._recv, quantization)
        if self._job.what != "all_to_all":
            found[IN_PLACE] = self._in_place()
        match self._job.against:
            case None:
                pass
            case "unquantized":
                found[UNQUANTIZED] = self._way(self._send, self._recv, None)
            case "pieces":
                found[PIECES] = self._pieces(found[OUT_OF_PLACE])
            case "tensors":
                found[TENSORS] = self._tensors(found[OUT_OF_PLACE])
            case library:
                found[library] = self._torch()
        return found

    def check(self, way: Way) -> int:
        """Runs a way once more, from known contents, and counts the wrong elements."""
        way.reset()
        way.run()
        job, result, count, size = self._job, way.result(), self._count, self._peers
        if job.what == "all_gather":
            rows = result.reshape(size, count)
            return sum(count_wrong(rows[r], self._brought(r)) for r in range(size))
        at = -(self._rank * count % PERIOD)  # where our part begins in the tables of the others
        if job.what == "all_to_all":
            rows = result.reshape(size, count)
            brought = (np.roll(self._brought(r), at) for r in range(size))
            return sum(count_wrong(*each) for each in zip(rows, brought, strict=True))
        if job.what == "broadcast":
            return count_wrong(result, self._brought(0))
        table = expected(job.dtype, job.op, size)
        if job.what == "reduce_scatter":
            table = np.roll(table, at)
        if way.quantization is None:
            return count_wrong(result, table)
        distance = error_max(job.dtype, job.op, size, way.quantization)
        return count_far(result, table, job.dtype, distance)

    def _brought(self, rank: int) -> Bits:
        return contribution(self._job.dtype, self._job.op, rank, self._peers)

    def _in_place(self) -> Way:
        own = slice(self._rank * self._count, (self._rank + 1) * self._count)
        if self._job.what == "all_gather":
            return self._way(self._recv[own], self._recv, None)
        if self._job.what == "reduce_scatter":
            return self._way(self._send, self._send[own], self._job.quantization)
        return self._way(self._recv, self._recv, self._job.quantization)

    def _way(self, send: Array, recv: Array, quantization: QuantizationName | None) -> Way:
        one = np.zeros(1, np.float32)

        def meet() -> None:
            self._comm.all_reduce(one, op=ReduceOp.MAX)

        def reset() -> None:
            held = bits_of(recv)
            fill(recv, np.invert(held.view(np.uint8)).view(held.dtype))  # right in no element
            fill(send, self._content)

        arrays = (recv,) if self._job.what == "broadcast" else (send, recv)
        how: dict[str, Any] = {"tag": _TAG}
        if self._job.what in REDUCING:
            how |= {"op": self._job.op, "quantization": quantization}
        run = partial(getattr(self._comm, self._job.what), *arrays, **how)
        launch = partial(getattr(self._comm, f"{self._job.what}_async"), *arrays, **how)
        result = partial(bits_of, recv)
        return Way(meet, run, lambda: launch().wait()[2].tx_bytes, reset, result, quantization)

    def _pieces(self, whole: Way) -> Way:
        """The all-reduce as _PIECES smaller ones, all running at once."""
        bounds = [self._count * i // _PIECES for i in range(_PIECES + 1)]

        def run() -> int:
            handles = [
                self._comm.all_reduce_async(
                    self._send[begin:end],
                    self._recv[begin:end],
                    op=self._job.op,
                    tag=_TAG + i,
                    quantization=self._job.quantization,
                )
                for i, (begin, end) in enumerate(pairwise(bounds))
            ]
            ended = [handle.wait() for handle in handles]
            for handle in handles:
                if handle.error is not None:
                    raise handle.error
            return sum(info.tx_bytes for _, _, info in ended)

        return replace(whole, run=run, sent=run)

    def _tensors(self, whole: Way) -> Way:
        """The all-reduce as one list of tensors, with sizes in proportion to a GPT's."""
        ends = [self._count * end // sum(_ROWS) for end in accumulate(_ROWS, initial=0)]
        name = self._job.quantization
        quantization = None if name is None else QuantizationOptions.of(name)
        kind = pccl.ReduceOperandDescriptor(self._job.dtype)
        listed = []
        for i, (begin, end) in enumerate(pairwise(ends)):
            work = pccl.ReduceDescriptor(end - begin, self._job.op, _TAG + i, kind, quantization)
            arrays = self._send[begin:end], self._recv[begin:end]
            listed.append(pccl.ReduceOpDescriptor.from_torch(*arrays, work))

        def run() -> int:
            return self._comm.all_reduce_multiple_with_retry(listed).tx_bytes

        return replace(whole, run=run, sent=run)

    def _torch(self) -> Way:
        import torch
        import torch.distributed as dist

        send, recv = torch.as_tensor(self._send), torch.as_tensor(self._recv)
        one = torch.zeros(1, device=recv.device)
        op = getattr(
            dist.ReduceOp, "PRODUCT" if self._job.op is ReduceOp.PROD else self._job.op.name
        )
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(recv, op),
            "reduce_scatter": lambda: dist.reduce_scatter(recv, list(send.chunk(self._peers)), op),
            "all_gather": lambda: dist.all_gather(list(recv.chunk(self._peers)), send),
            "broadcast": lambda: dist.broadcast(recv, 0),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
        }

        def finished(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                call()
                finish(self._device)  # nccl's calls return when they are queued

            return run

        meet = finished(lambda: dist.all_reduce(one))
        run = finished(calls[self._job.what])
        return Way(meet, run, lambda: 0, lambda: None, partial(bits_of, self._recv))


_TORCH_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Measured:
    """One peer's measurement of one size."""

    times_s: dict[str, list[float]]  # seconds of each timed iteration, by way
    wrong: dict[str, int]  # wrong elements by way; empty when not checked
    sent: dict[str, int]  # bytes that the peer sends in a call, by way; none of torch's
    # voluntary context switches of the process in a call, by way; none of torch's, or on Windows
    switches: dict[str, float]


def serve(number: int, job: Job, address: str, store: str) -> Iterator[Measured]:
    """Yields the measurements of process `number` by size. torch's processes meet at `store`."""
    device = of_process(job.device, number)
    with ExitStack() as stack:
        if job.against in TORCH:
            import torch.distributed as dist

            dist.init_process_group(
                job.against,
                init_method=store,
                timeout=_TORCH_TIMEOUT,
                rank=number,
                world_size=job.peers,
            )
            stack.callback(dist.destroy_process_group)
        comm = stack.enter_context(join(address, job))
        for count in job.counts:
            yield measure(comm, job, count, device)


@contextmanager
def join(address: str, job: Job) -> Iterator[pccl.Communicator]:
    """A communicator of a run; waits until `job.peers` peers have joined."""
    with pccl.Communicator(address, p2p_connection_pool_size=job.lanes) as comm:
        comm.wait_for_peers(job.peers)
        yield comm


def measure(comm: pccl.Communicator, job: Job, count: int, device: str) -> Measured:
    """Measures one size."""
    trial = Trial(comm, job, count, device)
    found = trial.ways()

    def prepare(way: Way) -> None:
        way.meet()
        finish(device)

    turns = {name: (partial(prepare, way), way.run) for name, way in found.items()}
    times_s = in_turns(turns, job.iterations, job.warmups)
    ours = {name: way for name, way in found.items() if name not in TORCH}
    sent = {name: way.sent() for name, way in ours.items()}
    counted = {} if os.name == "nt" else ours
    switches = {name: _switches(way, job.iterations) for name, way in counted.items()}
    wrong = {name: trial.check(way) for name, way in ours.items()} if job.check else {}
    return Measured(times_s, wrong, sent, switches)


def _switches(way: Way, calls: int) -> float:
    """How often the threads of this process have to wait in a call, one call after the other."""
    import resource

    way.meet()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(calls):
        way.run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / calls
