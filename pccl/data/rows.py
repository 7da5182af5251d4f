"""The content of a ledger: which peer has which samples. All functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

NOBODY = 0


class Row(NamedTuple):
    """Samples from `first` to below `end` that are claimed but not consumed."""

    first: int
    end: int
    owner: int  # the peer that has claimed them; NOBODY: it was lost, and they are free
    under_way: int  # 1 if a collective in progress has the owner's progress with them, else 0


class Content(NamedTuple):
    """The whole ledger: samples below `fresh` that are in no row are consumed."""

    fresh: int  # the first sample that no peer has claimed yet
    rows: tuple[Row, ...]  # sorted by `first`, without overlap


class Want(NamedTuple):
    """A peer's request."""

    owner: int
    samples: int
    first: int = 0  # the lowest sample that it takes


def claimed(content: Content, wants: Sequence[Want], end: int, rows_max: int) -> Content:
    """Gives samples to all remaining peers.

    Samples of lost peers become free, unless they are under way. There are `end` samples in all
    epochs. A claim that needs more than `rows_max` rows gets fewer samples.
    """
    living = {want.owner for want in wants}
    rows = [
        row if row.under_way or row.owner in living else row._replace(owner=NOBODY)
        for row in content.rows
    ]
    free = end - content.fresh + sum(row.end - row.first for row in rows if row.owner == NOBODY)
    fresh = content.fresh
    for want in _fair(wants, free):
        rows, missing = _take(rows, want, rows_max)
        missing = min(missing, end - fresh)
        if missing and len(rows) < rows_max:
            rows.append(Row(fresh, fresh + missing, want.owner, 0))
            fresh += missing
    return Content(fresh, _merged(rows))


def departed(content: Content, living: Collection[int]) -> Content:
    """Starts a collective: all samples claimed by `living` are under way.

    `living` are the peers of the last claim. Some of them may be lost before they contribute.
    """
    rows = [row._replace(under_way=int(row.owner in living)) for row in content.rows]
    return Content(content.fresh, _merged(rows))


def settled(content: Content, trained: Mapping[int, int | None]) -> Content:
    """Ends a collective. `trained` has, for each contributor, the number of its first samples that
    are consumed; None: all.

    Samples of other peers stay claimed; the next claim frees those of lost peers.
    """
    rows = []
    left = {owner: count for owner, count in trained.items() if count is not None}
    for row in content.rows:
        if not row.under_way or row.owner not in trained:
            rows.append(row._replace(under_way=0))
        elif row.owner in left:
            consumed = min(left[row.owner], row.end - row.first)
            left[row.owner] -= consumed
            if row.first + consumed < row.end:
                rows.append(Row(row.first + consumed, row.end, row.owner, 0))
    return Content(content.fresh, _merged(rows))


def owned(content: Content, owner: int) -> list[range]:
    """The samples that a peer has claimed, sorted."""
    return [range(row.first, row.end) for row in content.rows if row.owner == owner]


def rest(samples: Sequence[range], count: int) -> tuple[range, ...]:
    """All samples except the first `count`."""
    parts = []
    for part in samples:
        parts.append(part[min(count, len(part)) :])
        count -= min(count, len(part))
    return tuple(part for part in parts if part)


def owners_under_way(content: Content) -> list[int]:
    """The peers whose progress may be in the collective in progress, sorted."""
    return sorted({row.owner for row in content.rows if row.under_way})


def _fair(wants: Sequence[Want], free: int) -> list[Want]:
    """Scales down all requests in proportion, if they exceed the free samples."""
    total = sum(want.samples for want in wants)
    if total <= free:
        return list(wants)
    ends = [0]
    for want in wants:
        ends.append(ends[-1] + want.samples)
    scaled = [free * end // total for end in ends]
    return [want._replace(samples=scaled[i + 1] - scaled[i]) for i, want in enumerate(wants)]


def _take(rows: list[Row], want: Want, rows_max: int) -> tuple[list[Row], int]:
    """Gives free samples of `rows` to one peer. Returns the rows, and the number still wanted."""
    owner, count, first = want
    taken = []
    splits = rows_max - len(rows)
    for row in rows:
        length = row.end - row.first
        if row.owner != NOBODY or not count or row.first < first or (length > count and not splits):
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
    """The rows, sorted; adjacent rows with equal attributes become one."""
    merged: list[Row] = []
    for row in sorted(rows):
        last = merged[-1] if merged else None
        if last and last.end == row.first and last[2:] == row[2:]:
            merged[-1] = last._replace(end=row.end)
        else:
            merged.append(row)
    return tuple(merged)
