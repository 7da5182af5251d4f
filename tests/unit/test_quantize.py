"""The quantizing kernels against numpy, to the bit, and what their errors may be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from oracles import collectives as oracle
from oracles import quantized
from oracles.quantized import FORMATS

from pccl.ext import ffi, lib

SIZES = [0, 1, 2, 3, 7, 63, 64, 65, 127, 129, 255, 256, 257, 511, 515, 1021]
Array = np.ndarray[Any, Any]
REDOPS = {"sum": lib.PCCL_SUM, "avg": lib.PCCL_AVG, "max": lib.PCCL_MAX, "min": lib.PCCL_MIN}

names = pytest.mark.parametrize("name", FORMATS)
dtypes = pytest.mark.parametrize("dtype", oracle.FLOATS)


def pointer(array: Array) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def shifted(array: Array, offset: int) -> Array:
    """A copy that begins `offset` bytes after an aligned address, as bytes; nothing is behind it
    but a pattern."""
    block = np.full(array.nbytes + 128 + offset, 0xA5, np.uint8)
    begin = -block.ctypes.data % 64 + offset
    out = block[begin : begin + array.nbytes].view(array.dtype)
    out[:] = array
    return out


def codes(name: str, dtype: str) -> tuple[int, int]:
    return getattr(lib, f"PCCL_{name}"), oracle.DTYPES.index(dtype)


def quantize(name: str, dtype: str, array: Array, offset: int = 0) -> bytes:
    size = lib.pccl_quantized_size(*codes(name, dtype), array.size)
    out = shifted(np.full(size, 0x77, np.uint8), offset)
    source = shifted(array, offset * 3 % 64)
    assert lib.pccl_quantize(*codes(name, dtype), pointer(out), pointer(source), array.size) == 0
    assert (out.base[out.ctypes.data - out.base.ctypes.data + size :] == 0xA5).all()
    return out.tobytes()


def dequantize(name: str, dtype: str, data: bytes, n: int, offset: int = 0) -> Array:
    out = shifted(np.zeros(n, oracle.storage(dtype)), offset)
    source = shifted(np.frombuffer(data, np.uint8), offset * 5 % 64)
    assert lib.pccl_dequantize(*codes(name, dtype), pointer(out), pointer(source), n) == 0
    return out


def there_and_back(name: str, dtype: str, values: Any) -> Array:
    """Numbers, quantized and read again."""
    array = oracle.encode(np.asarray(values, quantized.real(dtype)), dtype)
    data = quantize(name, dtype, array)
    return oracle.decode(dequantize(name, dtype, data, array.size), dtype)


def samples(dtype: str, n: int, seed: int) -> Array:
    """Normal numbers around something, at a scale that differs from block to block."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 3, n // 64 + 1).repeat(64)[:n]
    shift = rng.choice([0.0, 0.0, 3.0, -50.0], n // 64 + 1).repeat(64)[:n]
    values = (rng.standard_normal(n) + shift) * scale
    return oracle.encode(values.astype(quantized.real(dtype)), dtype)


@names
@dtypes
def test_sizes_and_alignments(name: str, dtype: str) -> None:
    format = FORMATS[name]
    for n in SIZES:
        offset = n % 61
        array, own = samples(dtype, n, 2 * n), samples(dtype, n, 2 * n + 1)
        wanted = quantized.quantize(oracle.decode(array, dtype), format)
        data = quantize(name, dtype, array, offset)
        assert len(data) == lib.pccl_quantized_size(*codes(name, dtype), n)
        assert data == wanted, n
        back = oracle.encode(quantized.dequantize(data, n, format, dtype), dtype)
        assert dequantize(name, dtype, data, n, offset).tobytes() == back.tobytes(), n
        for op in ("sum", "avg", "max", "min"):
            after, result = quantized.reduce(data, own, op, format, dtype, 3)
            sums = [shifted(np.frombuffer(data, np.uint8), offset) for _ in range(3)]
            given, out = shifted(own, offset * 7 % 64), shifted(own, offset)
            args = codes(name, dtype)
            for total, target in zip(sums, (None, out, given), strict=True):
                to = ffi.NULL if target is None else pointer(target)
                both = pointer(total), pointer(given)
                assert lib.pccl_quantized_reduce(*args, REDOPS[op], *both, n, 3, to) == 0
                assert total.tobytes() == after, (n, op)
                assert target is None or target.tobytes() == result.tobytes(), (n, op)
            other = quantize(name, dtype, own)
            both = [shifted(np.frombuffer(each, np.uint8), offset) for each in (data, other)]
            total = shifted(np.zeros_like(own), offset)
            pointers = map(pointer, (total, *both))
            assert lib.pccl_quantized_combine(*args, REDOPS[op], *pointers, n, 2) == 0
            wanted = quantized.combine(data, other, n, op, format, dtype, 2)
            assert total.tobytes() == wanted.tobytes(), (n, op)


SPECIAL = {
    "zeros": [0.0] * 300,
    "minus zeros": [-0.0] * 300,
    "a constant": [5.3] * 300,
    "a negative constant": [-5.3] * 300,
    "all negative": -np.linspace(100, 101, 300),
    "all positive": np.linspace(100, 101, 300),
    "one outlier": [1e4, *np.linspace(-1, 1, 299)],
    "one element": [1.5],
}


@names
@dtypes
@pytest.mark.parametrize("case", SPECIAL)
def test_errors_are_half_a_step(name: str, dtype: str, case: str) -> None:
    values = oracle.decode(
        oracle.encode(np.asarray(SPECIAL[case], quantized.real(dtype)), dtype), dtype
    )
    format = FORMATS[name]
    back = there_and_back(name, dtype, values)
    last_place = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 2.0**-22)
    for part in quantized.blocks(values.size, format):
        _, _, step = quantized.measure(values[part], format)
        allowed = step * 0.5001 + np.abs(values[part]).max() * last_place
        assert np.abs(back[part] - values[part]).max() <= allowed
        low, high = values[part].min(), values[part].max()
        reach = {
            "symmetric": np.abs(values[part]).max(),
            "min_max": (high - low) / 2,
            "zero_point": min(max(high, 0) - min(low, 0), 2 * (high - low)) / 2,
        }[format.rule]
        assert step <= reach / (format.middle - 1) * 1.01 + 1e-37
    if "zero" in case:
        assert (back == 0).all()


