"""Arithmetic whose bits are equal on every machine: what training may call of the C core.

Arrays are numpy arrays or torch tensors in host memory, dense and of the same shape; of float32
unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from pccl.ext import ffi, lib
from pccl.tensors.arrays import Array, Buffer
from pccl.types import DataType, DeviceType

if TYPE_CHECKING:
    from pccl.ext._core import CData


Format = Literal["int8", "int4", "e3m0", "2bit", "sparse"]  # of quantized numbers: see `quantize`
Wire = Literal["fp32", Format]  # what DiLoCo and the hooks of DDP send

_BLOCKS: dict[Format, int] = {"int8": lib.PCCL_BLOCK_8, "int4": lib.PCCL_BLOCK_4}
_PAYLOADS: dict[Format, str] = {"e3m0": "e3m0", "2bit": "stat2", "sparse": "sparse"}  # in C

_STRIP = 1 << 16  # numbers: whole blocks of every format, which stay in a core's own cache
_SELF_TEST_ROOM = 1 << 22  # bytes, for the 2.3 MB that the kernels compute of fixed inputs


def subtract(out: Array, a: Array, b: Array) -> None:
    """out = a - b, rounded once for each element.

    Args:
        out: is overwritten; it may be `a` or `b`, and must not overlap them otherwise.
        a: from which `b` is subtracted.
        b: what is subtracted.

    Raises:
        ValueError: the arrays are not float32 in host memory, differ in size or order, or overlap;
            or an array is not dense.
    """
    result, first, second = _floats(written=[out], read=[a, b])
    _check_in_place(result, first, second)
    lib.pccl_subtract_f32(_pointer(result), _pointer(first), _pointer(second), result.count)


def add(out: Array, a: Array, b: Array, *, divisor: int = 1) -> None:
    """out = (a + b) / divisor, for arrays of any one type; integers are rounded towards zero.

    Args:
        out: is overwritten; it may be `a` or `b`, and must not overlap them otherwise.
        a: a summand.
        b: the other one.
        divisor: by which the sum is divided, at least 1.

    Raises:
        ValueError: the arrays are not in host memory, differ in type, size or order, or overlap; or
            the divisor is not positive; or an array is not dense.
    """
    result, first, second = _alike(written=[out], read=[a, b])
    _check_in_place(result, first, second)
    _check_divisor(divisor)
    how = result.dtype.value, lib.PCCL_AVG
    places = _bytes(result), _bytes(first), _bytes(second)
    lib.pccl_reduce(*how, *places, result.count, divisor)


def quantized_size(format: Format, count: int) -> int:
    """The bytes of `count` quantized float32 numbers, which depend on nothing else."""
    if format in _PAYLOADS:
        return int(_of_payload(format, "size")(count))
    return int(lib.pccl_quantized_size(_BLOCKS[format], DataType.FLOAT.value, count))


def quantize(out: Array, values: Array, format: Format) -> None:
    """Writes the bytes of quantized numbers.

    A NaN or an infinity makes its block, or with "sparse" its 65,536 numbers, all NaN.

    Args:
        out: `quantized_size` elements of uint8, which are overwritten.
        values: float32 numbers.
        format: how they are quantized. "int8", "int4": codes of evenly spaced levels, in blocks of
            256 and 64 numbers with a scale each (docs/internals/quantization.md). "e3m0": 4 bits, a
            sign and a power of two, in blocks of 64 with a scale each. "2bit": codes of four levels
            that follow the statistics of each block of 1,024. "sparse": the 64 of largest magnitude
            of each 4,096 (of a shorter last run, a 64th, rounded up; of equal ones the first), with
            12 bits for the place and 2 for the level; the others are read as 0. c/pccl_core.h
            defines the bytes.

    Raises:
        ValueError: the arrays are not of these types or sizes in host memory, or overlap; or an
            array is not dense.
    """
    data, numbers = Buffer.of(out, writable=True), Buffer.of(values)
    _check_quantized(data, numbers, format)
    _writer(format)(_bytes(data), _pointer(numbers), numbers.count)


def quantize_with_feedback(out: Array, error: Array, values: Array, format: Format) -> None:
    """Quantizes numbers without the error of the last time, and writes that of this time.

    out = Q(values - error), then error = out - (values - error): the same as with `subtract`,
    `quantize` and `dequantize`, in a single pass over memory.

    Args:
        out: `quantized_size` elements of uint8, which are overwritten.
        error: what quantization has added to the numbers of the last time; it is overwritten.
        values: float32 numbers.
        format: how they are quantized.

    Raises:
        ValueError: as for `quantize`.
    """
    kept, numbers = _floats(written=[error], read=[values])
    data = Buffer.of(out, writable=True)
    for each in (kept, numbers):
        _check_quantized(data, each, format)
    if kept.overlaps(numbers):
        raise ValueError("the arrays overlap")
    to, corrected, given = _bytes(data), _pointer(kept), _pointer(numbers)
    read = ffi.new("float[]", min(_STRIP, numbers.count))
    encode, decode = _writer(format), _reader(format, "decode")
    for at, code, n in _strips(format, numbers.count):
        lib.pccl_subtract_f32(corrected + at, given + at, corrected + at, n)
        encode(to + code, corrected + at, n)
        decode(read, to + code, n)
        lib.pccl_subtract_f32(corrected + at, read, corrected + at, n)


def dequantize(out: Array, data: Array, format: Format) -> None:
    """Reads quantized numbers: the same values on every machine.

    Args:
        out: float32 numbers, which are overwritten.
        data: what `quantize` has written of so many numbers.
        format: how they are quantized.

    Raises:
        ValueError: the arrays are not of these types or sizes in host memory, or overlap; or with
            "sparse", the places do not increase within each run: `out` then holds anything; or an
            array is not dense.
    """
    _read(out, data, format, "decode")


def _read(out: Array, data: Array, format: Format, how: Literal["decode", "add"]) -> None:
    numbers, given = Buffer.of(out, writable=True), Buffer.of(data)
    _check_quantized(given, numbers, format)
    if _reader(format, how)(_pointer(numbers), _bytes(given), numbers.count):
        raise _malformed(given, format)


def accumulate(out: Array, data: Array, format: Format) -> None:
    """Adds quantized numbers: the same as `dequantize` into another array, and `add`.

    Of "sparse" only the numbers that were sent are touched.

    Args:
        out: float32 numbers, to which what `data` stands for is added.
        data: what `quantize` has written of so many numbers.
        format: how they are quantized.

    Raises:
        ValueError: as for `dequantize`.
    """
    _read(out, data, format, "add")


def mean(out: Array, payloads: Sequence[Array], format: Format) -> None:
    """The mean of several quantized arrays, summed in their order.

    The same as `dequantize` of the first, `accumulate` of the others, and `divide`, in a single
    pass over memory.

    Args:
        out: float32 numbers, which are overwritten.
        payloads: what `quantize` has written of so many numbers; at least one.
        format: how they are quantized.

    Raises:
        ValueError: as for `dequantize`.
    """
    numbers, rows = Buffer.of(out, writable=True), [Buffer.of(each) for each in payloads]
    _check_divisor(len(rows))
    for row in rows:
        _check_quantized(row, numbers, format)
    decode, add, to = _reader(format, "decode"), _reader(format, "add"), _pointer(numbers)
    for at, code, n in _strips(format, numbers.count):
        for read, row in zip((decode, *[add] * (len(rows) - 1)), rows, strict=True):
            if read(to + at, _bytes(row) + code, n):
                raise _malformed(row, format)
        lib.pccl_divide_f32(to + at, n, len(rows))


def divide(out: Array, divisor: int) -> None:
    """Divides each number, rounded once.

    Args:
        out: float32 numbers.
        divisor: at least 1.

    Raises:
        ValueError: the array is not of float32 in host memory, or the divisor is not positive; or
            the array is not dense.
    """
    (numbers,) = _floats(written=[out], read=[])
    _check_divisor(divisor)
    lib.pccl_divide_f32(_pointer(numbers), numbers.count, divisor)


def outer_sgd(
    theta: Array,
    velocity: Array,
    gradient: Array,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of SGD with momentum, as torch.optim.SGD takes it with dampening 0.

    velocity = momentum * velocity + gradient, then theta = theta - lr * velocity; with Nesterov
    momentum theta = theta - lr * (gradient + momentum * velocity). Each operation is rounded.

    Args:
        theta: the parameters; they are overwritten.
        velocity: the momentum buffer; it is overwritten.
        gradient: is only read.
        lr: the learning rate.
        momentum: the factor of the velocity.
        nesterov: whether the momentum is Nesterov's.

    Raises:
        ValueError: the arrays are not float32 in host memory, differ in size or order, or overlap;
            or an array is not dense.
    """
    parameters, mean, given = _floats(written=[theta, velocity], read=[gradient])
    for one, other in ((parameters, mean), (parameters, given), (mean, given)):
        if one.overlaps(other):
            raise ValueError("the arrays overlap")
    lib.pccl_outer_sgd(
        _pointer(parameters),
        _pointer(mean),
        _pointer(given),
        parameters.count,
        lr,
        momentum,
        int(nesterov),
    )


