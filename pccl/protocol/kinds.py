"""The kinds of collectives."""

from __future__ import annotations

from enum import StrEnum


class CollectiveKind(StrEnum):
    """What a collective does; the value is the API call's name."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


# Contributions to these may travel with the votes, for the master to reduce.
INLINE = frozenset((CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER))
