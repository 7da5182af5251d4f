"""Small collectives, whose data travels with the votes: reading, reducing and storing it."""

from __future__ import annotations

from collections.abc import Sequence

from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.tensors.arrays import Buffer


def contribution(buffer: Buffer) -> bytes:
    """A copy of the buffer's bytes."""
    return bytes(ffi.buffer(ffi.cast("char *", buffer.address), buffer.nbytes))


def store(buffer: Buffer, data: bytes) -> None:
    """Overwrites the buffer, which is as long as the data."""
    assert len(data) == buffer.nbytes
    ffi.memmove(ffi.cast("char *", buffer.address), data, len(data))


def combine(work: m.Work, parts: Sequence[bytes]) -> bytes:
    """Reduces contributions of `work.count` elements each, in their order.

    By the kernels of the ring, so a 16-bit float is rounded once for each contribution here too.
    """
    total = bytearray(parts[0])
    out = ffi.from_buffer("unsigned char[]", total)
    for index, part in enumerate(parts[1:], 2):
        divisor = index if index == len(parts) else 1  # AVG divides at the end
        status = lib.pccl_reduce(work.dtype, work.redop, out, out, part, work.count, divisor)
        assert status == 0, "the votes have been checked"
    return bytes(total)