def arithmetic_digest() -> bytes:
    """Names this machine's arithmetic: XXH3-128 of what the kernels compute of fixed inputs."""
    out = ffi.new_allocator(should_clear_after_alloc=False)("unsigned char[]", _SELF_TEST_ROOM)
    size = lib.pccl_self_test(out, _SELF_TEST_ROOM)
    assert size <= _SELF_TEST_ROOM
    return xxhash.xxh3_128_digest(ffi.buffer(out, size))


def _floats(written: Sequence[Array], read: Sequence[Array]) -> list[Buffer]:
    return _alike(written, read, DataType.FLOAT)


def _alike(
    written: Sequence[Array], read: Sequence[Array], dtype: DataType | None = None
) -> list[Buffer]:
    """The arrays, if they are of one size and type: of `dtype`, or that of the first one."""
    buffers = [
        *(Buffer.of(array, writable=True) for array in written),
        *(Buffer.of(array) for array in read),
    ]
    first = buffers[0]
    dtype = dtype or first.dtype
    for each in buffers:
        if each.dtype is not dtype or each.device_type is not DeviceType.CPU:
            raise ValueError(f"{each} is not {dtype.common_name} in host memory")
        if (each.count, each.layout) != (first.count, first.layout):
            raise ValueError(f"{each} and {first} differ in size or in the order of elements")
    return buffers


