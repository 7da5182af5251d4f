"""Seeds of simulated runs, in parts that pytest can share out."""

from __future__ import annotations

import pytest


def parts(seeds: int, default: int, size: int) -> pytest.MarkDecorator:
    """Calls a test with `seeds` seeds, `size` at a time, as its argument `part`.

    The first part shows what is broken for all runs; the parts up to `default` have the mark
    `seeds`, and the others, which find what is rare, `slow`.
    """

    def marks(first: int) -> tuple[pytest.MarkDecorator, ...]:
        if first == 0:
            return ()
        return (pytest.mark.seeds if first < default else pytest.mark.slow,)

    ranges = [range(first, first + size) for first in range(0, seeds, size)]
    names = [f"{each.start}-{each.stop - 1}" for each in ranges]
    parameters = [pytest.param(each, marks=marks(each.start)) for each in ranges]
    return pytest.mark.parametrize("part", parameters, ids=names)
