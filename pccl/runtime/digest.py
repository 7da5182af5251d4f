"""XXH3-128 digests of memory, by leaves.

The digest of n bytes is XXH3-128 over the digests of its leaves of 4 MiB (the last may be
shorter). So several threads can hash leaves in any order, and a receiver that knows the leaves'
digests can verify them one by one. xxhash releases the GIL while it hashes, at about the speed at
which one core can read memory. The digest detects drift and broken memory. It is not cryptographic,
so it does not protect against attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from pccl.ext import ffi
from pccl.runtime.spans import SPAN_BYTES, each_span

LEAF_BYTES = 4 << 20
DIGEST_BYTES = 16
assert SPAN_BYTES % LEAF_BYTES == 0


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of some memory, and the table of its leaves' digests, 16 bytes each."""

    root: bytes
    table: bytes


def leaf_digest(address: int, nbytes: int) -> bytes:
    return xxhash.xxh3_128_digest(ffi.buffer(ffi.cast("char *", address), nbytes))


def root_digest(table: bytes | bytearray | memoryview) -> bytes:
    """The digest of memory whose leaves have these digests."""
    return xxhash.xxh3_128_digest(table)


def leaf_count(nbytes: int) -> int:
    return -(-nbytes // LEAF_BYTES)


def digest(address: int, nbytes: int) -> bytes:
    """The 16-byte digest of `nbytes` of memory at `address`, which must not change meanwhile."""
    return digests([(address, nbytes)])[0].root


def digests(memory: Sequence[tuple[int, int]], threads: int | None = None) -> list[Digest]:
    """The digests of several areas of memory (address, bytes), which must not change meanwhile.

    Args:
        memory: what to hash.
        threads: how many threads hash; None: as many as help. The result does not depend on it.
    """
    tables = [bytearray(DIGEST_BYTES * leaf_count(nbytes)) for _, nbytes in memory]

    def hash_span(index: int, first: int, end: int) -> None:
        address, _ = memory[index]
        for begin in range(first, end, LEAF_BYTES):
            at = begin // LEAF_BYTES * DIGEST_BYTES
            found = leaf_digest(address + begin, min(LEAF_BYTES, end - begin))
            tables[index][at : at + DIGEST_BYTES] = found

    each_span([nbytes for _, nbytes in memory], hash_span, threads)
    return [Digest(root_digest(table), bytes(table)) for table in tables]
