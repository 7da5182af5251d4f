"""Quantized blocks on torch's devices against the C kernels, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from pccl.ext import ffi, lib  # noqa: E402
from pccl.tensors import coded  # noqa: E402
from pccl.types import DataType, ReduceOp  # noqa: E402

Array = np.ndarray[Any, Any]
FORMAT = lib.PCCL_BLOCK_8
FLOATS = [DataType[name] for name in ("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE")]
STORED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN]

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


def pointer(array: Array) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def quantized(words: Array, dtype: DataType) -> Array:
    """Elements, given by their bits, as the C kernel quantizes them."""
    data = np.zeros(lib.pccl_quantized_size(FORMAT, dtype.value, words.size), np.uint8)
    assert not lib.pccl_quantize(FORMAT, dtype.value, pointer(data), pointer(words), words.size)
    return data


def unpacked(data: Array, count: int, dtype: DataType) -> Array:
    """The same with the codes apart from the steps, as c/engine/codes.h has them."""
    real = coded.real(dtype).nbytes
    out = np.full(coded.coded_bytes(count, dtype), 0xEE, np.uint8)
    blocks = [data[at : at + real + 256] for at in range(0, data.size, real + 256)]
    out[:count] = np.concatenate([block[real:] for block in blocks])
    steps = np.repeat([block[:real] for block in blocks], 4, axis=0).reshape(-1)
    out[coded.steps_at(count) :] = steps[: out.size - coded.steps_at(count)]
    return out


def dequantized(data: Array, count: int, dtype: DataType) -> Array:
    out = np.zeros(count, STORED[dtype.itemsize])
    assert not lib.pccl_dequantize(FORMAT, dtype.value, pointer(out), pointer(data), count)
    return out


def combined(a: Array, b: Array, count: int, dtype: DataType, op: ReduceOp) -> Array:
    out = np.zeros(count, STORED[dtype.itemsize])
    how = FORMAT, dtype.value, op.value, pointer(out), pointer(a), pointer(b), count, 2
    assert lib.pccl_quantized_combine(*how) == 0
    return out


def tensor(words: Array, dtype: DataType) -> Any:
    """Elements, given by their bits, as a tensor of the same memory."""
    signed = words.view(f"i{words.itemsize}")
    return torch.from_numpy(signed).view(dtype.to_torch_dtype())


def bits(elements: Any) -> Array:
    words: Array = elements.view(getattr(torch, f"int{8 * elements.element_size()}")).numpy()
    return words.view(STORED[words.itemsize])


def of_bits(words: Array, other: Array, dtype: DataType) -> None:
    """Compares what both make of elements, and of these with others."""
    count, data, theirs = words.size, quantized(words, dtype), quantized(other, dtype)
    for each in (data, theirs):
        out = tensor(np.zeros_like(words), dtype)
        coded.decode(torch.from_numpy(unpacked(each, count, dtype)), out, dtype)
        np.testing.assert_array_equal(bits(out), dequantized(each, count, dtype))
    memory = torch.from_numpy(unpacked(theirs, count, dtype))
    for op in OPS:
        out = tensor(np.zeros_like(words), dtype)
        coded.combine(memory, tensor(words, dtype), out, dtype, op)
        for pair in ((data, theirs), (theirs, data)):  # by whichever peer is the first one
            np.testing.assert_array_equal(bits(out), combined(*pair, count, dtype, op), str(op))


def contents(dtype: DataType, count: int, rng: Any) -> Iterator[Array]:
    """Elements, as bits, of all kinds."""
    word = STORED[dtype.itemsize]
    values = rng.standard_normal(count)
    scales = 10.0 ** rng.integers(-3, 4, count)
    name = oracle.DTYPES[dtype.value]
    for one in (values, values * scales, np.zeros(count), -np.zeros(count), np.full(count, 5.3)):
        with np.errstate(over="ignore"):
            yield oracle.encode(one.astype(np.float64 if dtype.itemsize == 8 else np.float32), name)
    anything = rng.integers(0, 2 ** (8 * dtype.itemsize), count, dtype=np.uint64).astype(word)
    yield anything  # among them NaNs, infinities, subnormals
    digits = {2: 10 if dtype is DataType.FLOAT16 else 7, 4: 23, 8: 52}[dtype.itemsize]
    exponents = (1 << 8 * dtype.itemsize - 1 - digits) - 1
    fraction = anything & word((1 << digits) - 1)
    sign = anything & word(1 << 8 * dtype.itemsize - 1)
    for exponent in (0, 1, 2, exponents // 2, exponents - 1):  # subnormal, ..., nearly infinite
        yield sign | fraction | word(exponent << digits)
    ties = (rng.integers(-254, 255, count) / 2).astype(np.float32)  # halves of a step of about 1
    ties[::7] = 127
    yield oracle.encode(ties if dtype.itemsize < 8 else ties.astype(np.float64), name)
    spoilt = anything.copy()
    spoilt[:] = word(exponents // 2 << digits)
    spoilt[rng.integers(0, count)] = word(exponents << digits | int(rng.integers(0, 2)))
    yield spoilt


@dtypes
def test_bits_are_those_of_the_kernels(dtype: DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "PIECE", 1024)
    for count in (1, 65, 255, 256, 1281):
        rng = np.random.default_rng(count)
        both = zip(contents(dtype, count, rng), contents(dtype, count, rng), strict=True)
        for words, other in both:
            words, other = (
                np.ascontiguousarray(one.view(STORED[dtype.itemsize])) for one in (words, other)
            )
            of_bits(words, other, dtype)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=lambda dtype: dtype.name)
def test_every_half_and_every_code(dtype: DataType) -> None:
    """All elements of 16 bits, in blocks of like and of unlike magnitudes; all codes of many
    steps, of which most are rounded to such elements, some to subnormals, some to infinity."""
    every = np.arange(1 << 16, dtype=np.uint16)
    of_bits(every, every[::-1].copy(), dtype)
    mixed = np.random.default_rng(1).permutation(every)
    of_bits(mixed, every, dtype)
    steps = np.random.default_rng(2).integers(0, 0x7F80, 400, np.uint32) << 16
    steps |= np.random.default_rng(3).integers(0, 1 << 16, 400, np.uint32)
    data = np.empty((400, 260), np.uint8)
    data[:, :4] = steps.reshape(-1, 1).view(np.uint8)
    data[:, 4:] = np.arange(256)
    count = 400 * 256
    out = tensor(np.zeros(count, np.uint16), dtype)
    coded.decode(torch.from_numpy(unpacked(data.reshape(-1), count, dtype)), out, dtype)
    np.testing.assert_array_equal(bits(out), dequantized(data.reshape(-1), count, dtype))


class Watched(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.names.add(name)
        if "div" in name:
            assert all(isinstance(each, torch.Tensor) and each.dim() == 1 for each in args)
        assert "alpha" not in (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_only_operations_that_round_once() -> None:
    """No fused ones; and divisors are tensors, since torch multiplies by a number's inverse."""
    own = torch.arange(1000.0)
    memory = torch.zeros(coded.coded_bytes(1000, DataType.FLOAT), dtype=torch.uint8)
    with Watched() as watched:
        coded.decode(memory, torch.empty(1000), DataType.FLOAT)
        for op in OPS:
            coded.combine(memory, own, torch.empty(1000), DataType.FLOAT, op)
    moves = {"__getitem__", "view", "unsqueeze", "expand", "reshape", "repeat_interleave", "numel"}
    moves |= {"to", "copy_", "pad", "full_like", "ones_like", "masked_fill_", "empty", "__get__"}
    exact = {"__and__", "__or__", "ge", "gt", "lt", "where", "amax", "maximum"}
    rounded = {"add_", "sub_", "sub", "mul_", "mul", "div", "__truediv__"}
    assert watched.names <= moves | exact | rounded
