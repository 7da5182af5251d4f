"""XXH3-128 digests of memory, by leaves.

The digest of n bytes is XXH3-128 over the digests of its leaves of 4 MiB (the last may be shorter),
so that leaves can be hashed in any order and by several threads. xxhash lets go of the GIL while it
hashes. Fine against drift and broken memory; not cryptographic, so no defence against malice.
"""

from __future__ import annotations

import xxhash

from pccl.ext import ffi

LEAF_BYTES = 4 << 20


def digest(address: int, nbytes: int) -> bytes:
    """The 16-byte digest of `nbytes` of memory at `address`, which must not change meanwhile."""
    tree = xxhash.xxh3_128()
    if nbytes:
        view = memoryview(ffi.buffer(ffi.cast("char *", address), nbytes))
        for begin in range(0, nbytes, LEAF_BYTES):
            tree.update(xxhash.xxh3_128_digest(view[begin : begin + LEAF_BYTES]))
    return tree.digest()
