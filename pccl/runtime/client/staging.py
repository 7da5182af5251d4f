"""The memory into which a receiver fetches shared state, and the verification of every leaf.

That is the memory of the shared state itself if the plan says so, because the old content is worth
nothing any more. Otherwise it is staging memory, and the old content stays until all has arrived.

An entry of several leaves has a table of their digests, which is fetched first. The elected digest
verifies the table, and the table verifies each leaf when it arrives. So wrong data is detected at
once, and fetched again from another holder.

The engine numbers pieces: piece `entry` is an entry's table, piece `entries + entry` its content.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.runtime.client.memory import Pieces
from pccl.runtime.digest import (
    DIGEST_BYTES,
    LEAF_BYTES,
    Digest,
    leaf_count,
    leaf_digest,
    root_digest,
)
from pccl.runtime.spans import each_span

# Not cleared: staging memory is used only once all of it is written, and clearing costs time.
_allocate = ffi.new_allocator(should_clear_after_alloc=False)
HUGE_PAGES_FROM = 4 << 20  # bytes

Verdict = tuple[int, int, bool]  # piece, leaf, whether it is correct


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of one entry of the shared state; `layout`: its order (pccl.tensors.layout)."""

    name: str
    dtype: int
    count: int
    any_content: bool
    address: int
    nbytes: int
    layout: str = ""


def served(regions: Sequence[Region], digests: Sequence[Digest]) -> tuple[Pieces, list[Any]]:
    """The pieces that a holder serves, and the objects that keep their tables in memory."""
    tables = {
        index: ffi.from_buffer("char[]", digest.table)
        for index, digest in enumerate(digests)
        if len(digest.table) > DIGEST_BYTES
    }
    pieces = [(index, _address(table), len(table)) for index, table in tables.items()]
    pieces += [(len(regions) + i, r.address, r.nbytes) for i, r in enumerate(regions)]
    return pieces, list(tables.values())


@dataclass(slots=True)
class _Entry:
    """An entry that is being fetched."""

    region: Region
    elected: bytes
    content: Any  # a char array, or a pointer into the memory of the shared state
    table: Any  # a char array; None for an entry of one leaf
    table_arrived: int = 0  # leaves of the table so far
    table_proven: bool = False
    waiting: list[int] = field(default_factory=list)  # leaves that arrived before it was
    proven: int = 0  # leaves of the content so far


class Staging:
    """The memory for the entries that a plan tells this peer to fetch.

    Args:
        plan: the entries and their elected digests.
        regions: the shared state.
    """

    def __init__(self, plan: m.SyncPlan, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._in_place = plan.in_place
        self._entries: dict[int, _Entry] = {}
        for index, elected in zip(plan.fetch, plan.digests, strict=True):
            region = regions[index]
            leaves = leaf_count(region.nbytes)
            in_place = ffi.cast("char *", region.address)
            content = in_place if plan.in_place else reserve(region.nbytes)
            table = _allocate("char[]", leaves * DIGEST_BYTES) if leaves > 1 else None
            self._entries[index] = _Entry(region, elected, content, table)
        self.bytes_total = sum(entry.region.nbytes for entry in self._entries.values())
        self.bytes_proven = 0
        self.entries_proven = sum(not entry.region.nbytes for entry in self._entries.values())

    @property
    def entries_total(self) -> int:
        """The number of entries to fetch."""
        return len(self._entries)

    def pieces(self) -> Pieces:
        """The memory into which the engine writes."""
        tables = [
            (index, _address(entry.table), len(entry.table))
            for index, entry in self._entries.items()
            if entry.table is not None
        ]
        return tables + [
            (len(self._regions) + index, _address(entry.content), entry.region.nbytes)
            for index, entry in self._entries.items()
        ]

    def content(self, index: int) -> Any:
        """The memory of an entry, as a buffer."""
        entry = self._entries[index]
        return ffi.buffer(entry.content, entry.region.nbytes)

    def judge(self, piece: int, leaf: int) -> list[Verdict]:
        """Verifies a leaf that has arrived, or postpones that until its table is proven.

        Returns:
            Verdicts on this leaf, and on leaves that it allows to be verified.
        """
        if piece < len(self._regions):
            return self._judge_table(self._entries[piece], piece)
        entry = self._entries[piece - len(self._regions)]
        if entry.table is not None and not entry.table_proven:
            entry.waiting.append(leaf)
            return []
        return [self._judge_leaf(entry, piece, leaf)]

    def _judge_table(self, entry: _Entry, piece: int) -> list[Verdict]:
        entry.table_arrived += 1
        leaves = leaf_count(len(entry.table))
        if entry.table_arrived < leaves:
            return []
        entry.table_proven = root_digest(ffi.buffer(entry.table)) == entry.elected
        entry.table_arrived = 0
        verdicts = [(piece, leaf, entry.table_proven) for leaf in range(leaves)]
        if entry.table_proven:
            content = piece + len(self._regions)
            verdicts += [self._judge_leaf(entry, content, leaf) for leaf in entry.waiting]
        return verdicts

    def _judge_leaf(self, entry: _Entry, piece: int, leaf: int) -> Verdict:
        begin = leaf * LEAF_BYTES
        nbytes = min(LEAF_BYTES, entry.region.nbytes - begin)
        found = leaf_digest(_address(entry.content) + begin, nbytes)
        if entry.table is None:
            good = root_digest(found) == entry.elected
        else:
            at = leaf * DIGEST_BYTES
            good = ffi.buffer(entry.table)[at : at + DIGEST_BYTES] == found
        if good:
            self.bytes_proven += nbytes
            entry.proven += 1
            self.entries_proven += entry.proven == leaf_count(entry.region.nbytes)
        return piece, leaf, good

    def differences(self) -> Iterator[m.Difference]:
        """How each fetched entry differs from the user's memory; to be called before `install`."""
        found = ffi.new("pccl_difference *")
        for index, entry in self._entries.items():
            region = entry.region
            user = ffi.cast("void *", region.address)
            lib.pccl_compare(region.dtype, user, entry.content, region.count, found)
            yield m.Difference(index, found.bytes, found.ulp, found.nans_a, found.nans_b)

    def install(self) -> tuple[int, ...]:
        """Copies what is not there yet to the user's memory. Returns the indices of the regions."""
        entries = [] if self._in_place else list(self._entries.values())

        def copy(index: int, begin: int, end: int) -> None:
            entry = entries[index]
            user = ffi.cast("char *", entry.region.address)
            lib.memcpy(user + begin, entry.content + begin, end - begin)

        each_span([entry.region.nbytes for entry in entries], copy)
        return tuple(self._entries)


def reserve(nbytes: int) -> Any:
    """An uninitialised char array, in huge pages if possible.

    The first access to each small page would cost as much time as the transfer on a fast link.
    """
    if nbytes < HUGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _allocate("char[]", nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return ffi.from_buffer("char[]", memory)


def _address(array: Any) -> int:
    return int(ffi.cast("uintptr_t", array))
