"""The content of a ledger: which samples are whose. Pure functions; every peer applies the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

NOBODY = 0


class Row(NamedTuple):
    """Samples from `first` to below `end` that have been given out and are not consumed.

    Attributes:
        owner: the peer that has claimed them; NOBODY: they wait for one.
        under_way: 1 if a collective under way has the owner's progress with them, else 0.
    """

    first: int
    end: int
    owner: int
    under_way: int


class Content(NamedTuple):
    """All of a ledger: what lies below `fresh` is consumed, unless a row has it.

    Attributes:
        fresh: the first sample that nobody has claimed yet.
        rows: by `first`; none overlap.
    """

    fresh: int
    rows: tuple[Row, ...]


def claimed(content: Content, wants: Sequence[tuple[int, int]], end: int, rows_max: int) -> Content:
    """Gives samples to those who want some.

    What was claimed by others, and is not under way, is nobody's again: they are gone.

    Args:
        content: as it is.
        wants: (owner, number of samples), of all peers.
        end: the first sample that there is not.
        rows_max: a claim that would take more rows than that gets less.
    """
    living = {owner for owner, _ in wants}
    rows = [
        row if row.under_way or row.owner in living else row._replace(owner=NOBODY)
        for row in content.rows
    ]
    free = end - content.fresh + sum(row.end - row.first for row in rows if row.owner == NOBODY)
    fresh = content.fresh
    for owner, count in _fair(wants, free):
        rows, missing = _take(rows, owner, count, rows_max)
        if missing and len(rows) < rows_max:
            rows.append(Row(fresh, fresh + missing, owner, 0))
            fresh += missing
    return Content(fresh, _merged(rows))


def departed(content: Content, living: Collection[int]) -> Content:
    """A collective begins that has the progress of all who live, with all that they have claimed.

    `living` are those who took part in the last claim: more than those can contribute.
    """
    rows = [row._replace(under_way=int(row.owner in living)) for row in content.rows]
    return Content(content.fresh, _merged(rows))


def settled(content: Content, contributors: Collection[int]) -> Content:
    """It has ended. What its contributors had claimed is consumed.

    The others are gone, or it has brought nothing: the next claim tells.
    """
    rows = [
        row._replace(under_way=0)
        for row in content.rows
        if not (row.under_way and row.owner in contributors)
    ]
    return Content(content.fresh, _merged(rows))


def owners_under_way(content: Content) -> list[int]:
    """Whose progress may be in the collective under way, in an order that is the same for all."""
    return sorted({row.owner for row in content.rows if row.under_way})


def _fair(wants: Sequence[tuple[int, int]], free: int) -> list[tuple[int, int]]:
    """What each gets: as much as wanted; where that is too much, in proportion."""
    total = sum(count for _, count in wants)
    if total <= free:
        return list(wants)
    ends = [0]
    for _, count in wants:
        ends.append(ends[-1] + count)
    scaled = [free * end // total for end in ends]
    return [(owner, scaled[i + 1] - scaled[i]) for i, (owner, _) in enumerate(wants)]


def _take(rows: list[Row], owner: int, count: int, rows_max: int) -> tuple[list[Row], int]:
    """Gives `owner` samples that are nobody's. Returns the rows, and how many are still missing."""
    taken = []
    splits = rows_max - len(rows)
    for row in rows:
        length = row.end - row.first
        if row.owner != NOBODY or not count or (length > count and not splits):
            taken.append(row)
            continue
        middle = min(row.end, row.first + count)
        taken.append(row._replace(end=middle, owner=owner))
        if middle < row.end:
            taken.append(row._replace(first=middle))
            splits -= 1
        count -= middle - row.first
    return taken, count


def _merged(rows: list[Row]) -> tuple[Row, ...]:
    """In order, with neighbours of one kind as one."""
    merged: list[Row] = []
    for row in sorted(rows):
        last = merged[-1] if merged else None
        if last and last.end == row.first and last[2:] == row[2:]:
            merged[-1] = last._replace(end=row.end)
        else:
            merged.append(row)
    return tuple(merged)
