"""The parameters of a program as one stretch of memory, and the heads that describe it.

The tensors lie in the order of their names, each from a multiple of ALIGNMENT on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from pccl.ext import ffi
from pccl.protocol import messages
from pccl.protocol.messages import NAME_CHARS_MAX
from pccl.runtime.client.associate import Parcel
from pccl.runtime.client.memory import HostView
from pccl.runtime.client.sync import reserve
from pccl.runtime.digest import DIGEST_BYTES, digests, root_digest
from pccl.runtime.spans import SPAN_BYTES, each_span
from pccl.tensors.arrays import Array, Buffer
from pccl.weights.delta import Bytes, Damaged, apply, difference, words

ALIGNMENT = 64
HEAD_BYTES_MAX = 256 << 20  # of a million tensors

U64 = Annotated[int, Meta(ge=0)]


class Tensor(Struct, array_like=True, frozen=True):
    """One tensor of a version: what it is, the digest of its content, its bytes in the body."""

    name: str
    dtype: U64
    count: U64
    layout: str
    digest: bytes
    nbytes: U64


class Head(Struct, array_like=True, frozen=True):
    """The head of a package: the base is that of the package."""

    version: U64
    base: U64
    tensors: tuple[Tensor, ...]

    @property
    def content(self) -> bytes:
        """The digest of all."""
        return root_digest(b"".join(tensor.digest for tensor in self.tensors))


_decoder = msgspec.msgpack.Decoder(Head)


def read_head(data: memoryview) -> Head:
    """Raises Damaged if it is no head."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its head is no head: {error}") from None


class Tensors:
    """The parameters of a program.

    Args:
        parameters: by name; numpy arrays or torch tensors, on the CPU or a CUDA device.
        writable: whether they are going to be written.

    Attributes:
        nbytes: of the stretch.

    Raises:
        ValueError, AssertionError, UnsupportedError: they are none, or not arrays that pccl takes.
    """

    def __init__(self, parameters: Mapping[str, Array], *, writable: bool) -> None:
        if not parameters:
            raise ValueError("there are no parameters")
        self._names = sorted(parameters)
        if any(not 0 < len(name) <= NAME_CHARS_MAX for name in self._names):
            raise ValueError(f"a parameter's name has 1 to {NAME_CHARS_MAX} characters")
        self._buffers = [Buffer.of(parameters[name], writable=writable) for name in self._names]
        self._starts, at = [], 0
        for buffer in self._buffers:
            self._starts.append(at)
            at += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = at

    def stretch(self) -> Bytes:
        """New memory for all of them, with zeros between them."""
        memory: Bytes = np.frombuffer(ffi.buffer(reserve(self.nbytes)), np.uint8)
        for start, buffer in zip(self._starts, self._buffers, strict=True):
            end = start + buffer.nbytes
            memory[end : end + -buffer.nbytes % ALIGNMENT] = 0
        return memory

    def read(self) -> tuple[list[Bytes], object]:
        """What is in them now, which on the CPU is no copy, and an object that keeps it there."""
        view = HostView(self._buffers)
        each = [
            np.frombuffer(ffi.buffer(ffi.cast("char *", view.address(i)), one.nbytes), np.uint8)
            for i, one in enumerate(self._buffers)
        ]
        return each, view

    def write(self, memory: Bytes, which: Sequence[int]) -> None:
        """Copies some of them from a stretch to where the program has them, by their indices."""
        chosen = [self._buffers[index] for index in which]
        view = HostView(chosen, range(len(chosen)))
        starts = [self._starts[index] for index in which]

        def copy(index: int, begin: int, end: int) -> None:
            target = ffi.cast("char *", view.address(index) + begin)
            ffi.memmove(target, memory[starts[index] + begin : starts[index] + end], end - begin)

        each_span([buffer.nbytes for buffer in chosen], copy)
        view.write_back(range(len(chosen)))

    def within(self, memory: Bytes) -> list[Bytes]:
        """Each of them in a stretch."""
        return [
            memory[start : start + buffer.nbytes]
            for start, buffer in zip(self._starts, self._buffers, strict=True)
        ]

    def head(self, version: int, base: int, found: Sequence[bytes], sizes: Sequence[int]) -> Head:
        """The head of a package with such digests of tensors, and bytes of each."""
        each = zip(self._names, self._buffers, found, sizes, strict=True)
        tensors = tuple(
            Tensor(name, buffer.dtype.value, buffer.count, str(buffer.layout or ""), digest, size)
            for name, buffer, digest, size in each
        )
        return Head(version, base, tensors)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each in a whole version."""
        return [buffer.nbytes for buffer in self._buffers]

    def mismatch(self, head: Head) -> str:
        """How those of a head differ from these; empty if they are alike."""
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
        """What turns the tensors of a stretch into others: pieces, and the bytes of each tensor."""
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

        Raises:
            Damaged: it is no difference to these tensors; the stretch is torn.
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


def parcel_of(head: Head, body: Bytes) -> Parcel:
    """A package: whoever makes it of the same content makes the same bytes."""
    encoded = memoryview(msgspec.msgpack.encode(head))
    return Parcel.of(head.version, head.base, head.content, encoded, memoryview(body.data))


def found_digests(each: Sequence[Bytes]) -> list[bytes]:
    """The digest of each tensor."""
    return [one.root for one in digests([(one.ctypes.data, one.nbytes) for one in each])]
