"""Reduces the data of small collectives, which travels with the votes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.types import DataType, ReduceOp

KEPT_BYTES = 4 << 20  # the allocator keeps at most twice as much


def keep_memory() -> None:
    """Makes the allocator keep the memory that a master frees after each round.

    By default glibc returns free memory at the top of a heap to the system when there are 128 KiB
    of it. Until the program has freed a large block, glibc also takes large blocks directly from
    the system. So each page of the votes, the result and the answers would cause a page fault in
    each round. These faults cost twice as much as everything else.
    """
    with contextlib.suppress(MemoryError):
        bytearray(KEPT_BYTES)


_allocate = ffi.new_allocator(should_clear_after_alloc=False)


def combine(work: m.Spec, parts: Sequence[m.Data]) -> m.Data:
    """Reduces two or more contributions of `work.count` elements each, in their order.

    It uses the ring's kernels, so 16-bit floats are rounded once per contribution here, too.
    """
    dtype = DataType(work.dtype)
    if work.redop == ReduceOp.AVG.value and dtype.is_integer:
        from pccl.runtime import averages  # imports numpy

        return averages.average(parts, dtype)
    first, *others = (ffi.from_buffer("unsigned char[]", part) for part in parts)
    out = _allocate("unsigned char[]", len(first))
    for index, part in enumerate(others, 2):
        divisor = index if index == len(parts) else 1  # AVG divides at the end
        status = lib.pccl_reduce(work.dtype, work.redop, out, first, part, work.count, divisor)
        assert status == 0, "the votes have been checked"
        first = out
    return memoryview(ffi.buffer(out))
