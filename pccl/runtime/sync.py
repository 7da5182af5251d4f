"""One peer's part in a synchronisation of the shared state, in the thread of the caller.

Offers what it has; fetches what the master's plan says into staging memory, verifies it, votes; and
only when all receivers have voted does it overwrite the caller's memory. So a call that fails has
changed nothing, at the cost of staging memory for the bytes that differ. A plan can be replaced by
another while it is carried out (a holder died).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pccl.ext import ffi
from pccl.protocol import messages as m
from pccl.protocol import peer as core
from pccl.runtime.client import Client, Deadline, Pieces
from pccl.runtime.digest import digest

# Not cleared: staging memory is written whole or not used, and touching it twice costs time.
_allocate = ffi.new_allocator(should_clear_after_alloc=False)


@dataclass(frozen=True, slots=True)
class Region:
    """One entry of the shared state and where it lies."""

    name: str
    dtype: int
    count: int
    any_content: bool
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory that a plan's entries are fetched into: one char array for each."""

    plan: m.SyncPlan
    arrays: list[Any]

    @classmethod
    def for_plan(cls, plan: m.SyncPlan, regions: Sequence[Region]) -> Staging:
        """Staging memory for what a plan says to fetch."""
        return cls(plan, [_allocate("char[]", regions[index].nbytes) for index in plan.fetch])

    def pieces(self) -> Pieces:
        """Where the engine puts each entry."""
        return [
            (index, int(ffi.cast("uintptr_t", array)), len(array))
            for index, array in zip(self.plan.fetch, self.arrays, strict=True)
        ]

    def wrong(self, regions: Sequence[Region]) -> str:
        """Names the first entry that is not what was elected; empty when all are."""
        for (index, address, nbytes), elected in zip(self.pieces(), self.plan.digests, strict=True):
            if digest(address, nbytes) != elected:
                return f"what arrived of {regions[index].name!r} is not what was elected"
        return ""

    def install(self, regions: Sequence[Region]) -> None:
        """Overwrites the caller's memory."""
        for index, array in zip(self.plan.fetch, self.arrays, strict=True):
            ffi.memmove(ffi.cast("void *", regions[index].address), array, len(array))


def synchronise(
    client: Client,
    regions: Sequence[Region],
    revision: int,
    strategy: int,
    owner: object,
    deadline: Deadline,
) -> core.Synced | core.Fail:
    """Takes part in a synchronisation until it ends, and says how.

    Args:
        client: the peer.
        regions: the shared state; its memory must not change meanwhile.
        revision: of the shared state, as this peer has it.
        strategy: a pccl.SharedStateSyncStrategy value.
        owner: kept alive as long as the engine refers to the memory.
        deadline: when to give up.
    """
    entries = tuple(
        m.Entry(r.name, r.dtype, r.count, r.any_content, digest(r.address, r.nbytes))
        for r in regions
    )
    pieces = [(index, r.address, r.nbytes) for index, r in enumerate(regions)]
    call = client.sync(m.Offer(revision, strategy, entries), pieces, owner)
    staging: Staging | None = None
    verified = False  # what is in staging is what was elected
    while True:
        note = deadline.next(client, call)
        match note:
            case core.Plan(_, plan):
                staging, verified = Staging.for_plan(plan, regions), False
                if plan.fetch:
                    client.fetch(plan.seq, staging.pieces(), staging)
            case core.Fetched(_, seq, ok, why) if staging is not None and staging.plan.seq == seq:
                why = staging.wrong(regions) if ok else why
                verified = not why
                client.fetched(seq, verified, why)
            case core.Answer(_, core.Synced() as synced):
                if staging is not None and staging.plan.fetch:
                    assert verified, "the master kept content that this peer has not verified"
                    staging.install(regions)
                return synced
            case core.Fail():
                return note
