"""How errors and logs name what a collective does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pccl.protocol.kinds import REDUCING, ROOTED, CollectiveKind
from pccl.tensors.layout import described
from pccl.types import DataType, QuantizationAlgorithm, ReduceOp

if TYPE_CHECKING:
    from pccl.protocol.messages import Work

_DTYPE_NAMES = {dtype.value: dtype.common_name for dtype in DataType}
_OP_NAMES = {op.value: op.name.lower() for op in ReduceOp}
_ALGORITHM_NAMES = {each.value: each.name for each in QuantizationAlgorithm}
ROWS_SHOWN = 8
_WITH_DTYPE = {QuantizationAlgorithm.MIN_MAX.value, QuantizationAlgorithm.ZERO_POINT_SCALE.value}
_REORDER = (
    "; they do not lie in the same order in memory: have all call it with c = x.contiguous() "
    "(numpy.ascontiguousarray(x)), and then do x.copy_(c) (x[...] = c)"
)


def _named(names: Mapping[int, str], value: int, what: str) -> str:
    """The name of a value, if it has one: a peer may send any number."""
    return names.get(value, f"{what} {value}")


def dtype_name(dtype: int) -> str:
    """The name of a `DataType` value in numpy and torch."""
    return _named(_DTYPE_NAMES, dtype, "dtype")


def elements(count: int, dtype: int, layout: str = "") -> str:
    """A number of elements, in words; with the memory order if it is not C's."""
    order = f" ({described(layout)})" if layout else ""
    return f"{count} element{'' if count == 1 else 's'} of {dtype_name(dtype)}{order}"


def call(work: Work) -> str:
    """The API call for this work, with its arguments."""
    if work.what == CollectiveKind.BARRIER:
        return "barrier()"
    if work.parts:
        total = sum(part.count for part in work.parts)
        words = [f"{len(work.parts)} tensors of {total} elements"]
    else:
        words = [elements(work.count, work.dtype, work.layout)]
    if work.rows:
        more = ", ..." if len(work.rows) > ROWS_SHOWN else ""
        words.append(f"times {', '.join(map(str, work.rows[:ROWS_SHOWN]))}{more} rows")
    if work.what in REDUCING:
        words.append(_named(_OP_NAMES, work.redop, "op"))
    if work.what in ROOTED:
        words.append(f"root {work.root}")
    if work.algorithm:
        quantized = "quantized by " + _named(_ALGORITHM_NAMES, work.algorithm, "algorithm")
        if work.algorithm in _WITH_DTYPE:
            quantized += " to " + dtype_name(work.quantized)
        words.append(quantized)
    return f"{work.what}({', '.join(words)})"


def difference(one: Work, other: Work) -> str:
    """What the texts of two calls do not show: the first tensors that differ in two lists, the
    first rank with other rows, and what to do about different memory orders."""
    pairs = list(zip(one.parts, other.parts, strict=False))
    words = ""
    if len(one.parts) == len(other.parts):
        unlike = (f"; tensor {i} is {a}, and {b}" for i, (a, b) in enumerate(pairs) if a != b)
        words = next(unlike, "")
    if len(one.rows) == len(other.rows):
        pairs_of_rows = enumerate(zip(one.rows, other.rows, strict=True))
        unlike = (
            f"; rank {rank} gives {a} rows, and {b}" for rank, (a, b) in pairs_of_rows if a != b
        )
        words += next(unlike, "")
    if one.layout != other.layout or any(a.layout != b.layout for a, b in pairs):
        words += _REORDER
    return words
