"""The encodings of whole arrays against numpy, to the bit; their errors; bytes of a stranger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import payloads

from pccl import kernels

FORMATS = tuple(payloads.ENCODINGS)
SIZES = (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2050, 4095, 4096, 4097)
LARGE = (8191, 65535, 65536, 65537, 70_001)
Array = np.ndarray[Any, Any]

formats = pytest.mark.parametrize("format", FORMATS)


def samples(n: int, seed: int) -> Array:
    """Numbers at scales that differ from place to place; some equal ones, and zeros."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 3, n // 64 + 1).repeat(64)[:n]
    values = rng.standard_normal(n) * scale
    values[rng.random(n) < 0.1] = 0
    values[rng.random(n) < 0.1] = -3.0
    return values.astype(np.float32)


def shifted(array: Array, offset: int) -> Array:
    """A copy that begins `offset` elements after an aligned address."""
    block = np.zeros(array.size + 64, array.dtype)
    block[offset : offset + array.size] = array
    return block[offset : offset + array.size]


def encode(format: kernels.Format, values: Array, offset: int = 0) -> bytes:
    data = shifted(np.full(kernels.quantized_size(format, values.size), 0x77, np.uint8), offset)
    given = shifted(values, offset * 3 % 16)
    kernels.quantize(data, given, format)
    assert given.tobytes() == values.tobytes()
    return data.tobytes()


def decode(format: kernels.Format, data: bytes, n: int, offset: int = 0) -> Array:
    out = shifted(np.full(n, 7, np.float32), offset)
    kernels.dequantize(out, shifted(np.frombuffer(data, np.uint8), offset * 5 % 16), format)
    return out


def there_and_back(format: kernels.Format, values: Any) -> Array:
    array = np.asarray(values, np.float32)
    return decode(format, encode(format, array), array.size)


@formats
def test_bytes_and_numbers_equal_numpy(format: kernels.Format) -> None:
    for n in SIZES + LARGE:
        values = samples(n, n)
        wanted = payloads.ENCODINGS[format].encode(values)
        assert len(wanted) == kernels.quantized_size(format, n), n
        assert encode(format, values, n % 13) == wanted, n
        back = decode(format, wanted, n, n % 11)
        assert back.tobytes() == payloads.ENCODINGS[format].decode(wanted, n).tobytes(), n
        total = values[::-1].copy()
        kernels.accumulate(total, np.frombuffer(wanted, np.uint8), format)
        assert total.tobytes() == (values[::-1] + back).tobytes(), n


EXTREMES = {
    "zeros": [0.0] * 5000,
    "minus zeros": [-0.0] * 5000,
    "a constant": [5.3] * 5000,
    "the largest": [np.finfo(np.float32).max, -np.finfo(np.float32).max] * 2500,
    "the least": [1e-45, -1e-45, 2e-38, -1.2e-38] * 1250,
    "one number": [*[0.0] * 4999, -2.5],
    "all negative": -np.linspace(1, 2, 5000),
}


@formats
@pytest.mark.parametrize("case", EXTREMES)
def test_extremes_equal_numpy(format: kernels.Format, case: str) -> None:
    values = np.asarray(EXTREMES[case], np.float32)
    wanted = payloads.ENCODINGS[format].encode(values)
    assert encode(format, values) == wanted
    back = decode(format, wanted, values.size)
    assert back.tobytes() == payloads.ENCODINGS[format].decode(wanted, values.size).tobytes()
    assert np.isfinite(back).all()
    if case == "a constant":
        assert (back[back != 0] == np.float32(5.3)).all()
    if "zero" in case:
        assert not back.any()


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_make_their_block_nan(format: kernels.Format, value: float) -> None:
    run = payloads.ENCODINGS[format].block
    values = samples(2 * run + 100, 1)
    values[run + 5] = value
    data = encode(format, values)
    assert data == payloads.ENCODINGS[format].encode(values)
    back = decode(format, data, values.size)
    assert back.tobytes() == payloads.ENCODINGS[format].decode(data, values.size).tobytes()
    assert np.isnan(back[run : 2 * run]).all()
    total = np.ones_like(values)
    kernels.accumulate(total, np.frombuffer(data, np.uint8), format)
    assert total.tobytes() == np.where(np.isnan(back), payloads.NAN, 1 + back).tobytes()
    assert not np.isnan(back[:run]).any() and not np.isnan(back[2 * run :]).any()


