"""Published parameters: their bytes, their digests, and differences between two versions.

After a step of training in bfloat16, 1 % to 3 % of the elements have changed, most of them by one
bit. A difference holds the exclusive or (XOR) of the old and the new bits. If few elements have
changed, it holds the gaps between their positions and the XOR of each; otherwise the XOR of all
elements. Bytes of equal significance are grouped, and zlib encodes runs of zeros, and bytes by
frequency. With 2 % of the elements changed, this takes 0.20 bits for each bfloat16 element
(measured); the theoretical limit is 0.19. zlib comes with every Python. Its search for repetitions
is off, because such data has none, so newer codecs with a better search would not help.

Tensors are cut into spans, which several threads process. In memory the tensors lie in the order of
their names, each at a multiple of ALIGNMENT.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from pccl.ext import ffi
from pccl.protocol import messages
from pccl.protocol.messages import NAME_CHARS_MAX
from pccl.runtime.client.memory import HostView
from pccl.runtime.client.sync import reserve
from pccl.runtime.digest import DIGEST_BYTES, SPAN_BYTES, digests, each_span, root_digest
from pccl.support import require
from pccl.tensors import Array, Buffer
from pccl.weights.client import Blob

Words = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]

U64 = Annotated[int, Meta(ge=0)]

ALIGNMENT = 64
HEAD_BYTES_MAX = 256 << 20  # enough for a million tensors
SPARSE_UP_TO = 1 / 6  # the share of changed elements above which the XOR of all elements is smaller
# encoding, bytes of a gap, changed elements, bytes, packed bytes
_HEADER = struct.Struct("<BBxxIII")


class Module(Protocol):
    """torch.nn.Module."""

    def state_dict(self) -> Mapping[str, Any]: ...


Parameters = Mapping[str, Array] | Module


class How(IntEnum):
    SAME = 0
    SPARSE = 1
    DENSE = 2


class Damaged(ValueError):
    """The bytes of a package are not a difference, or a head, for these tensors."""


def words(data: Bytes, itemsize: int) -> Words:
    """Memory as unsigned integers of an element's size."""
    size = itemsize if itemsize in (1, 2, 4, 8) and data.nbytes % itemsize == 0 else 1
    found: Words = data.view(np.dtype(f"u{size}"))
    return found


def difference(old: Words, new: Words) -> bytes:
    """The bytes that turn a span's old content into the new one."""
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
        The number of bytes of `data` that it used.

    Raises:
        Damaged: `data` is not a difference of such a span; the content may have changed.
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
        content ^= _from_planes(raw, size)
        return end
    gaps = _from_planes(raw[: count * width], width).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if gaps.size and (gaps.min() < 0 or places.min() < 0 or places[-1] >= content.size):
        raise Damaged("it leads out of the tensor")
    content[places] ^= _from_planes(raw[count * width :], size)
    return end


def _planes(values: Words) -> bytes:
    """The bytes of all values, those of equal significance together."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return columns.T.tobytes()


def _from_planes(planes: memoryview, size: int) -> Words:
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


class Tensor(Struct, array_like=True, frozen=True):
    """One tensor of a version; `nbytes` is its number of bytes in the body."""

    name: str
    dtype: U64
    count: U64
    layout: str
    digest: bytes
    nbytes: U64


class Head(Struct, array_like=True, frozen=True):
    """The head of a package; `base` is the version to which the differences apply, or 0."""

    version: U64
    base: U64
    tensors: tuple[Tensor, ...]

    @property
    def content(self) -> bytes:
        return root_digest(b"".join(tensor.digest for tensor in self.tensors))


_decoder = msgspec.msgpack.Decoder(Head)


def read_head(data: memoryview) -> Head:
    """Decodes a head; raises Damaged if it is not one."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its head is not a head: {error}") from None


