"""Finds a smaller schedule that still fails, by leaving out faults (delta debugging)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool], until_s: float) -> list[T]:
    """A part of the items that still fails, and of which, if time suffices, each is needed.

    Args:
        items: that fail.
        fails: whether a part of them does. It need not answer the same each time.
        until_s: when to end, by the monotonic clock.
    """
    found, pieces = list(items), 2
    while found and time.monotonic() < until_s:
        size = max(1, -(-len(found) // pieces))
        parts = [found[i : i + size] for i in range(0, len(found), size)]
        candidates = [] if len(parts) <= 2 else parts
        candidates = [*candidates, *(_without(parts, i) for i in range(len(parts)))]
        smaller = _first(candidates, fails, until_s)
        if smaller is not None:
            pieces = 2 if len(smaller) <= size else max(pieces - 1, 2)
            found = smaller
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(found))
    return found


def _without(parts: list[list[T]], left_out: int) -> list[T]:
    return [item for i, part in enumerate(parts) if i != left_out for item in part]


def _first(
    candidates: Sequence[list[T]], fails: Callable[[list[T]], bool], until_s: float
) -> list[T] | None:
    for candidate in candidates:
        if time.monotonic() >= until_s:
            return None
        if fails(candidate):
            return candidate
    return None
