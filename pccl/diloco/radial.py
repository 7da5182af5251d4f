"""Radial-directional averaging (arXiv 2604.21428): means of norms, and of unit directions.

docs/internals/diloco.md has the equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pccl.diloco.outer import OuterState


class Radial:
    """Splits a pseudo-gradient into norms and directions, and joins the means of both.

    `plain`: for each parameter, whether it is averaged as usual, as embeddings are.
    """

    def __init__(self, state: OuterState, plain: Sequence[bool]) -> None:
        self._state = state
        self._plain = plain
        self.norms = torch.ones(len(plain))
        self.mean = torch.ones(len(plain))  # of all peers' norms

    def split(self) -> list[torch.Tensor]:
        directions = self._state.delta.clone()
        for number, part in enumerate(self._state.views(directions)):
            norm = float(part.norm())
            if not self._plain[number]:
                self.norms[number] = norm
                part.mul_(1 / norm if norm else 0.0)
        return [directions, self.norms]

    def join(self) -> None:
        """D from the mean direction, which is in place, and the mean norm."""
        for number, part in enumerate(self._state.views(self._state.mean)):
            if not self._plain[number]:
                norm = _norm(part)
                part.mul_(float(self.mean[number]) / norm if norm else 0.0)


def _norm(tensor: torch.Tensor) -> float:
    """The norm with the same bits on every machine.

    Unlike `Tensor.norm`, it adds in a fixed order, and all operations are elementwise.
    """
    squares = tensor.flatten().double()
    squares = squares * squares
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        squares[: len(squares) - half] += squares[half:].clone()
        squares = squares[:half]
    return math.sqrt(float(squares.sum()))
