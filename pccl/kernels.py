"""Arithmetic whose bits are equal on every machine: what training may call of the C core.

Arrays are numpy arrays or torch tensors of float32 in host memory, dense and of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from pccl.ext import ffi, lib
from pccl.tensors.arrays import Array, Buffer
from pccl.types import DataType, DeviceType

if TYPE_CHECKING:
    from pccl.ext._core import CData


def subtract(out: Array, a: Array, b: Array) -> None:
    """out = a - b, rounded once for each element.

    Args:
        out: is overwritten; it may be `a` or `b`, and must not overlap them otherwise.
        a: from which `b` is subtracted.
        b: what is subtracted.

    Raises:
        ValueError: the arrays are not float32 in host memory, differ in size or order, or overlap.
        AssertionError: an array is not dense.
    """
    result, first, second = _floats(written=[out], read=[a, b])
    for one in (first, second):
        if one.overlaps(result) and one.address != result.address:
            raise ValueError("the arrays overlap, and do not begin at the same address")
    lib.pccl_subtract_f32(_pointer(result), _pointer(first), _pointer(second), result.count)


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
        ValueError: the arrays are not float32 in host memory, differ in size or order, or overlap.
        AssertionError: an array is not dense.
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
    size = lib.pccl_self_test(ffi.NULL, 0)
    out = ffi.new("unsigned char[]", size)
    lib.pccl_self_test(out, size)
    return xxhash.xxh3_128_digest(ffi.buffer(out))


def _floats(written: Sequence[Array], read: Sequence[Array]) -> list[Buffer]:
    buffers = [
        *(Buffer.of(array, writable=True) for array in written),
        *(Buffer.of(array) for array in read),
    ]
    for each in buffers:
        if each.dtype is not DataType.FLOAT or each.device_type is not DeviceType.CPU:
            raise ValueError(f"{each} is not float32 in host memory")
        if (each.count, each.layout) != (buffers[0].count, buffers[0].layout):
            raise ValueError(f"{each} and {buffers[0]} differ in size or in the order of elements")
    return buffers


def _pointer(buffer: Buffer) -> CData:
    return ffi.cast("float *", buffer.address)
