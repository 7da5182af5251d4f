"""One synchronization of shared state, in the thread of the caller.

The peer hashes its entries and offers them. It fetches the entries in the master's plan, verifies
them leaf by leaf, and votes. The master may replace a plan at any time, for example when a holder
dies.

If this peer's content is out of date, the plan says to fetch in place. Then a failed call leaves
the shared state torn, and manifests say so until a call succeeds. Otherwise the peer fetches into
staging memory, and overwrites the caller's memory only when all receivers have voted; so a failed
call changes nothing.

An entry of several leaves has a table of their digests, which is fetched first. The elected digest
verifies the table, and the table verifies each leaf when the leaf arrives. So wrong data is
detected at once, and fetched again from another holder.

The engine numbers pieces: piece `entry` is an entry's table, piece `entries + entry` its content.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pccl.ext import address_of, ffi, lib
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Leaf, Note, Steps
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.memory import Pieces
from pccl.runtime.digest import (
    DIGEST_BYTES,
    LEAF_BYTES,
    Digest,
    digests,
    each_span,
    leaf_count,
    leaf_digest,
    root_digest,
)
from pccl.tensors import Buffer
from pccl.types import SharedStateProgress

# Not cleared: nothing reads staging memory before all of it is written, and clearing costs time.
_allocate = ffi.new_allocator(should_clear_after_alloc=False)
HUGE_PAGES_FROM = 4 << 20  # bytes

LeafResult = tuple[int, int, bool]  # piece, leaf, whether it is correct


def served(memory: Sequence[Buffer], digests: Sequence[Digest]) -> tuple[Pieces, list[Any]]:
    """The pieces that a holder serves, and the objects that keep their tables in memory."""
    tables = {
        index: ffi.from_buffer("char[]", digest.table)
        for index, digest in enumerate(digests)
        if len(digest.table) > DIGEST_BYTES
    }
    pieces = [(index, address_of(table), len(table)) for index, table in tables.items()]
    pieces += [(len(memory) + i, one.address, one.nbytes) for i, one in enumerate(memory)]
    return pieces, list(tables.values())


@dataclass(slots=True)
class _Entry:
    user: Buffer  # the memory of the shared state
    nbytes: int
    elected: bytes
    content: Any  # a char array, or a pointer into the memory of the shared state
    table: Any  # a char array; None for an entry of one leaf
    table_arrived: int = 0  # leaves of the table so far
    table_proven: bool = False
    waiting: list[int] = field(default_factory=list)  # leaves that arrived before the table
    proven: int = 0  # leaves of the content so far


class Staging:
    """The memory for the entries that a plan tells this peer to fetch."""

    def __init__(self, plan: m.SyncPlan, memory: Sequence[Buffer]) -> None:
        self._all = len(memory)
        self._in_place = plan.in_place
        self._entries: dict[int, _Entry] = {}
        for index, elected in zip(plan.fetch, plan.digests, strict=True):
            user, nbytes = memory[index], memory[index].nbytes
            leaves = leaf_count(nbytes)
            content = ffi.cast("char *", user.address) if plan.in_place else reserve(nbytes)
            table = _allocate("char[]", leaves * DIGEST_BYTES) if leaves > 1 else None
            self._entries[index] = _Entry(user, nbytes, elected, content, table)
        self.bytes_total = sum(entry.nbytes for entry in self._entries.values())
        self.bytes_proven = 0
        self.entries_proven = sum(not entry.nbytes for entry in self._entries.values())

    @property
    def entries_total(self) -> int:
        return len(self._entries)

    def pieces(self) -> Pieces:
        tables = [
            (index, address_of(entry.table), len(entry.table))
            for index, entry in self._entries.items()
            if entry.table is not None
        ]
        return tables + [
            (self._all + index, address_of(entry.content), entry.nbytes)
            for index, entry in self._entries.items()
        ]

    def content(self, index: int) -> Any:
        entry = self._entries[index]
        return ffi.buffer(entry.content, entry.nbytes)

    def verify(self, piece: int, leaf: int) -> list[LeafResult]:
        """Verifies a leaf that has arrived, or waits until its table is proven.

        Returns:
            The results for this leaf, and for leaves that waited for it.
        """
        if piece < self._all:
            return self._verify_table(self._entries[piece], piece)
        entry = self._entries[piece - self._all]
        if entry.table is not None and not entry.table_proven:
            entry.waiting.append(leaf)
            return []
        return [self._verify_leaf(entry, piece, leaf)]

    def _verify_table(self, entry: _Entry, piece: int) -> list[LeafResult]:
        entry.table_arrived += 1
        leaves = leaf_count(len(entry.table))
        if entry.table_arrived < leaves:
            return []
        entry.table_proven = root_digest(ffi.buffer(entry.table)) == entry.elected
        entry.table_arrived = 0
        results = [(piece, leaf, entry.table_proven) for leaf in range(leaves)]
        if entry.table_proven:
            content = piece + self._all
            results += [self._verify_leaf(entry, content, leaf) for leaf in entry.waiting]
        return results

    def _verify_leaf(self, entry: _Entry, piece: int, leaf: int) -> LeafResult:
        begin = leaf * LEAF_BYTES
        nbytes = min(LEAF_BYTES, entry.nbytes - begin)
        found = leaf_digest(address_of(entry.content) + begin, nbytes)
        if entry.table is None:
            good = root_digest(found) == entry.elected
        else:
            at = leaf * DIGEST_BYTES
            good = ffi.buffer(entry.table)[at : at + DIGEST_BYTES] == found
        if good:
            self.bytes_proven += nbytes
            entry.proven += 1
            self.entries_proven += entry.proven == leaf_count(entry.nbytes)
        return piece, leaf, good

    def differences(self) -> Iterator[m.Difference]:
        """How each fetched entry differs from the user's memory. Call this before `install`."""
        found = ffi.new("pccl_difference *")
        for index, entry in self._entries.items():
            user, address = entry.user, ffi.cast("void *", entry.user.address)
            lib.pccl_compare(user.dtype.value, address, entry.content, user.count, found)
            yield m.Difference(index, found.bytes, found.ulp, found.nans_a, found.nans_b)

    def install(self) -> tuple[int, ...]:
        """Copies staged entries to the user's memory. Returns the indices of all fetched ones."""
        entries = [] if self._in_place else list(self._entries.values())

        def copy(index: int, begin: int, end: int) -> None:
            entry = entries[index]
            user = ffi.cast("char *", entry.user.address)
            lib.memcpy(user + begin, entry.content + begin, end - begin)

        each_span([entry.nbytes for entry in entries], copy)
        return tuple(self._entries)