def test_four_bits_are_a_sign_and_a_power_of_two() -> None:
    values = np.zeros(64, np.float32)
    values[:12] = [8, -8, 6, 5.999, 3, -1.4, 1 / 8, 1 / 16, 1 / 17, -1 / 16, 0, 4]
    wanted = [8, -8, 8, 4, 4, -1, 1 / 8, 1 / 8, 0, -1 / 8, 0, 4]
    assert there_and_back("e3m0", values)[:12].tolist() == wanted


def test_two_bits_have_the_least_error_of_four_levels() -> None:
    """The least mean square error of four levels for a normal distribution is 0.1175 of it."""
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    back = there_and_back("2bit", values)
    assert 0.112 < np.mean((values - back) ** 2) < 0.119
    blocks = values.reshape(-1, 1024).mean(axis=1), back.reshape(-1, 1024).mean(axis=1)
    np.testing.assert_allclose(*blocks, atol=1e-6)


def test_the_largest_of_each_chunk_are_kept() -> None:
    values = np.random.default_rng(0).standard_normal(3 * 4096 + 100).astype(np.float32)
    back = there_and_back("sparse", values)
    for part in payloads.runs(values.size, 4096):
        kept = np.flatnonzero(back[part])
        assert kept.size == (64 if part.stop - part.start == 4096 else 2)
        least = np.abs(values[part][kept]).min()
        assert np.count_nonzero(np.abs(values[part]) >= least) == kept.size
    kept = back != 0
    assert np.mean((values[kept] - back[kept]) ** 2) < 0.1 * np.mean(values[kept] ** 2)


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    values = np.full(4096, -1.0, np.float32)
    values[1000:2000] = 2
    values[3000:3003] = -4
    back = there_and_back("sparse", values)
    assert np.flatnonzero(back).tolist() == [*range(1000, 1061), 3000, 3001, 3002]


@pytest.mark.parametrize(("which", "place"), [(1, 7), (1, 6), (0, 67), (63, 3727), (30, 4095)])
def test_places_that_do_not_increase_in_their_chunk_are_refused(which: int, place: int) -> None:
    values = np.zeros(4096 + 64, np.float32)
    values[np.arange(64) * 60 + 7] = 1
    data = np.frombuffer(encode("sparse", values), np.uint8).copy()
    out = np.zeros_like(values)
    kernels.dequantize(out, data, "sparse")
    places = np.arange(64) * 60 + 7
    places[which] = place
    data[16 : 16 + 96] = np.frombuffer(payloads.packed(places, 12), np.uint8)
    for read in (kernels.dequantize, kernels.accumulate):
        with pytest.raises(ValueError, match="are not bytes of numbers quantized as sparse"):
            read(out, data, "sparse")


def test_a_place_beyond_a_short_chunk_is_refused() -> None:
    data = np.frombuffer(encode("sparse", np.ones(64, np.float32)), np.uint8).copy()
    assert data.size == 16 + 2 + 1
    for place in (0, 63, 64, 4095):
        data[16:18] = place & 255, place >> 8
        out = np.zeros(64, np.float32)
        if place < 64:
            kernels.dequantize(out, data, "sparse")
            assert np.flatnonzero(out).tolist() == [place]
        else:
            with pytest.raises(ValueError, match="not bytes of numbers"):
                kernels.dequantize(out, data, "sparse")


@formats
def test_arrays_that_do_not_fit_are_refused(format: kernels.Format) -> None:
    values = np.zeros(64, np.float32)
    data = np.zeros(kernels.quantized_size(format, 64), np.uint8)
    with pytest.raises(ValueError, match=f"takes {data.size} bytes as {format}"):
        kernels.quantize(data[1:], values, format)
    with pytest.raises(ValueError, match=f"takes {data.size} bytes as {format}"):
        kernels.dequantize(values, data[1:], format)
    with pytest.raises(ValueError, match="is not float32"):
        kernels.quantize(data, values.astype(np.float64), format)
