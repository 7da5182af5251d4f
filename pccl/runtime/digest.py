"""Large memory: its XXH3-128 digests, and other work on it, span by span.

The digest of n bytes is XXH3-128 over the digests of its leaves of 4 MiB (the last may be
shorter). So several threads can hash leaves in any order, and a receiver that knows the leaves'
digests can verify them one by one. xxhash releases the GIL while it hashes, about as fast as one
core can read memory. The digest detects drift and broken memory. It is not cryptographic, so it
does not protect against attacks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from pccl.ext import ffi
from pccl.runtime import limits
from pccl.runtime.signals import aside

LEAF_BYTES = 4 << 20
DIGEST_BYTES = 16
SPAN_BYTES = 4 * LEAF_BYTES  # a thread takes this much at a time
ALONE_BYTES = 32 << 20  # below this, starting threads costs more than they save
_Span: TypeAlias = tuple[int, int, int]


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
        threads: how many threads hash; None: as many as help. This does not affect the result.
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


def each_span(
    sizes: Sequence[int], work: Callable[[int, int, int], None], threads: int | None = None
) -> None:
    """Calls work(i, begin, end), in any order, for all spans of several areas of memory.

    Area i has sizes[i] bytes. The work must release the GIL, as hashing and copying do. `threads`:
    how many; None: as many as help.
    """
    if threads is None:
        threads = 1 if sum(sizes) < ALONE_BYTES else min(_cores(), limits.SPAN_THREADS_MAX)
    if threads == 1:
        for span in _spans(sizes):
            work(*span)
        return
    # In a separate thread: after an exception in the caller, no thread may still use its memory.
    aside(lambda: _share(list(_spans(sizes)), work, threads))


def _share(spans: list[_Span], work: Callable[[int, int, int], None], threads: int) -> None:
    """Does the work in up to `threads` threads, including this one."""
    left = iter(spans)  # next() of a list's iterator may be called by several threads
    failures: list[BaseException] = []

    def take_part() -> None:
        try:
            for span in left:
                if not failures:
                    work(*span)
        except BaseException as error:
            failures.append(error)

    helpers = []
    for _ in range(threads - 1):
        helper = threading.Thread(target=take_part, name="pccl-span", daemon=True)
        with contextlib.suppress(RuntimeError):  # fewer threads do it then
            helper.start()
            helpers.append(helper)
    take_part()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _spans(sizes: Sequence[int]) -> Iterator[_Span]:
    for index, nbytes in enumerate(sizes):
        for begin in range(0, nbytes, SPAN_BYTES):
            yield index, begin, min(begin + SPAN_BYTES, nbytes)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