class Tensors:
    """The parameters of a program.

    Args:
        parameters: by name; numpy arrays or torch tensors, on the CPU or a CUDA device. Or the
            module with them.
        writable: whether the program writes to them.

    Raises:
        ValueError, UnsupportedError: there are no parameters, or pccl does not support the arrays.
    """

    def __init__(self, parameters: Parameters, *, writable: bool) -> None:
        self._module: Any = parameters if hasattr(parameters, "state_dict") else None
        named: Any = parameters if self._module is None else self._module.state_dict()
        require("parameters", named, Mapping)
        if not named:
            raise ValueError("there are no parameters")
        self._names = sorted(named)
        if any(not 0 < len(name) <= NAME_CHARS_MAX for name in self._names):
            raise ValueError(f"a parameter's name has 1 to {NAME_CHARS_MAX} characters")
        self._buffers = [Buffer.of(named[name], writable=writable) for name in self._names]
        self._starts, at = [], 0
        for buffer in self._buffers:
            self._starts.append(at)
            at += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = at  # bytes of memory for all of them

    def stretch(self) -> Bytes:
        """New memory for all tensors, with zeros between them."""
        memory: Bytes = np.frombuffer(ffi.buffer(reserve(self.nbytes)), np.uint8)
        for start, buffer in zip(self._starts, self._buffers, strict=True):
            end = start + buffer.nbytes
            memory[end : end + -buffer.nbytes % ALIGNMENT] = 0
        return memory

    def read(self) -> tuple[list[Bytes], object]:
        """The current content (not a copy, on the CPU), and an object that keeps it alive.

        Raises ArgumentError: a tensor has other memory by now.
        """
        self._check()
        view = HostView(self._buffers)
        each = [
            np.frombuffer(ffi.buffer(ffi.cast("char *", one.address), one.nbytes), np.uint8)
            for one in view.buffers
        ]
        return each, view

    def write(self, memory: Bytes, which: Sequence[int]) -> None:
        """Copies the tensors with these indices from a stretch to the program's parameters.

        Raises ArgumentError: a tensor has other memory by now.
        """
        self._check()
        chosen = [self._buffers[index] for index in which]
        view = HostView(chosen, range(len(chosen)))
        starts = [self._starts[index] for index in which]

        def copy(index: int, begin: int, end: int) -> None:
            target = ffi.cast("char *", view.buffers[index].address + begin)
            ffi.memmove(target, memory[starts[index] + begin : starts[index] + end], end - begin)

        each_span([buffer.nbytes for buffer in chosen], copy)
        view.write_back(range(len(chosen)))

    def _check(self) -> None:
        now = {} if self._module is None else self._module.state_dict()
        for name, buffer in zip(self._names, self._buffers, strict=True):
            buffer.check(name, now.get(name, buffer.owner))

    def within(self, memory: Bytes) -> list[Bytes]:
        return [
            memory[start : start + buffer.nbytes]
            for start, buffer in zip(self._starts, self._buffers, strict=True)
        ]

    def head(self, version: int, base: int, found: Sequence[bytes], sizes: Sequence[int]) -> Head:
        """The head of a package, given the digest and the bytes in the body of each tensor."""
        each = zip(self._names, self._buffers, found, sizes, strict=True)
        tensors = tuple(
            Tensor(name, buffer.dtype.value, buffer.count, str(buffer.layout or ""), digest, size)
            for name, buffer, digest, size in each
        )
        return Head(version, base, tensors)

    @property
    def sizes(self) -> list[int]:
        return [buffer.nbytes for buffer in self._buffers]

    def mismatch(self, head: Head) -> str:
        """The difference between a head's tensors and these; empty if they match."""
        theirs, ours = {one.name: one for one in head.tensors}, {*self._names}
        for name in sorted(theirs.keys() ^ ours):
            where = "here" if name in ours else "in what was published"
            return f"{name!r} is only {where}"
        if [one.name for one in head.tensors] != self._names:
            return "the tensors are not in order"
        for one, buffer in zip(head.tensors, self._buffers, strict=True):
            here = buffer.count, buffer.dtype.value, str(buffer.layout or "")
            if (one.count, one.dtype, one.layout) != here:
                published = messages.elements(one.count, one.dtype, one.layout)
                return f"{one.name!r} has {published} where {messages.elements(*here)} are here"
            if len(one.digest) != DIGEST_BYTES:
                return f"the digest of {one.name!r} is none"
        return ""

    def differences(self, old: Bytes, new: Sequence[Bytes]) -> tuple[list[bytes], list[int]]:
        """The bytes that turn the tensors of a stretch into new ones, and the size by tensor."""
        before = self.within(old)
        found: dict[tuple[int, int], bytes] = {}

        def compare(index: int, begin: int, end: int) -> None:
            size = self._buffers[index].dtype.itemsize
            pair = (words(each[index][begin:end], size) for each in (before, new))
            found[index, begin] = difference(*pair)

        each_span([each.nbytes for each in new], compare)
        sizes = [0] * len(new)
        for (index, _), data in found.items():
            sizes[index] += len(data)
        return [found[key] for key in sorted(found)], sizes

    def apply(self, memory: Bytes, head: Head, body: memoryview) -> None:
        """Applies the differences of a package to a stretch, in place.

        Raises Damaged: the body is not a difference of these tensors; the stretch is then torn.
        """
        at = 0
        for index, (own, tensor) in enumerate(zip(self.within(memory), head.tensors, strict=True)):
            data, at = body[at : at + tensor.nbytes], at + tensor.nbytes
            taken = 0
            size = self._buffers[index].dtype.itemsize
            for begin in range(0, own.nbytes, SPAN_BYTES):
                span = words(own[begin : begin + SPAN_BYTES], size)
                taken += apply(span, data[taken:])
            if taken != tensor.nbytes:
                raise Damaged(f"that of {tensor.name!r} has another size")


def blob_of(head: Head, body: Bytes) -> Blob:
    """A package. The same content always gives the same bytes."""
    encoded = memoryview(msgspec.msgpack.encode(head))
    return Blob(head.version, head.base, head.content, encoded, memoryview(body.data))


def found_digests(each: Sequence[Bytes]) -> list[bytes]:
    return [one.root for one in digests([(one.ctypes.data, one.nbytes) for one in each])]
