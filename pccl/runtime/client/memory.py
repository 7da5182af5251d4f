"""The memory of calls: arrays, their formats on the wire, pieces, and copies of device memory.

The engine uses host memory only. Device memory is copied to the host before use, and changed
content is copied back afterwards. The host memory is pinned, so that the device can read and write
it directly. Shared state is copied as a whole (`HostView`), the arrays of collectives by `Copies`.

A large all-reduce is progressive. It starts when the first step of the contribution is on the host.
The engine learns of each further step (`PeerClient.ready`), and reports each step of the result
(`written`), which is copied to the device at once. The arrays of other collectives are read as a
whole before the collective starts, and written when it has succeeded.

A collective may be aborted after steps of its result were written. If it was in place, the engine
restores the host's copy, and a thread copies this back to the device when the call ends, even if no
caller awaits the call.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from pccl import cuda
from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.protocol.messages import Spec
from pccl.protocol.peer import effects
from pccl.protocol.peer.calls import NO_ROWS, Rows
from pccl.protocol.ring import ALIGNMENT, span
from pccl.protocol.tuning import Algorithm, Conditions, Tuning
from pccl.runtime.client.call import Call, End, Leaf
from pccl.runtime.signals import Latch, insist
from pccl.tensors import Buffer
from pccl.types import DataType, DeviceType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

if TYPE_CHECKING:
    import numpy as np


Pieces = list[tuple[int, int, int]]  # (piece number, address, bytes)


class Operand(Struct, frozen=True):
    """One array of a collective: its input, its output, and the elements of one slice or row.

    `error` receives the part of the sum that quantizing has lost.
    """

    send: Buffer
    recv: Buffer
    count: int
    error: Buffer | None = None


class Wide:
    """An average of integers: the engine sums up copies of the arrays in a wider type."""

    def __init__(self, each: tuple[Operand, ...]) -> None:
        from pccl.runtime import averages  # imports numpy

        # whether the engine has got the copies; arrays that travel with the votes need none
        self.is_used = False
        # for each array: the addresses of its copies (to send and to receive), the number of
        # elements, and the engine's number for their type; None: the array needs no copy
        self.parts: list[tuple[int, int, int, int] | None] = []
        self._arrays: list[tuple[Operand, np.ndarray, np.ndarray]] = []
        for given in each:
            if not given.send.dtype.is_integer:
                self.parts.append(None)
                continue
            send = recv = averages.widen(averages.array_of(given.send))
            if given.recv.count != given.send.count:
                recv = averages.empty(given.recv.count, send.dtype)
            code = averages.code_of(send.dtype)
            self.parts.append((send.ctypes.data, recv.ctypes.data, given.count, code))
            self._arrays.append((given, send, recv))

    def narrow(self, members: int) -> None:
        from pccl.runtime import averages  # imports numpy

        for given, _, total in self._arrays if self.is_used else ():
            if given.recv.count:
                target = averages.array_of(given.recv)
                target[:] = averages.narrow(total, members, target.dtype)


def nothing() -> None:
    """The result of a collective without a result for its caller."""


@dataclass(slots=True)  # not frozen: that takes longer, in each call
class Operands:
    """The arrays of a collective; keeps them alive until the engine has released them.

    `result` returns the arrays that hold the result, as the caller knows them.
    In an exchange, each array has `send_rows` for each rank, and receives `recv_rows` from each
    rank; empty: none. `uneven`: other peers cannot know these numbers.
    `pair`: the peers of a send, the sender first.
    If the memory is filled and read while the collective runs (c/pccl_core.h, PROGRESSIVE
    COLLECTIVES), `step` is the number of offsets in a step; the control thread calls `written` for
    each step that holds the result. `wide`: for an average of integers.
    """

    work: m.Spec
    each: tuple[Operand, ...]
    send_rows: tuple[int, ...] = ()
    recv_rows: tuple[int, ...] = ()
    uneven: bool = False
    pair: tuple[int, ...] = ()
    step: int = 0
    written: Callable[[int], None] | None = None
    wide: Wide | None = None
    result: Callable[[], Any] = nothing

    @property
    def rows(self) -> Rows:
        """The rows, if the other peers cannot know them; otherwise NO_ROWS."""
        return (self.send_rows, self.recv_rows) if self.uneven else NO_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes that are reduced, or gathered, as they go over the wire."""
        sent = received = 0
        if not self.work.algorithm:
            for each in self.each:
                sent += each.send.count * each.send.dtype.itemsize
                received += each.recv.count * each.recv.dtype.itemsize
            return max(sent, received)
        for each in self.each:
            sent += wire_bytes(self.work, each.send.dtype, each.send.count)
            received += wire_bytes(self.work, each.recv.dtype, each.recv.count)
        return max(sent, received)

    def contribution(self) -> memoryview | bytes:
        """The memory of this peer's array (there is at most one), to be sent with its vote."""
        if not self.each or not self.each[0].send.count:
            return b""
        send = self.each[0].send
        return memoryview(ffi.buffer(ffi.cast("char *", send.address), send.nbytes))

    def store(self, data: m.Data) -> None:
        """Stores a result that came with the votes."""
        for operand in self.each:
            assert len(data) == operand.recv.nbytes
            ffi.memmove(ffi.cast("char *", operand.recv.address), data, len(data))


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory of a serve or fetch op, kept alive by `owner`.

    Pieces with numbers below `first_counted` are not payload. `reader` is called with each arrived
    leaf of a fetch. A serve op sends at most `limit` bytes until `allow` permits more; 0: no limit.
    """

    pieces: Pieces
    first_counted: int
    owner: object
    reader: Callable[[Leaf], object] | None = None
    limit: int = 0


class HostMemory(Protocol):
    """Host memory for a device's copies; freed with this object."""

    def data_ptr(self) -> int: ...


