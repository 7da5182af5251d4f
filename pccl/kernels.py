"""Kernels of the C core for training: arithmetic with the same bits on every machine.

Arrays are numpy arrays or torch tensors in host memory, dense and of the same shape. They are
float32 unless a function says otherwise. Quantized numbers (`data`) are uint8, `quantized_size` of
them. `out` is overwritten. Arrays may overlap only where a function says so. All functions raise
ValueError for other arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import xxhash

from pccl.ext import ffi, lib
from pccl.tensors import Array, Buffer
from pccl.types import DataType, DeviceType

if TYPE_CHECKING:
    from pccl.ext._core import CData


Format = Literal["int8", "int4", "e3m0", "2bit", "sparse"]  # see `quantize`
Wire = Literal["fp32", Format]  # the formats that DiLoCo and the hooks of DDP send

_SELF_TEST_BYTES = 1 << 21  # the results of the self-test take 1.5 MB


class _Codec(NamedTuple):
    """The functions of the C core for a format."""

    size: Callable[[int], int]  # of the data, from the count of the numbers
    encode: Callable[[CData, CData, int], object]  # (data, numbers, count)
    # (numbers, data, count); the result is true if the data is malformed
    decode: Callable[[CData, CData, int], object]
    add: Callable[[CData, CData, int], object]


def _block(format: int) -> _Codec:
    made = lib.pccl_quantized_size, lib.pccl_quantize, lib.pccl_dequantize, lib.pccl_dequantize_add
    return _Codec(*(partial(function, format, DataType.FLOAT.value) for function in made))


def _encoding(number: int) -> _Codec:
    size, encode = partial(lib.pccl_encoded_size, number), partial(lib.pccl_encode, number)
    decode, add = partial(lib.pccl_decode, number), partial(lib.pccl_decode_add, number)
    return _Codec(size, encode, decode, add)


_CODECS: dict[Format, _Codec] = {
    "int8": _block(lib.PCCL_BLOCK_8),
    "int4": _block(lib.PCCL_BLOCK_4),
    "e3m0": _encoding(lib.PCCL_E3M0),
    "2bit": _encoding(lib.PCCL_STAT2),
    "sparse": _encoding(lib.PCCL_SPARSE),
}


def subtract(out: Array, a: Array, b: Array) -> None:
    """out = a - b, rounded once for each element.

    `out` may be `a` or `b`.
    """
    result, first, second = _floats(written=[out], read=[a, b])
    _check_in_place(result, first, second)
    lib.pccl_subtract_f32(_pointer(result), _pointer(first), _pointer(second), result.count)


def add(out: Array, a: Array, b: Array, *, divisor: int = 1) -> None:
    """out = (a + b) / divisor, for arrays of any type; integers are rounded towards zero.

    `out` may be `a` or `b`; the divisor is at least 1.
    """
    result, first, second = _alike(written=[out], read=[a, b])
    _check_in_place(result, first, second)
    _check_divisor(divisor)
    how = result.dtype.value, lib.PCCL_AVG
    places = _bytes(result), _bytes(first), _bytes(second)
    lib.pccl_reduce(*how, *places, result.count, divisor)


def quantized_size(format: Format, count: int) -> int:
    """The number of bytes of `count` quantized float32 numbers, whatever their values."""
    return int(_CODECS[format].size(count))


def quantize(out: Array, values: Array, format: Format) -> None:
    """Quantizes numbers.

    A NaN or an infinity makes its whole block NaN; with "sparse" its 65,536 numbers.

    Args:
        out: the quantized numbers.
        values: the numbers.
        format: how they are quantized. "int8", "int4": codes of evenly spaced levels, with a scale
            for each block of 256 or 64 numbers (docs/internals/quantization.md). "e3m0": 4 bits, a
            sign and a power of two, with a scale for each block of 64. "2bit": codes of four levels
            that follow the statistics of each block of 1,024. "sparse": the 64 numbers with the
            largest magnitude of each run of 4,096, with 12 bits for the place and 2 for the level;
            the others decode to 0. A shorter run at the end keeps a 64th of its numbers, rounded
            up. Among equal magnitudes, the first ones are kept. c/pccl_core.h defines the bytes.
    """
    data, numbers = Buffer.of(out, writable=True), Buffer.of(values)
    _check_quantized(data, numbers, format)
    _CODECS[format].encode(_bytes(data), _pointer(numbers), numbers.count)


def dequantize(out: Array, data: Array, format: Format) -> None:
    """Decodes the output of `quantize`, to the same values on every machine.

    Also raises ValueError if, with "sparse", the places do not increase within each run; the
    content of `out` is then unspecified.
    """
    _read(out, data, format, _CODECS[format].decode)


def accumulate(out: Array, data: Array, format: Format) -> None:
    """Adds quantized numbers, as `dequantize` into another array and then `add` would.

    With "sparse", it changes only the numbers that were sent.
    """
    _read(out, data, format, _CODECS[format].add)


def _read(
    out: Array, data: Array, format: Format, how: Callable[[CData, CData, int], object]
) -> None:
    numbers, given = Buffer.of(out, writable=True), Buffer.of(data)
    _check_quantized(given, numbers, format)
    if how(_pointer(numbers), _bytes(given), numbers.count):
        raise ValueError(f"{given} are not bytes of numbers quantized as {format}")


def divide(out: Array, divisor: int) -> None:
    """Divides each number, rounded once; the divisor is at least 1."""
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
    """One step of SGD with momentum, like torch.optim.SGD with dampening 0.

    velocity = momentum * velocity + gradient, then theta = theta - lr * velocity; with Nesterov
    momentum theta = theta - lr * (gradient + momentum * velocity). Each operation is rounded.

    The parameters `theta` and the `velocity` are overwritten.
    """
    parameters, mean, given = _floats(written=[theta, velocity], read=[gradient])
    for one, other in ((parameters, mean), (parameters, given), (mean, given)):
        if one.overlaps(other):
            raise ValueError("the arrays overlap")
    places = _pointer(parameters), _pointer(mean), _pointer(given)
    lib.pccl_outer_sgd(*places, parameters.count, lr, momentum, int(nesterov))


@functools.cache
def arithmetic_digest() -> bytes:
    """Identifies this machine's arithmetic by XXH3-128 of the kernels' results for fixed inputs."""
    out = ffi.new_allocator(should_clear_after_alloc=False)("unsigned char[]", _SELF_TEST_BYTES)
    size = lib.pccl_self_test(out, _SELF_TEST_BYTES)
    assert size <= _SELF_TEST_BYTES
    return xxhash.xxh3_128_digest(ffi.buffer(out, size))


def _floats(written: Sequence[Array], read: Sequence[Array]) -> list[Buffer]:
    return _alike(written, read, DataType.FLOAT)


def _alike(
    written: Sequence[Array], read: Sequence[Array], dtype: DataType | None = None
) -> list[Buffer]:
    """The arrays' buffers; raises ValueError unless they match, and are `dtype` if it is given."""
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
            raise ValueError("the arrays overlap, but do not begin at the same address")


def _check_quantized(data: Buffer, numbers: Buffer, format: Format) -> None:
    for each, dtype in ((data, DataType.UINT8), (numbers, DataType.FLOAT)):
        if each.dtype is not dtype or each.device_type is not DeviceType.CPU:
            raise ValueError(f"{each} is not {dtype.common_name} in host memory")
    size = quantized_size(format, numbers.count)
    if data.count != size:
        raise ValueError(f"{numbers} takes {size} bytes as {format}, and {data} has another size")
    if data.overlaps(numbers):
        raise ValueError("the arrays overlap")


def _bytes(buffer: Buffer) -> CData:
    return ffi.cast("unsigned char *", buffer.address)


def _pointer(buffer: Buffer) -> CData:
    return ffi.cast("float *", buffer.address)