@names
@dtypes
def test_zero_stays_zero(name: str, dtype: str) -> None:
    """In the formats without an offset, whatever else there is."""
    if FORMATS[name].rule == "min_max":
        pytest.skip("its offset is the middle of the range")
    rng = np.random.default_rng(1)
    for low, high in ((-1, 1), (-1000, 0.01), (-0.01, 1000), (0.5, 1), (-1, -0.5)):
        values = rng.uniform(low, high, 256)
        values[::5] = 0
        assert (there_and_back(name, dtype, values)[::5] == 0).all()


FAR = {"a million": 1e6, "minus a million": -1e6, "ten": 10.5}


@pytest.mark.parametrize("where", FAR)
@pytest.mark.parametrize("bits", [8, 16])
def test_far_from_zero_the_range_is_that_of_the_data(where: str, bits: int) -> None:
    """A range from zero would have steps of about a hundredth of a million."""
    name, format = f"ZERO_POINT_{bits}", FORMATS[f"ZERO_POINT_{bits}"]
    values = FAR[where] + np.random.default_rng(6).uniform(-1, 1, 1000)
    error = np.abs(there_and_back(name, "float64", values) - values).max()
    assert error <= 1 / (format.middle - 1)
    result = quantized.all_reduce([values, values + 1], "sum", "float64", format)
    assert np.abs(result - 2 * values - 1).max() <= 4 / (format.middle - 1)


