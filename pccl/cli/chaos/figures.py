"""What a run says of recovery and of speed, in numbers."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figures(NamedTuple):
    """Numbers of a run.

    Attributes:
        steps: how many there were.
        goodput: the share of undisturbed speed that was reached.
        recoveries_s: for each fault, how long it took to the next step.
    """

    steps: int
    goodput: float
    recoveries_s: list[float]

    @property
    def p50_s(self) -> float:
        """The median of the recoveries."""
        return statistics.median(self.recoveries_s) if self.recoveries_s else 0.0

    @property
    def p95_s(self) -> float:
        """What 95 % of the recoveries did not exceed."""
        times = sorted(self.recoveries_s)
        return times[min(len(times) - 1, int(len(times) * 0.95))] if times else 0.0

    def words(self) -> str:
        """In one line."""
        text = f"{self.steps} steps; goodput {self.goodput:.0%}"
        if not self.recoveries_s:
            return text
        number = len(self.recoveries_s)
        return f"{text}; {number} recoveries: median {self.p50_s:.2f} s, p95 {self.p95_s:.2f} s"


def measure(steps_s: Sequence[float], faults_s: Sequence[float]) -> Figures:
    """The numbers of a run.

    Args:
        steps_s: when steps were made.
        faults_s: when faults came for which all might have to wait.
    """
    moments = sorted(steps_s)
    recoveries = []
    for at_s in faults_s:
        later = bisect.bisect(moments, at_s)
        if later < len(moments):
            recoveries.append(moments[later] - at_s)
    times = [after - before for before, after in itertools.pairwise(moments)]
    goodput = 0.0
    if times and sum(times) > 0:
        goodput = min(1.0, statistics.median(times) * len(times) / sum(times))
    return Figures(len(moments), goodput, recoveries)
