"""XXH3-128 digests of memory, by leaves.

The digest of n bytes is XXH3-128 over the digests of its leaves of 4 MiB (the last may be
shorter), so that leaves can be hashed in any order and by several threads, and be proven one by one
by whoever knows their digests. xxhash lets go of the GIL while it hashes, at about the speed at
which one core can read memory. Fine against drift and broken memory; not cryptographic, so no
defence against malice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from pccl.ext import ffi

LEAF_BYTES = 4 << 20
DIGEST_BYTES = 16
THREADS_MAX = 8  # they saturate the memory of any machine
SPAN_LEAVES = 4  # that one thread hashes at a stretch
ALONE_BYTES = 8 * LEAF_BYTES  # below this, starting threads costs more than they save


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of some memory, and the table of those of its leaves, 16 bytes each."""

    root: bytes
    table: bytes


def leaf_digest(address: int, nbytes: int) -> bytes:
    """The 16-byte digest of one leaf."""
    return xxhash.xxh3_128_digest(ffi.buffer(ffi.cast("char *", address), nbytes))


def root_digest(table: bytes | bytearray | memoryview) -> bytes:
    """The digest of memory whose leaves have these digests."""
    return xxhash.xxh3_128_digest(table)


def leaf_count(nbytes: int) -> int:
    """How many leaves so many bytes have."""
    return -(-nbytes // LEAF_BYTES)


def digest(address: int, nbytes: int) -> bytes:
    """The 16-byte digest of `nbytes` of memory at `address`, which must not change meanwhile."""
    return digests([(address, nbytes)])[0].root


def digests(memory: Sequence[tuple[int, int]], threads: int | None = None) -> list[Digest]:
    """The digests of several stretches of memory (address, bytes), which must not change meanwhile.

    Args:
        memory: what to hash.
        threads: how many threads hash; None: as many as help. The result does not depend on it.
    """
    tables = [bytearray(DIGEST_BYTES * leaf_count(nbytes)) for _, nbytes in memory]

    def hash_span(span: tuple[int, int]) -> None:
        index, first = span
        address, nbytes = memory[index]
        end = min(first + SPAN_LEAVES * LEAF_BYTES, nbytes)
        for begin in range(first, end, LEAF_BYTES):
            at = begin // LEAF_BYTES * DIGEST_BYTES
            found = leaf_digest(address + begin, min(LEAF_BYTES, end - begin))
            tables[index][at : at + DIGEST_BYTES] = found

    if threads is None:
        total = sum(nbytes for _, nbytes in memory)
        threads = 1 if total < ALONE_BYTES else min(_cores(), THREADS_MAX)
    if threads == 1:
        for span in _spans(memory):
            hash_span(span)
    else:
        with ThreadPoolExecutor(threads, "pccl-digest") as pool:
            for _ in pool.map(hash_span, _spans(memory)):
                pass
    return [Digest(root_digest(table), bytes(table)) for table in tables]


def _spans(memory: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where each span begins: an index and an offset."""
    for index, (_, nbytes) in enumerate(memory):
        for first in range(0, nbytes, SPAN_LEAVES * LEAF_BYTES):
            yield index, first


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
