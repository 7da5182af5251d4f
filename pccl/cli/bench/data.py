"""Test data whose reduction is exactly predictable, in any order of the peers.

Each peer's contribution repeats a table of small whole numbers, so every partial result is exact in
every element type. The length of the table is a prime, so a chunk in the wrong place is detected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.tensors.arrays import Array
from pccl.types import DataType, ReduceOp

PERIOD = 8191
VALUE_MAX = 15  # of what a peer brings to a sum
PEERS_MAX = 16  # sums of so many values below 16 are exact in bfloat16

Bits = NDArray[Any]  # elements as numpy knows them; bfloat16 as the upper halves of float32


def contribution(dtype: DataType, op: ReduceOp, number: int) -> Bits:
    """What peer `number` brings: PERIOD elements."""
    table = np.random.default_rng(number)
    low, high = (1, 3) if op is ReduceOp.PROD else (0, VALUE_MAX + 1)
    return _store(table.integers(low, high, PERIOD).astype(np.float32), dtype)


def expected(dtype: DataType, op: ReduceOp, peers: int) -> Bits:
    """What all peers get: PERIOD elements."""
    exact = DataType.FLOAT if dtype is DataType.BFLOAT16 else dtype
    inputs = [contribution(exact, op, number) for number in range(peers)]
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
    """`count` elements that repeat the table."""
    return np.resize(table, count)


def as_array(bits: Bits, dtype: DataType) -> Array:
    """The same memory as an argument of collectives; bfloat16 is torch's, since numpy has none."""
    if dtype is not DataType.BFLOAT16:
        return bits
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def count_wrong(bits: Bits, table: Bits) -> int:
    """Elements that differ from the repeated table."""
    whole = bits.size // PERIOD * PERIOD
    body, rest = bits[:whole].reshape(-1, PERIOD), bits[whole:]
    return int(np.count_nonzero(body != table) + np.count_nonzero(rest != table[: rest.size]))


def error_max(dtype: DataType, op: ReduceOp, peers: int, quantization: str) -> float:
    """How far a quantized sum or mean may be from `expected`.

    Half a step for each of the `peers` times that it is quantized; a step is at most the largest
    magnitude there, over the codes on one side of zero. As much again for rounding in `dtype`.
    """
    codes = 7 if quantization == "int4" else 127
    largest = [VALUE_MAX * contributors for contributors in range(1, peers + 1)]
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
