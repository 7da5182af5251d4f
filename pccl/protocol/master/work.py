"""What the master checks of the work that peers vote to start. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.messages import INLINE, CollectiveKind
from pccl.protocol.rounds import Round, Vote
from pccl.protocol.topology import hops
from pccl.types import DataType, ReduceOp

Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # for each rank, and from each

AROUND = {
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL,
}
_ITEM_BYTES = {dtype.value: dtype.itemsize for dtype in DataType}
_REDOPS = {op.value for op in ReduceOp}


def fits(work: m.Work, data: bytes) -> bool:
    """Whether these bytes are a valid contribution for the master to reduce."""
    return (
        work.what in INLINE
        and not work.parts
        and work.redop in _REDOPS
        and len(data) == work.count * _ITEM_BYTES.get(work.dtype, -1)
    )


def goes_around(work: m.Work) -> bool:
    """Whether a collective's data uses every hop of its rings."""
    carries = work.count or any(part.count for part in work.parts)
    if work.rows and sum(rows > 0 for rows in work.rows) < 2:
        return False  # nothing goes to the only member that gives any
    return bool(carries) and work.what in AROUND


def are_rows(work: m.Work, rows: Rows) -> bool:
    """Whether these are numbers of rows for, and from, each member."""
    gives, takes = rows
    return work.what == CollectiveKind.ALL_TO_ALL and len(gives) == len(takes) == work.members


def is_pair(number: int, vote: m.StartVote) -> bool:
    """Whether a peer's vote names two peers if it is for a send, and only then: it and another."""
    if vote.work.what != CollectiveKind.SEND:
        return not vote.pair
    return len(vote.pair) == 2 and len({*vote.pair}) == 2 and number in vote.pair


def misfit(rows: Sequence[Rows]) -> tuple[int, int] | None:
    """Two ranks of which the second takes another number of rows than the first gives it."""
    taken = list(zip(*(takes for _, takes in rows), strict=True))  # from whom, by whom
    for rank, (gives, _) in enumerate(rows):
        if gives != taken[rank]:
            pairs = enumerate(zip(gives, taken[rank], strict=True))
            return rank, next(other for other, (given, took) in pairs if given != took)
    return None


def predecessors(round_: Round[object], rings: Sequence[m.Ring]) -> defaultdict[int, list[int]]:
    """For each member, the call of its predecessor in each ring."""
    calls: defaultdict[int, list[int]] = defaultdict(list)
    for ring in rings:
        for before, number in hops(ring.order):
            calls[number].append(round_.votes[before].call)
    return calls


def form(vote: Vote[object]) -> object:
    """What must be the same in all votes to start a collective."""
    return vote.payload, vote.data is None, vote.rows is None


def sees_others(one: Vote[object], other: Vote[object]) -> bool:
    """Whether two votes are the same call, by peers that differ on the ranks or on the members."""
    asked, mine = one.payload, other.payload
    assert isinstance(asked, m.Work) and isinstance(mine, m.Work)
    return asked.sees_others_than(mine)


def difference(round_: Round[object], one: int, other: int, who: str) -> str:
    """How the votes of two peers differ, in words; `who` says which peer called what."""
    asked, mine = round_.votes[one].payload, round_.votes[other].payload
    assert isinstance(asked, m.Work) and isinstance(mine, m.Work)
    alike = (round_.votes[one].data is None) == (round_.votes[other].data is None)
    if asked == mine and alike:
        return f"some say how many rows they give and take, and some do not: {who}"
    if replace(asked, members=0) == replace(mine, members=0):
        return f"PCCL_INLINE_BYTES is not the same for all: {who}"
    return f"the peers do not ask for the same: {who}{asked.difference(mine)}"


def outdated(round_: Round[object], size: int) -> str:
    """Why a start round fails whose peers do not all know the current ranks.

    `size` is that of the group.
    """
    lost = "".join(f"; {title}" for title in round_.lost)
    return f"the group has {size} peers by now, and ranks have changed: call again{lost}"