def reserve(nbytes: int) -> Any:
    """An uninitialized char array, in huge pages if possible.

    The first access to each small page would cost as much time as the transfer on a fast link.
    """
    if nbytes < HUGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _allocate("char[]", nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return ffi.from_buffer("char[]", memory)


log = logging.getLogger("pccl")

BATCH = 64  # results on small entries, sent to the engine together


class Synchronization:
    """One peer's part in a synchronization, until its end. `Deadline.follow` drives `run`.

    After an exception the call is still in progress, and the caller must cancel it; the shared
    state is unchanged, torn (and `tear` was called), or completely overwritten.

    Attributes:
        hash_seconds: how long hashing took.
        error: the exception of the callback `progress`, if any. It ends the synchronization, unless
            the result is already certain.
    """

    def __init__(
        self,
        client: PeerClient,
        call: Call,  # a new call
        manifest: m.Manifest,  # the shared state, without digests
        memory: Sequence[Buffer],  # the memory of its entries, which must not change meanwhile
        owner: object,  # kept alive as long as the engine refers to the memory
        # called before these entries may be overwritten in part
        tear: Callable[[Sequence[int]], None],
        # called when the call has succeeded, and these entries have new content
        adopt: Callable[[effects.Synced, Sequence[int]], None],
        # called now and then with the progress of a transfer
        progress: Callable[[SharedStateProgress], None] | None = None,
    ) -> None:
        self._client, self._now = client, client.now
        self._call, self._manifest = call, manifest
        self._memory, self._owner = memory, owner
        self._tear, self._adopt = tear, adopt
        self._staging: Staging | None = None
        self._plan = m.SyncPlan(0, 0, (), (), (), ())
        self._op = 0
        self._remind_at = 0.0
        self._complete = False  # everything in the plan is here, and verified
        self._failure = ""  # why the fetch failed, until the master is told
        self._fail_at = 0.0
        self._failures = 0
        self._results: list[LeafResult] = []
        self._progress = _Progress(progress, client.now)
        self.hash_seconds = 0.0

    @property
    def error(self) -> Exception | None:
        return self._progress.error

    def run(self) -> Steps[effects.Synced | effects.Fail]:
        """Returns the end of the synchronization; on success the caller's memory is overwritten."""
        began = time.monotonic()
        found = digests([(one.address, one.nbytes) for one in self._memory])
        self.hash_seconds = time.monotonic() - began
        pieces, tables = served(self._memory, found)
        offered = zip(self._manifest.entries, found, strict=True)
        entries = tuple(replace(entry, digest=digest.root) for entry, digest in offered)
        manifest = replace(self._manifest, entries=entries)
        self._client.sync(self._call, manifest, pieces, (self._owner, found, tables))
        while True:
            match (yield from self._next()):
                case effects.Follow(_, plan, resumed):
                    self._follow(plan, resumed)
                case Leaf(op, piece, leaf) if op == self._op and self._staging is not None:
                    self._results += self._staging.verify(piece, leaf)
                case effects.Fetched(_, seq, True) if seq == self._plan.seq:
                    self._vote()
                case effects.Fetched(_, seq, False, why) if seq == self._plan.seq:
                    self._failure = why
                    self._fail_at = self._now() + limits.TRANSFER_FAILURE_S * 4**self._failures
                    self._failures = min(self._failures + 1, limits.TRANSFER_FAILURES_MAX)
                case effects.Answer(_, effects.Synced() as synced):
                    self._install(synced)
                    return synced
                case effects.Fail() as fail:
                    return fail
            if self._results and not (self._call.has_notes and len(self._results) < BATCH):
                self._client.verified(self._op, self._results)
                self._results = []
            if not self._progress.report():
                why = "the callback of its caller has failed"
                self._client.time_out(self._call, why)

    def _next(self) -> Steps[Note]:
        """Waits for the next note.

        Meanwhile a peer with a rate limit renews its allowance for serving, and a peer that fetches
        repeats unanswered requests. A peer whose fetch failed reports the failure only if no other
        plan arrives soon: usually its holders have died, the master is about to notice, and no
        living peer is to blame.
        """
        while True:
            pauses = [math.inf]
            limited = bool(self._plan.serve) and self._client.serve_limit > 0
            if limited:
                pauses.append(limits.SERVE_INTERVAL_S)
            if self._failure:
                pauses.append(max(0.0, self._fail_at - self._now()))
            if self._op and not self._complete:
                pauses.append(max(0.0, self._remind_at - self._now()))
            note = yield min(pauses)
            if note is not None:
                return note
            if limited:
                self._client.allow(self._call)
            if self._failure and self._now() >= self._fail_at:
                self._fetched(False, self._failure)
                self._failure = ""
            if self._op and self._now() >= self._remind_at:
                self._remind_at = self._now() + limits.REMIND_S
                self._client.remind(self._op, limits.REMINDERS_MAX)

    def _follow(self, plan: m.SyncPlan, resumed: bool) -> None:
        self._plan, self._failure = plan, ""
        if resumed:
            return  # the earlier fetch continues, or is complete
        self._staging, self._complete, self._op = None, False, 0
        self._results.clear()
        if plan.fetch:
            self._staging = staging = Staging(plan, self._memory)
            if plan.in_place:
                self._tear(plan.fetch)
            pieces, owner = staging.pieces(), (staging, self._owner)
            self._op = self._client.fetch(self._call, plan.seq, pieces, len(self._memory), owner)
            self._remind_at = self._now() + limits.REMIND_S
            self._progress.begin(staging)

    def _install(self, synced: effects.Synced) -> None:
        staging = self._staging
        assert staging is None or self._complete, "the master kept what this peer has not proven"

        def adopt() -> None:
            self._adopt(synced, staging.install() if staging is not None else ())

        self._client.aside(adopt)  # memory that is overwritten in part is not a valid state

    def _vote(self) -> None:
        self._complete = True
        differences: tuple[m.Difference, ...] = ()
        if self._plan.diverged and self._staging is not None:
            described = itertools.islice(self._staging.differences(), m.DIFFERENCES_MAX)
            differences = tuple(described)
        self._fetched(True, "", differences)

    def _fetched(self, ok: bool, why: str, differences: m.Differences = ()) -> None:
        seq, peer = self._plan.seq, self._client.peer
        self._client.post(lambda: peer.fetched(seq, ok, why, differences))


class _Progress:
    def __init__(
        self, callback: Callable[[SharedStateProgress], None] | None, now: Callable[[], float]
    ) -> None:
        self._callback, self._now = callback, now
        self._staging: Staging | None = None
        self._began = self._reported = self._logged = 0.0
        self._shown = -1  # bytes proven, as of the last call of the callback
        self.error: Exception | None = None

    def begin(self, staging: Staging) -> None:
        self._staging, self._shown = staging, -1
        self._began = self._logged = self._now()
        self._reported = self._began - limits.PROGRESS_S

    def report(self) -> bool:
        """Reports if a report is due. Returns False once, when the callback has failed."""
        staging, now = self._staging, self._now()
        if staging is None:
            return True
        done = staging.bytes_proven == staging.bytes_total
        progress = SharedStateProgress(
            staging.entries_proven,
            staging.entries_total,
            staging.bytes_proven,
            staging.bytes_total,
            now - self._began,
        )
        if now - self._logged >= limits.PROGRESS_LOG_S or (done and self._logged > self._began):
            self._logged = now
            log.info("shared state: %s", progress)
        due = now - self._reported >= limits.PROGRESS_S or done
        if due and self._callback is not None and self._shown != staging.bytes_proven:
            self._reported, self._shown = now, staging.bytes_proven
            try:
                self._callback(progress)
            except Exception as error:  # raised at the end: others wait for this peer
                self.error, self._callback = error, None
                return False
        return True
