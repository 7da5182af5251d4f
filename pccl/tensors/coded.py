"""Numbers that are quantized by blocks of 256 to int8 (docs/quantization.md), on torch's devices.

The bits are those of c/kernels/blocks.inc, on a CPU and on a GPU. Each operation here is one that
IEEE 754 defines, and torch computes one after the other: what is rounded between two of them goes
to memory, so that none are contracted to a fused multiply-add. On a GPU,

- a divisor is a tensor, never a number: torch multiplies by the inverse of a number instead, which
  rounds twice. Division of tensors is rounded to nearest, as CUDA's is by default;
- no subnormal number counts: steps are normal numbers or more, so their inverses and products with
  whole numbers are, too; what is smaller than half a step has the code of 0 either way;
- a NaN is stored as an integer: arithmetic gives other NaNs on a GPU than on a CPU.

What the engine leaves of an all-reduce (c/engine/codes.h) are a code for each element,
with room for whole quanta, and behind them, for each quantum of 64 elements, its block's step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pccl.types import DataType, ReduceOp

if TYPE_CHECKING:
    import torch

BLOCK = 256  # elements
QUANTUM = 64  # elements; each has a step
PIECE = 1 << 20  # elements that are computed at a time: what is between takes some bytes for each
_ZERO = 128  # the code of 0
_CODES = 127  # codes on either side of it


@dataclass(frozen=True, slots=True)
class Real:
    """Numbers in which elements are computed, as c/kernels/quantize.c has them.

    Attributes:
        nbytes: of one.
        dtype: by its name in torch; `word` that of integers of its size.
        infinity: the bits of it.
        least: the smallest normal number.
        rounder: of a small number added to it the fraction is rounded away.
    """

    nbytes: int
    dtype: str
    word: str
    infinity: int
    least: float
    rounder: float


_SINGLE = Real(4, "float32", "int32", 0x7F800000, 2.0**-126, 1.5 * 2**23)
_DOUBLE = Real(8, "float64", "int64", 0x7FF << 52, 2.0**-1022, 1.5 * 2**52)
_NANS = {  # the one that pccl's kernels make; and integers of the size of an element
    DataType.FLOAT16: (0x7E00, "int16"),
    DataType.BFLOAT16: (0x7FC0, "int16"),
    DataType.FLOAT: (0x7FC00000, "int32"),
    DataType.DOUBLE: (0x7FF8 << 48, "int64"),
}


def real(dtype: DataType) -> Real:
    """The numbers in which elements of that type are computed."""
    return _DOUBLE if dtype is DataType.DOUBLE else _SINGLE


def steps_at(count: int) -> int:
    """Where the steps begin, behind the codes of `count` elements."""
    return -(-count // QUANTUM) * QUANTUM


def coded_bytes(count: int, dtype: DataType) -> int:
    """Bytes of `count` elements, coded."""
    return steps_at(count) // QUANTUM * (QUANTUM + real(dtype).nbytes)


def stretches(begin: int, end: int, count: int, dtype: DataType) -> list[tuple[int, int]]:
    """The bytes of the codes, and those of the steps, of the elements begin <= i < end of `count`;
    `begin` is a multiple of QUANTUM."""
    size, steps = real(dtype).nbytes, steps_at(count)
    first, last = begin // QUANTUM, -(-end // QUANTUM)
    return [(begin, end), (steps + first * size, steps + last * size)]


def decode(memory: torch.Tensor, out: torch.Tensor, dtype: DataType) -> None:
    """Makes elements of what is coded.

    Args:
        memory: bytes of what is coded.
        out: elements, one after the other, which are overwritten.
        dtype: of an element.
    """
    arithmetic = _Arithmetic(dtype)
    for begin in range(0, out.numel(), PIECE):
        part = out[begin : begin + PIECE]
        numbers, bad = arithmetic.read(memory, out.numel(), begin, part.numel())
        arithmetic.store(part, numbers, bad)


def combine(
    memory: torch.Tensor, own: torch.Tensor, out: torch.Tensor, dtype: DataType, op: ReduceOp
) -> None:
    """Reduces what is coded with what own elements become if they are quantized likewise.

    Args:
        memory: bytes of what is coded: the contribution of another peer.
        own: elements, one after the other.
        out: the result; it may be `own`.
        dtype: of an element.
        op: SUM, AVG, MAX or MIN.
    """
    arithmetic = _Arithmetic(dtype)
    for begin in range(0, out.numel(), PIECE):
        part = out[begin : begin + PIECE]
        theirs, bad = arithmetic.read(memory, out.numel(), begin, part.numel())
        ours, bad_too = arithmetic.rounded(own[begin : begin + PIECE])
        arithmetic.store(part, arithmetic.reduced(op, theirs, ours), bad | bad_too[: bad.numel()])


class _Arithmetic:
    """The steps of both, for elements of one type. What is bad is not finite: it is by quanta."""

    def __init__(self, dtype: DataType) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dtype, self._real = dtype, real(dtype)
        self._numbers = getattr(self._torch, self._real.dtype)
        self._word = getattr(self._torch, self._real.word)
        self._nan, word = _NANS[dtype]
        self._stored = getattr(self._torch, word)

    def read(self, memory: Any, count: int, begin: int, length: int) -> tuple[Any, Any]:
        """The numbers of `length` elements from `begin` on, of `count`: whole quanta of them."""
        codes, steps = (
            memory[low:high]
            for low, high in stretches(begin, steps_at(begin + length), count, self._dtype)
        )
        steps = steps.view(self._numbers)
        numbers = codes.to(self._numbers).sub_(_ZERO).view(-1, QUANTUM)
        bad = self._is_bad(steps.view(self._word))
        return numbers.mul_(steps.unsqueeze(1)).view(-1), bad

    def rounded(self, own: Any) -> tuple[Any, Any]:
        """What elements become if they are quantized: at least as many numbers."""
        torch, limits = self._torch, self._real
        padding = -own.numel() % BLOCK
        numbers = torch.nn.functional.pad(own.to(self._numbers), (0, padding)).view(-1, BLOCK)
        magnitudes = numbers.view(self._word) & (2 ** (8 * limits.nbytes - 1) - 1)
        largest = magnitudes.amax(1)
        reach = largest.view(self._numbers)
        step = reach / torch.full_like(reach, _CODES)
        step = torch.maximum(step, torch.full_like(step, limits.least))
        below = (step.view(self._word) - 1).view(self._numbers)
        step = torch.where(step > limits.least, below, step)
        inverse = torch.ones_like(step) / step
        codes = numbers.mul(inverse.unsqueeze(1)).add_(limits.rounder + _ZERO).view(self._word)
        values = (codes & 255).to(self._numbers).sub_(_ZERO).mul_(step.unsqueeze(1))
        return values.view(-1), self._is_bad(largest).repeat_interleave(BLOCK // QUANTUM)

    def reduced(self, op: ReduceOp, a: Any, b: Any) -> Any:
        """Of the smaller number of both; 0 is never negative in a maximum or minimum."""
        b = b[: a.numel()]
        if op is ReduceOp.SUM:
            return a.add_(b)
        if op is ReduceOp.AVG:
            return a.add_(b).mul_(0.5)  # the same as a division by two
        chosen = self._torch.where(b > a if op is ReduceOp.MAX else b < a, b, a)
        return chosen.add_(b - b)

    def store(self, out: Any, numbers: Any, bad: Any) -> None:
        """Rounds numbers to elements; of bad quanta they are NaNs."""
        count = out.numel()
        out.copy_(numbers[:count])
        spoilt = bad[: -(-count // QUANTUM)].unsqueeze(1).expand(-1, QUANTUM).reshape(-1)
        out.view(self._stored).masked_fill_(spoilt[:count], self._nan)

    def _is_bad(self, words: Any) -> Any:
        return (words & (2 ** (8 * self._real.nbytes - 1) - 1)) >= self._real.infinity