def _check_divisor(divisor: int) -> None:
    if not 1 <= divisor < 1 << 32:
        raise ValueError(f"divisor is {divisor}: it must be at least 1, and below 2**32")


def _check_in_place(result: Buffer, *read: Buffer) -> None:
    for one in read:
        if one.overlaps(result) and one.address != result.address:
            raise ValueError("the arrays overlap, and do not begin at the same address")


def _check_quantized(data: Buffer, numbers: Buffer, format: Format) -> None:
    for each, dtype in ((data, DataType.UINT8), (numbers, DataType.FLOAT)):
        if each.dtype is not dtype or each.device_type is not DeviceType.CPU:
            raise ValueError(f"{each} is not {dtype.common_name} in host memory")
    size = quantized_size(format, numbers.count)
    if data.count != size:
        raise ValueError(f"{numbers} takes {size} bytes as {format}, and {data} has others")
    if data.overlaps(numbers):
        raise ValueError("the arrays overlap")


def _malformed(data: Buffer, format: Format) -> ValueError:
    return ValueError(f"{data} are not bytes of numbers quantized as {format}")


def _strips(format: Format, count: int) -> Iterator[tuple[int, int, int]]:
    """Parts of an array: the place of each, that of its bytes, and its numbers."""
    size = quantized_size(format, _STRIP)
    for number, at in enumerate(range(0, count, _STRIP)):
        yield at, number * size, min(_STRIP, count - at)


def _writer(format: Format) -> Callable[[CData, CData, int], object]:
    """Encodes: (data, numbers, how many)."""
    if format in _PAYLOADS:
        return partial(_of_payload(format, "encode"))
    return partial(lib.pccl_quantize, _BLOCKS[format], DataType.FLOAT.value)


def _reader(format: Format, how: Literal["decode", "add"]) -> Callable[[CData, CData, int], object]:
    """Decodes, or adds: (numbers, data, how many); its result is true if the data is invalid."""
    if format in _PAYLOADS:
        return partial(_of_payload(format, how))
    read = lib.pccl_dequantize if how == "decode" else lib.pccl_dequantize_add
    return partial(read, _BLOCKS[format], DataType.FLOAT.value)


def _of_payload(format: Format, what: str) -> Any:
    """A function of the C core for a format of whole arrays."""
    return getattr(lib, f"pccl_{_PAYLOADS[format]}_{what}")


def _bytes(buffer: Buffer) -> CData:
    return ffi.cast("unsigned char *", buffer.address)


def _pointer(buffer: Buffer) -> CData:
    return ffi.cast("float *", buffer.address)
