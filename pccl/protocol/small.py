"""Collectives so small that their data travels with the votes. Pure functions."""

from __future__ import annotations

from msgspec.structs import replace

from pccl.protocol.messages import INLINE, INLINE_BYTES_MAX, CollectiveKind, Spec

ALWAYS_BYTES = 65536  # of a contribution, however many members there are
TOGETHER_BYTES = 1 << 19  # of all contributions, which the master handles one after the other


def limit(members: int) -> int:
    """The most bytes of a contribution in a group of that size."""
    return max(ALWAYS_BYTES, min(INLINE_BYTES_MAX, TOGETHER_BYTES // max(1, members)))


def enter(work: Spec, nbytes: int, members: int, most: int | None = None) -> tuple[Spec, bool]:
    """The work as a vote has it, and whether the contribution of so many bytes travels with it.

    It does up to `most` bytes. If that is None, it depends on the number of members that the voter
    knows, where the size leaves a choice: the vote then says that number, so that voters who know
    different ones do not meet, and may try again.
    """
    if work.what not in INLINE or work.parts:
        return work, False
    if most is not None:
        return work, nbytes <= most
    fixed = work.what != CollectiveKind.ALL_REDUCE or bool(work.algorithm)
    if fixed or not ALWAYS_BYTES < nbytes <= INLINE_BYTES_MAX:
        return work, nbytes <= ALWAYS_BYTES
    return replace(work, members=members), nbytes <= limit(members)