class Mark(Protocol):
    """A copy that has begun; `synchronize` returns when it is complete."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """The bytes begin <= i < end of a buffer on a device, and of its copy on the host."""

    buffer: Buffer
    host: HostMemory
    begin: int
    end: int


class Pipe(Protocol):
    """Makes copies in both directions at the same time; in each direction, one after the other."""

    def read(self, stretch: Stretch) -> Mark:
        """Begins to copy from the device."""

    def write(self, stretch: Stretch) -> Mark:
        """Begins to copy to the device."""


class Device(Protocol):
    """One kind of device."""

    def pipe(self, buffers: Sequence[Buffer], drained: bool = False) -> Pipe:
        """A pipe for copies of these buffers.

        The copies come after all work that this thread (if `drained`, any thread) has queued for
        the device so far, and do not depend on what it queues later.
        """

    def allocate(self, nbytes: int) -> HostMemory: ...


class HostView:
    """Buffers as host memory: those on a device as copies, the others as they are.

    Attributes:
        buffers: in host memory.

    Raises UnsupportedError: a buffer is on a device that does not exist.
    """

    def __init__(self, buffers: Sequence[Buffer], unread: Container[int] = ()) -> None:
        away = {index: buffer for index, buffer in enumerate(buffers) if _is_away(buffer)}
        self._copies: dict[int, Stretch] = {}
        self.buffers = list(buffers)
        if away:
            device = cuda.device()
            self._pipe = device.pipe([*away.values()], drained=True)
            for index, buffer in away.items():
                self._copies[index] = twin = _twin(buffer, device)
                self.buffers[index] = _moved(buffer, twin)
            _wait([self._pipe.read(one) for i, one in self._copies.items() if i not in unread])

    def copied(self, index: int) -> bool:
        return index in self._copies

    def write_back(self, changed: Iterable[int]) -> None:
        _wait([self._pipe.write(self._copies[i]) for i in changed if i in self._copies])


def _is_away(buffer: Buffer) -> bool:
    return buffer.device_type is not DeviceType.CPU and buffer.nbytes > 0


def _twin(buffer: Buffer, device: Device) -> Stretch:
    """All of a buffer on a device, with new memory on the host."""
    return Stretch(buffer, device.allocate(buffer.nbytes), 0, buffer.nbytes)


def _wait(marks: Iterable[Mark]) -> None:
    """Waits for all copies, even if one fails; then raises the first error."""
    failed: Exception | None = None
    for mark in marks:
        try:
            mark.synchronize()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


class CopyingClient(Protocol):
    """The part of the client that copies use."""

    def ready(self, call: Call, offset: int, length: int) -> None:
        """Says that the contribution is on the host between these offsets."""

    def time_out(self, call: Call, why: str) -> None:
        """Withdraws a call."""

    def on_end(self, call: Call, callback: Callable[[End], None]) -> None:
        """Calls `callback` when a call has ended."""


@dataclass(slots=True)
class Step:
    """The copies of a step: reads before its offsets are sent, writes once they are final."""

    begin: int
    end: int
    reads: list[Stretch] = field(default_factory=list)
    writes: list[Stretch] = field(default_factory=list)


class Copies:
    """The copies of one collective: `begin`, launch the call, `go_on`; `settle` after its end."""

    def __init__(
        self,
        pipe: Pipe,  # makes the copies
        steps: Sequence[Step],  # what is copied, by the engine's number of the step
        order: Iterable[int],  # the numbers of the steps, in the order in which they are read
        # whether the engine learns of each step read, and reports each step written; otherwise
        # there is a single step
        progressive: bool,
        in_place: bool,  # whether results overwrite contributions before the call has succeeded
    ) -> None:
        # the sums that give the host's result before it is copied; None: the engine has written the
        # result itself
        self.wide: Wide | None = None
        self._pipe, self._steps = pipe, steps
        self._progressive, self._in_place = progressive, in_place
        self._notes: queue.SimpleQueue[int | End] = queue.SimpleQueue()
        self._written: set[int] = set()
        self._writes: list[Mark] = []
        self._claim, self._settled = threading.Lock(), Latch()
        self._failed: Exception | None = None
        self._order, self._reads = tuple(order), dict[int, list[Mark]]()

    @property
    def are_settled(self) -> bool:
        return self._settled.is_set

    def written(self, step: int) -> None:
        self._notes.put(step)

    def begin(self) -> None:
        """Begins to read; returns when the first step is on the host."""
        for number in self._order:
            self._reads[number] = [self._pipe.read(each) for each in self._steps[number].reads]
        _wait(self._reads[self._order[0]])

    def go_on(self, client: CopyingClient, call: Call) -> None:
        """Copies the rest in a thread, until the launched call has ended."""
        work = threading.Thread(target=self._run, args=(client, call), name="pccl-copies")
        work.daemon = True
        client.on_end(call, self._notes.put)
        work.start()

    def settle(self) -> None:
        """Returns when the device has its final content; the call has ended.

        Raises Exception: the device could not copy.
        """

        def wait() -> None:
            self._settled.wait()

        insist(wait)
        if self._failed is not None:
            raise self._failed

    def cancel(self) -> None:
        """Cancels the copies after an exception, which may come at any moment."""
        if self._claim.acquire(blocking=False):  # the thread has not begun, and will do nothing
            _wait(itertools.chain(*self._reads.values()))
        else:
            self._settled.wait()

    def _run(self, client: CopyingClient, call: Call) -> None:
        if not self._claim.acquire(blocking=False):
            return
        reader = threading.Thread(target=self._read, args=(client, call), name="pccl-read")
        reader.daemon = True
        try:
            reader.start()
        except RuntimeError:  # no thread can be started: first read, then write
            self._read(client, call)
        end = self._write_what_is_told()
        if reader.ident is not None:
            reader.join()
        try:
            self._conclude(end)
        except Exception as error:
            self._failed = self._failed or error
        finally:
            self._settled.set()

    def _read(self, client: CopyingClient, call: Call) -> None:
        """Tells the engine of each step that has been read."""
        try:
            for number, marks in self._reads.items():
                _wait(marks)
                if self._progressive:
                    step = self._steps[number]
                    client.ready(call, step.begin, step.end - step.begin)
        except Exception as error:
            self._failed = error
            client.time_out(call, f"its arrays cannot be copied from the device: {error}")

    def _write_what_is_told(self) -> End:
        """Begins to write each step that the engine reports, until the call has ended."""
        while isinstance(note := self._notes.get(), int):
            try:
                self._write(note)
            except Exception as error:
                self._failed = self._failed or error
        return note

    def _write(self, number: int) -> None:
        self._written.add(number)
        self._writes += map(self._pipe.write, self._steps[number].writes)

    def _conclude(self, end: End) -> None:
        """Writes the rest of the result, or after a failure the restored contribution."""
        if isinstance(end, effects.Answer):
            if self.wide is not None:
                assert isinstance(end.value, effects.Reduced)
                self.wide.narrow(end.value.world_size)
            left = set(range(len(self._steps))) - self._written
        else:
            left = set(self._written) if self._in_place else set()
        for number in sorted(left):
            self._write(number)
        _wait(self._writes)


def on_host(
    work: Operands, tuning: Tuning, conditions: Conditions
) -> tuple[Operands, Copies | None]:
    """Moves a collective's operands to host memory, and returns them with the copies to make.

    The copies are None if all arrays are already in host memory. The tuning determines the order of
    the chunks. Raises UnsupportedError: an array is on a device that does not exist.
    """
    for operand in work.each:
        if DeviceType.CUDA in (operand.send.device_type, operand.recv.device_type):
            break
    else:
        return work, None
    device = cuda.device()
    twins = _Twins(device)
    each = tuple(map(twins.of, work.each))
    in_place = any(operand.send.address == operand.recv.address for operand in each)
    pipe = device.pipe([one.buffer for one in (*twins.read, *twins.written)])
    if not tuning.step:
        whole = Step(0, 0, twins.read, twins.written)
        return replace(work, each=each), Copies(pipe, [whole], [0], False, in_place)
    steps = _steps(work, tuning.step, twins.pairs)
    copies = Copies(pipe, steps, _order(tuning, conditions), True, in_place)
    return replace(work, each=each, step=tuning.step, written=copies.written), copies


class _Twins:
    """The host's copies of buffers on devices; two buffers that overlap share one copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.read: list[Stretch] = []  # the buffers to read, as a whole, before the collective
        self.written: list[Stretch] = []  # the buffers to write after it
        # for each operand, what is to be read and what is to be written
        self.pairs: list[tuple[Stretch | None, Stretch | None]] = []

    def of(self, operand: Operand) -> Operand:
        """The operand over host memory."""
        send, recv = operand.send, operand.recv
        if send.address == recv.address or send.overlaps(recv):
            larger = self._twin(max(send, recv, key=lambda buffer: buffer.nbytes))
            twins = larger, larger
        else:
            twins = self._twin(send), self._twin(recv)
        self.pairs.append(twins)
        for found, where in zip(twins, (self.read, self.written), strict=True):
            if found is not None:
                where.append(found)
        sent, received = _moved(send, twins[0]), _moved(recv, twins[1])
        return Operand(sent, received, operand.count, operand.error)

    def _twin(self, buffer: Buffer) -> Stretch | None:
        return _twin(buffer, self._device) if _is_away(buffer) else None


