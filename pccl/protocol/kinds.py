"""The kinds of collectives."""

from __future__ import annotations

from enum import StrEnum


class CollectiveKind(StrEnum):
    """What a collective does; the value is the API call's name."""

    __hash__ = str.__hash__  # that of the text to which it is equal; Enum hashes names, in Python

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"  # of one member to one other one, which calls recv
    BARRIER = "barrier"


# Contributions to these may travel with the votes, for the master to reduce.
INLINE = frozenset((CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER))
# These reduce,
REDUCING = frozenset(
    (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)
)
# one member of these has what all get, or gets what all have,
ROOTED = frozenset(
    (
        CollectiveKind.BROADCAST,
        CollectiveKind.REDUCE,
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
    )
)
# and these move rows from member to member.
EXCHANGES = frozenset(
    (
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.SEND,
    )
)