@pytest.mark.parametrize("name", ["ZERO_POINT_8", "ZERO_POINT_16"])
@dtypes
def test_near_zero_its_range_begins_there(name: str, dtype: str) -> None:
    """Zero has a code where that costs one bit at most; elsewhere the step is that of the data."""
    kind = quantized.real(dtype)
    for low, high, near in ((1, 2, True), (1.01, 2, False), (-2, -1, True), (-2, -1.01, False)):
        values = np.linspace(low, high, 256).astype(kind)
        header = np.frombuffer(quantize(name, dtype, oracle.encode(values, dtype)), kind, 2)
        assert (header[0] > 0) == near
        assert abs(header[0]) <= 2 * (high - low) / (2 * FORMATS[name].middle - 3)
        assert header[1] == (high < 0) * (2 * FORMATS[name].middle - 1) or not near


@names
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_make_their_block_nan(name: str, dtype: str, bad: float) -> None:
    format = FORMATS[name]
    values = np.linspace(-1, 1, 3 * format.block)
    values[format.block + 5] = bad
    back = there_and_back(name, dtype, values)
    poisoned = slice(format.block, 2 * format.block)
    assert np.isnan(back[poisoned]).all()
    back[poisoned] = 0
    assert np.isfinite(back).all(), "only its block"
    # through a step of the ring: from the sum, and from our own contribution
    finite = oracle.encode(np.ones(values.size, quantized.real(dtype)), dtype)
    other = oracle.encode(values.astype(quantized.real(dtype)), dtype)
    for (first, own), op in itertools.product(((finite, other), (other, finite)), REDOPS.values()):
        total = np.frombuffer(quantize(name, dtype, first), np.uint8).copy()
        out = np.zeros_like(own)
        args = (op, pointer(total), pointer(own), own.size, 2, pointer(out))
        assert lib.pccl_quantized_reduce(*codes(name, dtype), *args) == 0
        result = oracle.decode(out, dtype)
        assert np.isnan(result[poisoned]).all()
        assert np.isfinite(np.delete(result, np.r_[poisoned])).all()


@names
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_huge_and_tiny(name: str, dtype: str) -> None:
    info = np.finfo(quantized.real(dtype))
    largest = oracle.decode(np.array([0x7F7F], np.uint16), "bfloat16")[0]
    top = largest if dtype == "bfloat16" else info.max
    rng = np.random.default_rng(2)
    for low, high in ((-1, 1), (-1, 0), (0.5, 1), (1, 1), (-1, -1)):
        values = rng.uniform(low, high, 256).astype(info.dtype) * top
        values[:2] = np.array([low, high], info.dtype) * top
        back = there_and_back(name, dtype, values)
        assert np.isfinite(back).all()
        reach = 7 if FORMATS[name].bits == 4 else 127
        assert (np.abs(back * 0.5 - values * 0.5) <= top * (0.5 / reach + 2**-8)).all()
    # below the least normal number all errors are below half of it
    tiny = rng.uniform(-1, 1, 256).astype(info.dtype) * info.tiny
    assert (np.abs(there_and_back(name, dtype, tiny) - tiny) <= info.tiny / 2 * 1.01).all()
    # a range that a number twice as large could not hold
    values = np.linspace(-1, 1, 256).astype(info.dtype) * top
    assert np.isfinite(there_and_back(name, dtype, values)).all()


@names
def test_rounding_has_no_bias(name: str) -> None:
    """The mean error of many numbers is nearer to 0 than chance would have it five times."""
    rng = np.random.default_rng(3)
    for low, high in ((-1.0, 1.0), (0.0, 1.0), (-7.0, -3.0)):
        values = rng.uniform(low, high, 256 * 1000).astype(np.float32)
        error = there_and_back(name, "float32", values).astype(np.float64) - values
        assert abs(error.mean()) < 5 * error.std() / np.sqrt(error.size)


