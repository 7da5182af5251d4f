"""Seeds of simulated runs, in parts that pytest can share out."""

from __future__ import annotations

import pytest


def parts(seeds: int, default: int, size: int) -> pytest.MarkDecorator:
    """Calls a test with `seeds` seeds, `size` at a time, as its argument `part`.

    The first `default` seeds notice at once what is broken. The others find what is rare, and are
    slow.
    """
    ranges = (range(first, first + size) for first in range(0, seeds, size))
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "part",
        [pytest.param(each, marks=slow if each.start >= default else []) for each in ranges],
        ids=lambda part: f"{part.start}-{part.stop - 1}",
    )
