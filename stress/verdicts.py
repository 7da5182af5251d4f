"""Verdicts on faults that were planted, one after the other: each must be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MISSED = "MISSED"  # how the verdict on a fault begins that was not found


def report(faults: Mapping[str, Callable[[], str]]) -> int:
    """Prints the verdict on each, by its name. Returns an exit status: 1 if one was missed."""
    missed = 0
    for name, verdict in faults.items():
        found = verdict()
        missed += found.startswith(MISSED)
        print(f"{name:72} {found}", flush=True)
    print(f"{missed} of {len(faults)} were missed")
    return 1 if missed else 0
