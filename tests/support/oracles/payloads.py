"""The encodings of whole arrays in numpy, bit for bit, from their description in c/pccl_core.h.

Each is a function to bytes and one from bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
CHUNK, KEPT, CHUNKS = 4096, 64, 16
NAN = np.array([0x7FC00000], np.uint32).view(np.float32)[0]


def runs(n: int, length: int) -> Iterator[slice]:
    return (slice(i, min(n, i + length)) for i in range(0, n, length))


class Reader:
    """Bytes from the beginning."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, dtype: Any) -> Array:
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found


# ---- e3m0 ----

SHARES = np.array([0, *(2.0 ** (e - 7) for e in range(1, 8))], np.float32)


def e3m0(x: Array) -> bytes:
    return b"".join(_e3m0_block(x[part]) for part in runs(x.size, 64))


def _e3m0_block(x: Array) -> bytes:
    nibbles = (x.size + 1) // 2 * 2
    if not np.isfinite(x).all():
        return NAN.tobytes() + bytes(nibbles // 2)
    scale = max(np.abs(x).max(), np.float32(2.0**-119))
    middles = (SHARES[:-1] + SHARES[1:]) / 2
    codes = np.searchsorted(middles, np.abs(x) / scale, side="right").astype(np.uint8)
    codes |= np.where((codes > 0) & (x < 0), 8, 0).astype(np.uint8)
    codes = np.append(codes, np.zeros(nibbles - x.size, np.uint8))
    half = nibbles // 2
    return scale.tobytes() + (codes[:half] | codes[half:] << 4).tobytes()


def from_e3m0(data: bytes, n: int) -> Array:
    reader, out = Reader(data), np.empty(n, np.float32)
    for part in runs(n, 64):
        count = part.stop - part.start
        scale = reader.take(1, np.float32)[0]
        packed = reader.take((count + 1) // 2, np.uint8)
        codes = np.concatenate([packed & 15, packed >> 4])[:count]
        values = scale * SHARES[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
        out[part] = values if np.isfinite(scale) else NAN
    assert reader.at == len(data)
    return out


# ---- levels from statistics ----


def _sum(x: Array) -> float:
    """The sum in fp64, in the order of 64 lanes."""
    lanes = np.zeros(64)
    for row in np.append(x, np.zeros(-x.size % 64)).reshape(-1, 64):
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def levels(x: Array) -> tuple[Array, Array]:
    """The four levels, and each number's code."""
    wide = x.astype(np.float64)
    if not np.isfinite(x).all():
        return np.full(4, NAN), np.zeros(x.size, np.uint8)
    distance = wide - _sum(wide) / x.size
    square = distance * distance
    far = square >= 0.9816 * 0.9816 * (_sum(square) / x.size)
    codes = np.where(distance >= 0, 2 + far, 1 - far.astype(int)).astype(np.uint8)
    found = np.zeros(4, np.float32)
    for code in range(4):
        if (codes == code).any():
            found[code] = _sum(np.where(codes == code, wide, 0)) / np.count_nonzero(codes == code)
    found[np.abs(found) < np.finfo(np.float32).tiny] = 0
    return found, codes


# ---- 2 bits ----


def stat2(x: Array) -> bytes:
    out = b""
    for part in runs(x.size, 1024):
        found, codes = levels(x[part])
        four = np.append(codes, np.zeros(-codes.size % 4, np.uint8)).reshape(4, -1)
        out += found.tobytes() + (four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6).tobytes()
    return out


def from_stat2(data: bytes, n: int) -> Array:
    reader, out = Reader(data), np.empty(n, np.float32)
    for part in runs(n, 1024):
        count = part.stop - part.start
        found = reader.take(4, np.float32)
        packed = reader.take((count + 3) // 4, np.uint8)
        codes = np.concatenate([packed >> 2 * i & 3 for i in range(4)])[:count]
        out[part] = found[codes] if np.isfinite(found).all() else NAN
    assert reader.at == len(data)
    return out


# ---- sparse ----


def sparse(x: Array) -> bytes:
    out = b""
    for group in runs(x.size, CHUNK * CHUNKS):
        chunks = [x[group][part] for part in runs(x[group].size, CHUNK)]
        places = [largest(chunk) for chunk in chunks]
        found, codes = levels(np.concatenate([c[p] for c, p in zip(chunks, places, strict=True)]))
        out += found.tobytes()
        for place in places:
            mine, codes = codes[: place.size], codes[place.size :]
            out += packed(place, 12) + packed(mine, 2)
    return out


def largest(chunk: Array) -> Array:
    """The places of the largest magnitudes, in their order; of equal ones the first are taken."""
    count = -(-chunk.size // (CHUNK // KEPT))
    order = np.argsort(-(chunk.view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
    return np.sort(order[:count])


def packed(values: Array, width: int) -> bytes:
    bits = (values.astype(np.uint16)[:, None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _unpacked(reader: Reader, count: int, width: int) -> Array:
    packed = reader.take((count * width + 7) // 8, np.uint8)
    bits = np.unpackbits(packed, bitorder="little")[: count * width].reshape(count, width)
    return (bits.astype(int) << np.arange(width)).sum(axis=1)


def from_sparse(data: bytes, n: int) -> Array:
    reader, out = Reader(data), np.zeros(n, np.float32)
    for group in runs(n, CHUNK * CHUNKS):
        found = reader.take(4, np.float32)
        for part in runs(group.stop - group.start, CHUNK):
            count = -(-(part.stop - part.start) // (CHUNK // KEPT))
            places = _unpacked(reader, count, 12) + group.start + part.start
            out[places] = found[_unpacked(reader, count, 2)]
        if not np.isfinite(found).all():
            out[group] = NAN
    assert reader.at == len(data)
    return out


class Encoding(NamedTuple):
    """The functions of a format."""

    block: int  # elements that share a NaN
    encode: Callable[[Array], bytes]
    decode: Callable[[bytes, int], Array]


ENCODINGS = {
    "e3m0": Encoding(64, e3m0, from_e3m0),
    "2bit": Encoding(1024, stat2, from_stat2),
    "sparse": Encoding(65536, sparse, from_sparse),
}
