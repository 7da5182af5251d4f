"""The outer learning rate and momentum: given, by the outer step, or by the number of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Mode = Literal["sync", "delayed", "eager", "streaming"]
Rate = float | Sequence[tuple[int, float]]
"""A number; or points (k, value) between which it is linear in k, and beyond which constant."""

# The best outer learning rates for a momentum of 0.9 at H = 30, by the number of peers
# (arXiv 2503.09799, figure 7: M = 1, 2, 4, 8). They hardly depend on the model's size.
_LR_OF_PEERS = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
_MOMENTUM = 0.9
_MOMENTUM_OF_FEW_STEPS, _FEW_STEPS = 0.5, 20
_MOMENTUM_WITH_MUON = 0.6  # arXiv 2505.23725, at one peer
# Measured (docs/experiment.md): a mean that is a round old and a momentum, too, go too far.
_LR_OF_LATE_MEANS: Mapping[Mode, float] = {"delayed": 0.7, "eager": 1.0}


@dataclass(frozen=True, slots=True)
class Rates:
    """eta and mu, equal on all peers, for they depend on nothing but what peers agree on.

    Attributes:
        lr: eta by the outer step; None: by the number of contributors to a mean.
        momentum: mu, by the outer step.
    """

    lr: Rate | None
    momentum: Rate

    def at(self, outer_step: int, peers: int) -> tuple[float, float]:
        """eta and mu of the step after so many, by a mean of so many peers."""
        lr = _at(_LR_OF_PEERS, peers) if self.lr is None else _at(self.lr, outer_step)
        return lr, _at(self.momentum, outer_step)


def rates(
    lr: Rate | None,
    momentum: Rate | None,
    *,
    mode: Mode,
    inner_steps: int | None,
    sparse: bool,
    muon: bool,
) -> Rates:
    """What is given, or the defaults.

    With sparse payloads these are eta 1 without momentum, which their error feedback replaces
    (arXiv 2508.15706). Where a mean is applied a round late there is no momentum either, and eta is
    0.7 (delayed) or 1 (eager); with a momentum that is given, and in the other modes, it goes by
    the number of peers. The momentum is 0.9 there, or less with few inner steps or with Muon.

    Raises:
        ValueError: a number is out of range, or points are not in ascending order of k.
    """
    if momentum is None:
        few = inner_steps is not None and inner_steps < _FEW_STEPS
        usual = _MOMENTUM_OF_FEW_STEPS if few else _MOMENTUM_WITH_MUON if muon else _MOMENTUM
        momentum = 0.0 if sparse or mode in _LR_OF_LATE_MEANS else usual
    if lr is None and sparse:
        lr = 1.0
    elif lr is None and momentum == 0:
        lr = _LR_OF_LATE_MEANS.get(mode)
    checked = _checked("outer_momentum", momentum)
    if any(not 0 <= value < 1 for value in _values(checked)):
        raise ValueError(f"outer_momentum={momentum} must be in [0, 1)")
    if lr is not None:
        lr = _checked("outer_lr", lr)
        if any(value <= 0 for value in _values(lr)):
            raise ValueError(f"outer_lr={lr} must be positive")
    return Rates(lr, checked)


def _values(rate: Rate) -> list[float]:
    return [value for _, value in rate] if isinstance(rate, Sequence) else [rate]


def _checked(name: str, rate: Rate) -> Rate:
    if not isinstance(rate, Sequence):
        return float(rate)
    points = tuple((int(k), float(value)) for k, value in rate)
    steps = [k for k, _ in points]
    if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"{name}={rate} must be points (k, value) in ascending order of k")
    return points


def _at(rate: Rate, place: int) -> float:
    """By operations that round alike on every machine."""
    if not isinstance(rate, Sequence):
        return rate
    (begin, value), *rest = rate
    for end, next_value in rest:
        if place < end:
            part = max(0, place - begin) / (end - begin)
            return value + (next_value - value) * part
        begin, value = end, next_value
    return value