@names
@dtypes
def test_any_bytes_can_be_read(name: str, dtype: str) -> None:
    """Bytes of a hostile peer become some numbers, and nothing else happens."""
    rng = np.random.default_rng(4)
    n = 700
    size = lib.pccl_quantized_size(*codes(name, dtype), n)
    for _ in range(50):
        data = rng.integers(0, 256, size, np.uint8)
        data[: 8 * rng.integers(0, 2)] = 0xFF
        out = dequantize(name, dtype, data.tobytes(), n)
        wanted = quantized.dequantize(data.tobytes(), n, FORMATS[name], dtype)
        assert out.tobytes() == oracle.encode(wanted, dtype).tobytes()
        own = np.ones(n, oracle.storage(dtype))
        for op, number in REDOPS.items():
            total, result = data.copy(), np.zeros_like(own)
            args = (number, pointer(total), pointer(own), n, 2, pointer(result))
            assert lib.pccl_quantized_reduce(*codes(name, dtype), *args) == 0
            after, wanted = quantized.reduce(data.tobytes(), own, op, FORMATS[name], dtype, 2)
            assert (total.tobytes(), result.tobytes()) == (after, wanted.tobytes())


@names
@dtypes
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("members", [2, 5])
def test_the_oracle_is_close_to_exact_results(name: str, dtype: str, op: str, members: int) -> None:
    """The oracle is right: its error is as small as the format allows."""
    rng = np.random.default_rng(5)
    real = quantized.real(dtype)
    values = [rng.uniform(-1, 1, 1000).astype(real) for _ in range(members)]
    inputs = [oracle.encode(x, dtype) for x in values]
    every = [oracle.decode(x, dtype).astype(np.float64) for x in inputs]
    how = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}[op]
    exact = how(every, axis=0)
    result = quantized.all_reduce(inputs, op, dtype, FORMATS[name])
    reach = FORMATS[name].middle - 1
    places = members * 2.0**-7 * (dtype in ("bfloat16", "float16"))
    if op in ("max", "min"):  # half a step of what was there, at each step
        allowed = members / reach / 2 * 1.01 + places
    else:  # half a step of sums that grow
        allowed = (sum(range(1, members + 1)) / reach / 2 * 1.01 + places) / (
            members if op == "avg" else 1
        )
    error = np.abs(oracle.decode(result, dtype) - exact)
    assert error.max() <= allowed + 1e-5


def test_bad_arguments_are_refused() -> None:
    memory = np.zeros((3, 64), np.float32)
    x, y, z = map(pointer, memory)
    for format, dtype in ((0, 10), (7, 10), (-1, 10), (1, 7), (1, 12), (1, -1)):
        assert lib.pccl_quantized_size(format, dtype, 10) == 0
        assert lib.pccl_quantize(format, dtype, x, x, 4) == lib.PCCL_EINVAL
        assert lib.pccl_dequantize(format, dtype, x, x, 4) == lib.PCCL_EINVAL
        assert lib.pccl_quantized_reduce(format, dtype, 0, x, x, 4, 1, x) == lib.PCCL_EINVAL
    for redop, divisor in ((lib.PCCL_AVG, 0), (lib.PCCL_PROD, 1), (-1, 1), (5, 1)):
        assert lib.pccl_quantized_reduce(1, 10, redop, x, x, 4, divisor, x) == lib.PCCL_EINVAL
    assert lib.pccl_quantize(1, 10, x, y, 4) == 0
    assert lib.pccl_quantized_reduce(1, 10, lib.PCCL_MAX, x, y, 4, 0, z) == 0
    assert [lib.pccl_quantized_block(format) for format in range(8)] == [
        0,
        *(format.block for format in FORMATS.values()),
        0,
    ]


def test_sizes_without_overflow() -> None:
    for number, format in enumerate(FORMATS.values(), 1):
        header = 4 if format.rule == "symmetric" else 8
        block = header + format.block * format.bits // 8
        assert lib.pccl_quantized_size(number, 10, format.block << 40) == block << 40
