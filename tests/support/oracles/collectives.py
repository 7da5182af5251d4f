"""The expected results of collectives, computed in numpy, bit for bit.

Element types go by numpy's names; "bfloat16" is carried in uint16 arrays of bit patterns. A float
result that is a NaN is the one positive quiet NaN, as the kernels store it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
OPS = ("sum", "avg", "prod", "max", "min")  # in the order of pccl.ReduceOp
DTYPES = (  # in the order of pccl.DataType
    "uint8",
    "int8",
    "int16",
    "uint16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
INTEGERS = DTYPES[:8]
FLOATS = DTYPES[8:]


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that carries elements of a type."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def draw(dtype: str, count: int, seed: int) -> Array:
    """Random elements of a type."""
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        return encode(
            rng.standard_normal(count).astype(np.float64 if dtype == "float64" else np.float32),
            dtype,
        )
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, count, dtype, endpoint=True)


def decode(array: Array, dtype: str) -> Array:
    """The values of elements: float64 for float64, float32 for the other floats."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array if dtype == "float64" else array.astype(np.float32)


def encode(values: Array, dtype: str) -> Array:
    """The elements nearest to values, ties to even."""
    nan = np.isnan(values)
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        low, kept = bits & 0xFFFF, bits >> 16
        up = (low > 0x8000) | ((low == 0x8000) & (kept & 1 == 1))
        return np.where(nan, 0x7FC0, kept + up).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        out = values.astype(dtype)
    out[nan] = np.nan
    return out


def reduce(a: Array, b: Array, op: str, dtype: str, divisor: int = 1) -> Array:
    """a op b, element by element; "avg" adds and divides."""
    with np.errstate(all="ignore"):
        if dtype in FLOATS:
            return _reduce_floats(a, b, op, dtype, divisor)
        if op == "avg":
            return _divide(a + b, divisor)
        return {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op](a, b)


def _divide(total: Array, divisor: int) -> Array:
    """Integer division towards zero."""
    if total.dtype.kind == "u":
        return (total.astype(np.uint64) // np.uint64(divisor)).astype(total.dtype)
    wide = total.astype(np.int64)
    quotient, rest = np.divmod(wide, np.int64(divisor))
    return (quotient + ((rest != 0) & (wide < 0))).astype(total.dtype)


def mean(inputs: list[Array]) -> Array:
    """The average of integers, rounded towards zero."""
    wide = np.int64 if inputs[0].itemsize < 8 else object  # an integer of Python: no sum overflows
    total = sum(array.astype(wide) for array in inputs)
    size = abs(total) // len(inputs)
    return np.where(total < 0, -size, size).astype(inputs[0].dtype)


def _reduce_floats(a: Array, b: Array, op: str, dtype: str, divisor: int) -> Array:
    x, y = decode(a, dtype), decode(b, dtype)
    if op in ("max", "min"):
        out = np.maximum(x, y) if op == "max" else np.minimum(x, y)
        negative = np.signbit(x) & np.signbit(y) if op == "max" else np.signbit(x) | np.signbit(y)
        zero = np.where(negative, -0.0, 0.0)
        return encode(np.where((x == 0) & (y == 0), zero, out).astype(x.dtype), dtype)
    out = x * y if op == "prod" else x + y
    if op == "avg" and divisor > 1:
        out = out / x.dtype.type(divisor)
    return encode(out, dtype)


def bounds(count: int, members: int) -> list[int]:
    """Where the segments of `count` elements begin, and where the last one ends."""
    blocks = -(-count // ALIGNMENT)
    return [min(count, ALIGNMENT * (blocks * s // members)) for s in range(members + 1)]


def all_reduce(inputs: list[Array], op: str, dtype: str) -> Array:
    """The result on each member of one ring after an all-reduce.

    Args:
        inputs: one array for each member, in ring order.
        op: one of OPS.
        dtype: one of DTYPES.

    Returns:
        Segment s is reduced in ring order beginning with member s, and "avg" divides at the end.
    """
    members = len(inputs)
    if op == "avg" and "int" in dtype:
        return mean(inputs)
    out = inputs[0].copy()
    cuts = bounds(inputs[0].size, members)
    for s in range(members if members > 1 else 0):
        part = slice(cuts[s], cuts[s + 1])
        value = inputs[s][part]
        for step in range(members - 1):
            divisor = members if step == members - 2 else 1
            value = reduce(value, inputs[(s + step + 1) % members][part], op, dtype, divisor)
        out[part] = value
    return out
