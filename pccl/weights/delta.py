"""The difference between two contents of the same tensor, exactly and in few bytes. No I/O.

After a step of training in bfloat16 one to three of a hundred elements have changed, most of them
by one bit. What goes over the wire is the exclusive or of the old and the new bits: where few
elements have changed, how many lie between each and the next, and the bits of each; otherwise those
of all. Bytes of equal significance are put together, and zlib codes them by their frequency, and
runs of zeros. Measured on 2 % of bfloat16: 0.20 bits for each element, and the theoretical limit
is 0.19. zlib because it comes with Python on every machine: its search for repetitions, in which
newer codecs are so much better, finds nothing here and is off.

Tensors are cut into spans, which several threads process.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]

SPARSE_UP_TO = 1 / 6  # of the elements; above, the bits of all take less
_HEADER = struct.Struct("<BBxxIII")  # how, bytes of a gap, changed elements, bytes, packed bytes


class How(IntEnum):
    """How a span has changed."""

    SAME = 0
    SPARSE = 1
    DENSE = 2


class Damaged(ValueError):
    """Bytes that are no difference between two contents of that size."""


def words(data: Bytes, itemsize: int) -> Words:
    """Memory as unsigned integers of an element's size."""
    size = itemsize if itemsize in (1, 2, 4, 8) and data.nbytes % itemsize == 0 else 1
    found: Words = data.view(np.dtype(f"u{size}"))
    return found


def difference(old: Words, new: Words) -> bytes:
    """What turns a span's old content into the new one."""
    bits = old ^ new
    changed = np.flatnonzero(bits)
    if not changed.size:
        return _HEADER.pack(How.SAME, 0, 0, 0, 0)
    if changed.size > bits.size * SPARSE_UP_TO:
        raw = _planes(bits)
        packed = _pack(raw)
        return _HEADER.pack(How.DENSE, 0, changed.size, len(raw), len(packed)) + packed
    gaps = np.diff(changed, prepend=-1) - 1
    width = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * size)
    raw = _planes(gaps.astype(np.dtype(f"u{width}"))) + _planes(bits[changed])
    packed = _pack(raw)
    return _HEADER.pack(How.SPARSE, width, changed.size, len(raw), len(packed)) + packed


def apply(content: Words, data: memoryview) -> int:
    """Turns the old content of a span into the new one, in place.

    Returns:
        How many bytes of `data` it took.

    Raises:
        Damaged: it is no difference of such a span; the content may have changed.
    """
    if len(data) < _HEADER.size:
        raise Damaged("it ends within a header")
    how, width, count, nbytes, packed = _HEADER.unpack(data[: _HEADER.size])
    end: int = _HEADER.size + packed
    if len(data) < end or count > content.size:
        raise Damaged("it is longer than it may be")
    if how == How.SAME:
        return _HEADER.size
    size: int = content.itemsize
    expected = content.nbytes if how == How.DENSE else count * (width + size)
    if how not in (How.SPARSE, How.DENSE) or nbytes != expected or width not in (0, 1, 2, 4, 8):
        raise Damaged("it is of another size")
    raw = _unpack(data[_HEADER.size : end], nbytes)
    if how == How.DENSE:
        content ^= _words(raw, size)
        return end
    gaps = _words(raw[: count * width], width).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if gaps.size and (gaps.min() < 0 or places.min() < 0 or places[-1] >= content.size):
        raise Damaged("it leads out of the tensor")
    content[places] ^= _words(raw[count * width :], size)
    return end


def _planes(values: Words) -> bytes:
    """The bytes of all values, those of equal significance together."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return columns.T.tobytes()


def _words(planes: memoryview, size: int) -> Words:
    columns = np.frombuffer(planes, np.uint8).reshape(size, -1)
    found: Words = np.ascontiguousarray(columns.T).view(np.dtype(f"u{size}")).reshape(-1)
    return found


def _pack(raw: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(raw) + packer.flush()


def _unpack(packed: memoryview, nbytes: int) -> memoryview:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, nbytes + 1)
    except zlib.error as error:
        raise Damaged(str(error)) from None
    if len(raw) != nbytes or not unpacker.eof:
        raise Damaged("it has another size than it says")
    return memoryview(raw)
