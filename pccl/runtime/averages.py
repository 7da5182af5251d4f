"""Averages of integers: sums in wider types, which do not wrap, divided at the end.

Integers of 8 and 16 bits are summed in int32, those of 32 bits in int64, and those of 64 bits in
128 bits (`HALVES`). So sums over fewer than 2^15 members are exact, and groups are smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pccl.ext import ffi
from pccl.tensors import Buffer
from pccl.types import DataType

HALVES = np.dtype([("lower", np.uint64), ("upper", np.int64)])  # PCCL_I128 of c/pccl_core.h
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def widen(given: np.ndarray) -> np.ndarray:
    """The integers in a type that is wide enough for their sums."""
    if given.itemsize < 8:
        return given.astype(np.int32 if given.itemsize < 4 else np.int64)
    halves = np.empty(given.size, HALVES)
    halves["lower"] = given.view(np.uint64)
    halves["upper"] = -(given < 0).astype(np.int64)
    return halves


def code_of(dtype: np.dtype) -> int:
    """The engine's number for a type that `widen` returns."""
    return DataType.DOUBLE.value + 1 if dtype == HALVES else DataType.from_numpy_dtype(dtype).value


def empty(count: int, dtype: np.dtype) -> np.ndarray:
    return np.empty(count, dtype)


def narrow(total: np.ndarray, members: int, dtype: np.dtype) -> np.ndarray:
    if total.dtype != HALVES:
        return _divided(total, members, total < 0).astype(dtype)
    lower, negative = total["lower"], total["upper"] < 0
    # Long division, 32 bits at a time: the first quotient is the upper half of the mean.
    over = (total["upper"] << 32) + (lower >> _HALF).astype(np.int64)
    upper, rest = np.divmod(over, members)
    mean = _divided((rest << 32) + (lower & _LOW).astype(np.int64), members, negative)
    return ((upper.astype(np.uint64) << _HALF) + mean.astype(np.uint64)).view(dtype)


def _divided(total: np.ndarray, members: int, negative: np.ndarray) -> np.ndarray:
    mean, rest = np.divmod(total, members)  # rounded down
    mean += negative & (rest != 0)
    return mean


def average(parts: Sequence[bytes | memoryview], dtype: DataType) -> bytes:
    kind = dtype.to_numpy_dtype()
    arrays = [np.frombuffer(part, kind) for part in parts]
    if kind.itemsize < 8:
        total = np.sum([widen(array) for array in arrays], axis=0)
    else:
        total = np.zeros(arrays[0].size, HALVES)
        for array in arrays:
            lower = total["lower"] + array.view(np.uint64)
            total["upper"] += (lower < total["lower"]).astype(np.int64) - (array < 0)
            total["lower"] = lower
    return narrow(total, len(parts), kind).tobytes()


def array_of(buffer: Buffer) -> np.ndarray:
    """The elements of a buffer in host memory, in memory order."""
    memory = ffi.buffer(ffi.cast("char *", buffer.address), buffer.nbytes)
    return np.frombuffer(memory, buffer.dtype.to_numpy_dtype())