def _moved(buffer: Buffer, twin: Stretch | None) -> Buffer:
    if twin is None:
        return replace(buffer, device_type=DeviceType.CPU)
    address = twin.host.data_ptr() + buffer.address - twin.buffer.address
    owner = twin.host, buffer.owner
    return replace(buffer, address=address, owner=owner, device_type=DeviceType.CPU)


def _steps(
    work: Operands, size: int, pairs: Iterable[tuple[Stretch | None, Stretch | None]]
) -> list[Step]:
    """The steps of an all-reduce, with the reads and writes of each operand."""
    end = span(work.work)
    steps = [Step(at, min(at + size, end)) for at in range(0, end, size)]
    begin = 0  # the first offset of the operand
    for operand, (read, written) in zip(work.each, pairs, strict=True):
        for step in steps[begin // size : -(-(begin + operand.count) // size)]:
            first, last = max(step.begin - begin, 0), min(step.end - begin, operand.count)
            item = operand.send.dtype.itemsize
            if read is not None:
                step.reads.append(replace(read, begin=first * item, end=last * item))
            if written is not None:
                step.writes.append(replace(written, begin=first * item, end=last * item))
        begin += -(-operand.count // ALIGNMENT) * ALIGNMENT
    return steps


def _order(tuning: Tuning, conditions: Conditions) -> Iterable[int]:
    """The steps in the order in which this peer is likely to need them.

    The peer sends the first segment; the others follow in the order of their arrival
    (c/pccl_core.h, THE RING).
    """
    order = conditions.rings[0].order if conditions.rings else ()
    members, position = 1, 0
    if conditions.number in order and tuning.algorithm is not Algorithm.ONE_SHOT:
        members, position = len(order), order.index(conditions.number)
    end, size, steps = span(tuning.spec), tuning.step, dict[int, None]()
    for segment in (each % members for each in range(position, position - members, -1)):
        first, last = end * segment // members, end * (segment + 1) // members
        steps |= dict.fromkeys(range(first // size, -(-last // size)))
    return steps


# ---- quantized formats of the C core ----

_BY_BITS = {
    QuantizationAlgorithm.MIN_MAX: {8: lib.PCCL_MIN_MAX_8, 16: lib.PCCL_MIN_MAX_16},
    QuantizationAlgorithm.ZERO_POINT_SCALE: {8: lib.PCCL_ZERO_POINT_8, 16: lib.PCCL_ZERO_POINT_16},
}
_BLOCKWISE = {
    QuantizationAlgorithm.BLOCKWISE_INT8: lib.PCCL_BLOCK_8,
    QuantizationAlgorithm.BLOCKWISE_INT4: lib.PCCL_BLOCK_4,
}
_SOURCES = {DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE}
_TARGETS = {DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16}


def fingerprint(
    options: QuantizationOptions | None, dtype: DataType, op: ReduceOp
) -> tuple[int, int]:
    """`Spec.algorithm` and `Spec.quantized` of a collective of `dtype` elements.

    Raises ValueError: it cannot be quantized like this; the text says why.
    """
    if options is None or options.algorithm is QuantizationAlgorithm.NONE:
        return 0, 0
    if dtype not in _SOURCES:
        raise ValueError(f"elements of {dtype.name} cannot be quantized: only floats can")
    if op is ReduceOp.PROD:
        raise ValueError(
            "PROD cannot be quantized, because the error of one factor is multiplied by the "
            "others: only SUM, AVG, MAX and MIN can"
        )
    if options.algorithm in _BLOCKWISE:
        return options.algorithm.value, 0
    if options.quantized_datatype not in _TARGETS:
        raise ValueError(
            f"{options.algorithm.name} cannot quantize to {options.quantized_datatype.name}: "
            "only to UINT8, INT8, UINT16 and INT16"
        )
    return options.algorithm.value, options.quantized_datatype.value


def wire_format(work: Spec) -> int:
    """The pccl_format of a collective; 0 if it is not quantized."""
    algorithm = QuantizationAlgorithm(work.algorithm)
    if algorithm in _BY_BITS:
        return int(_BY_BITS[algorithm][8 * DataType(work.quantized).itemsize])
    return int(_BLOCKWISE.get(algorithm, lib.PCCL_UNQUANTIZED))


def wire_bytes(work: Spec, dtype: DataType, count: int) -> int:
    if not work.algorithm:
        return count * dtype.itemsize
    return int(lib.pccl_quantized_size(wire_format(work), dtype.value, count))
