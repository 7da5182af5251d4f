"""docs/internals/quantization.md in numpy: the expected results of quantization, bit for bit.

Formats go by the names of c/pccl_core.h's pccl_format, without the prefix, and in its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oracles import collectives as oracle

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Format:
    """How the map of a block is found, the bits of a code, the elements of a block."""

    rule: str
    bits: int
    block: int = 256

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


FORMATS = {
    "BLOCK_8": Format("symmetric", 8),
    "BLOCK_4": Format("symmetric", 4, 64),
    "MIN_MAX_8": Format("min_max", 8),
    "MIN_MAX_16": Format("min_max", 16),
    "ZERO_POINT_8": Format("zero_point", 8),
    "ZERO_POINT_16": Format("zero_point", 16),
}


def real(dtype: str) -> np.dtype[Any]:
    """The type of the computation, and that of the numbers in a header."""
    return np.dtype("float64" if dtype == "float64" else "float32")


def step(reach: Any, codes: Any) -> Any:
    """The number below `reach / codes`, but at least the least normal one."""
    least = np.finfo(reach.dtype).tiny
    quotient = reach / codes if reach > 0 else reach
    return np.nextafter(quotient, reach.dtype.type(0)) if quotient > least else least


def measure(x: Array, format: Format) -> tuple[Any, Any, Any]:
    """(offset, zero, step) of one block: element = offset + (code - zero) * step."""
    kind = x.dtype.type
    if not np.isfinite(x).all():
        return kind(0), kind(0), kind(np.nan)
    half = kind(0.5)
    reach = kind(format.middle - 1)
    middle = kind(format.middle)
    low, high = x.min(), x.max()
    if format.rule == "symmetric":
        return kind(0), middle, step(np.abs(x).max(), reach)
    far = (low > 0 and low > high - low) or (high < 0 and -high > high - low)
    if format.rule == "min_max" or far:
        offset = low * half + high * half
        return offset, middle, step(max(offset - low, high - offset), reach)
    last = kind(2 * format.middle - 1)
    below, above = max(-low, kind(0)), max(high, kind(0))
    zero = kind(0)
    if below > 0:
        share = below * half / (below * half + above * half)
        zero = max(np.rint(last * share), kind(1))
    if above > 0:
        zero = min(zero, last - kind(1))
    return (
        kind(0),
        zero,
        max(step(reach, codes) for reach, codes in ((below, zero), (above, last - zero))),
    )


def blocks(n: int, format: Format) -> list[slice]:
    return [slice(i, min(n, i + format.block)) for i in range(0, n, format.block)]


def quantize(x: Array, format: Format) -> bytes:
    """The bytes of numbers, which are float32 or float64."""
    out = b""
    for part in blocks(x.size, format):
        with np.errstate(all="ignore"):
            out += _block(x[part], format)
    return out


def _block(x: Array, format: Format) -> bytes:
    offset, zero, step = measure(x, format)
    header = {"symmetric": [step], "min_max": [step, offset], "zero_point": [step, zero]}
    if offset != 0:  # then there is no code for 0
        header["zero_point"] = [-step, offset]
    codes = np.zeros(x.size, np.uint32)
    if step == step:
        inverse = x.dtype.type(1) / step
        exact = np.float64 if x.dtype == np.float32 else np.longdouble
        codes = np.rint(((x - offset) * inverse).astype(exact) + zero).astype(np.uint32)
    head = np.array(header[format.rule], x.dtype)
    if step != step:
        head.view(f"u{x.itemsize}")[0] = np.array(np.nan, x.dtype).view(f"u{x.itemsize}")
    if format.bits == 4:
        half = (x.size + 1) // 2
        middle = format.middle if step == step else 0
        codes = np.append(codes, np.full(x.size % 2, middle, np.uint32))
        return head.tobytes() + (codes[:half] | codes[half:] << 4).astype(np.uint8).tobytes()
    return head.tobytes() + codes.astype(f"<u{format.bits // 8}").tobytes()


def dequantize(data: bytes, n: int, format: Format, dtype: str) -> Array:
    """The n numbers, in `real(dtype)`, that bytes stand for."""
    kind = real(dtype)
    out = np.empty(n, kind)
    at = 0
    for part in blocks(n, format):
        count = part.stop - part.start
        numbers = 1 if format.rule == "symmetric" else 2
        head = np.frombuffer(data, kind, numbers, at)
        at += head.nbytes
        nbytes = (count * format.bits + 7) // 8
        codes = np.frombuffer(data, np.uint8, nbytes, at)
        at += nbytes
        if format.bits == 4:
            codes = np.append(codes & 15, codes >> 4)[:count]
        elif format.bits == 16:
            codes = codes.view("<u2")
        from_zero = format.rule == "zero_point" and not head[0] < 0
        zero = head[1] if from_zero else kind.type(format.middle)
        scale = abs(head[0]) if format.rule == "zero_point" else head[0]
        with np.errstate(all="ignore"):
            out[part] = (codes.astype(kind) - zero) * scale
            if numbers == 2:
                out[part] += kind.type(0) if from_zero else head[1]
        if not np.isfinite(head).all():
            out[part] = np.nan
    assert at == len(data)
    return out


def _op(x: Array, y: Array, op: str, divisor: int) -> Array:
    with np.errstate(all="ignore"):
        if op in ("max", "min"):
            x = np.maximum(x, y) if op == "max" else np.minimum(x, y)
            x = np.where(np.isfinite(y), x + x.dtype.type(0), x.dtype.type(np.nan))
        else:
            x = x + y
        return x / x.dtype.type(divisor) if op == "avg" and divisor > 1 else x


def reduce(
    data: bytes, own: Array, op: str, format: Format, dtype: str, divisor: int = 1
) -> tuple[bytes, Array]:
    """One step of a ring: the new bytes, and the elements that they stand for."""
    x, y = dequantize(data, own.size, format, dtype), oracle.decode(own, dtype)
    out = quantize(_op(x, y, op, divisor), format)
    return out, oracle.encode(dequantize(out, own.size, format, dtype), dtype)


def combine(
    a: bytes, b: bytes, n: int, op: str, format: Format, dtype: str, divisor: int = 1
) -> Array:
    """Two quantized arrays, reduced and not quantized again."""
    x, y = (dequantize(data, n, format, dtype) for data in (a, b))
    return oracle.encode(_op(x, y, op, divisor), dtype)


def all_reduce_oneshot(a: Array, b: Array, op: str, dtype: str, format: Format) -> Array:
    """The result on both of two members that have sent each other everything."""
    sent = (quantize(oracle.decode(each, dtype), format) for each in (a, b))
    return combine(*sent, a.size, op, format, dtype, 2)


def reduce_at_owner(inputs: list[Array], op: str, dtype: str, format: Format) -> Array:
    """The result of a segment in two stages."""
    members, n = len(inputs), inputs[0].size
    total, *others = (
        dequantize(quantize(oracle.decode(each, dtype), format), n, format, dtype)
        for each in inputs
    )
    for number, each in enumerate(others, 2):
        total = _op(total, each, op, members if number == members else 1)
    return oracle.encode(dequantize(quantize(total, format), n, format, dtype), dtype)


def all_reduce(inputs: list[Array], op: str, dtype: str, format: Format) -> Array:
    """The result of a quantized all-reduce, as oracle.all_reduce.

    Two members form a ring; more reduce in two stages.
    """
    members = len(inputs)
    result = inputs[0].copy()
    cuts = oracle.bounds(inputs[0].size, members)
    for s in range(members):
        part = slice(cuts[s], cuts[s + 1])
        if members > 2:
            result[part] = reduce_at_owner([each[part] for each in inputs], op, dtype, format)
            continue
        data = quantize(oracle.decode(inputs[s][part], dtype), format)
        for step in range(members - 1):
            divisor = members if step == members - 2 else 1
            own = inputs[(s + step + 1) % members][part]
            data, result[part] = reduce(data, own, op, format, dtype, divisor)
    return result
