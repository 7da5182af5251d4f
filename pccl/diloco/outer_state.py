"""The outer parameters, their optimizer, and how they and the model's parameters exchange."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from pccl import kernels
from pccl.diloco.rates import Rates
from pccl.diloco.replica import local

_log = logging.getLogger("pccl.diloco")


class OuterOptimizer:
    """SGD of learning rate eta with momentum mu, which may be Nesterov's, or 0: plain averaging."""

    def __init__(self, rates: Rates, nesterov: bool) -> None:
        self._rates = rates
        self._nesterov = nesterov
        self._said: tuple[float, float] | None = None

    def step(
        self,
        theta: torch.Tensor,
        velocity: torch.Tensor,
        gradient: torch.Tensor,
        *,
        outer_step: int,
        peers: int,
    ) -> None:
        """Changes theta and the velocity, with the same bits on every machine.

        `gradient` is a mean of `peers`, and the step is the one after `outer_step` others.
        """
        lr, momentum = self._rates.at(outer_step, peers)
        kernels.outer_sgd(
            theta, velocity, gradient, lr=lr, momentum=momentum, nesterov=self._nesterov
        )

    def tell(self, outer_step: int, peers: int) -> None:
        """Logs what such a step has, if that has changed."""
        lr, momentum = rates = self._rates.at(outer_step, peers)
        if rates != self._said:
            self._said = rates
            _log.info(
                "from outer step %d on, for a mean of %d peers: eta %.4g, mu %.4g, "
                "effective gain eta / (1 - mu) = %.4g",
                outer_step + 1,
                peers,
                lr,
                momentum,
                lr / (1 - momentum),
            )


class OuterState:
    """theta, v and k of parameters that are averaged together, which may be all of the model's.

    Of sharded parameters it has the shards of this process.

    Beside them are d, a pseudo-gradient, and D, a mean of those of all peers. All are fp32 on the
    CPU. Only this class changes theta and v, by pccl's own kernels, because torch rounds
    differently from one CPU to the next.

    Attributes:
        theta: the outer parameters, flat.
        velocity: v, their momentum.
        steps: k, one int64.
        delta: d, this peer's pseudo-gradient.
        mean: D, what an outer step takes.
        base: from what the model trains; theta, unless a mode has another.
        optimizer: what an outer step is.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer: OuterOptimizer,
        steps: torch.Tensor,
    ) -> None:
        self._parameters = parameters
        self.steps = steps
        self.optimizer = optimizer
        n = sum(p.numel() for p in self._locals())
        self.theta = torch.empty(n)
        self.velocity = torch.zeros(n)
        self.delta = torch.empty(n)
        self.mean = torch.zeros(n)
        self.base = self.theta
        with torch.no_grad():
            for parameter, theta in self._pairs(self.theta):
                theta.copy_(parameter)

    @torch.no_grad()
    def measure(self) -> None:
        """d = base - w."""
        # Local training began at the base as rounded to the parameter's dtype. Measured from the
        # unrounded one, the delta of a bf16 model would hold the rounding error too, and so pull
        # theta back onto the bf16 grid.
        for (parameter, base), end in zip(
            self._pairs(self.base), self.views(self.delta), strict=True
        ):
            begin = base.to(parameter.dtype).to(base.dtype)
            end.copy_(parameter)
            kernels.subtract(end, begin, end)

    def step(self, peers: int) -> None:
        """One step of the outer optimizer, by D, which is a mean of so many peers."""
        outer_step = int(self.steps)
        self.optimizer.tell(outer_step, peers)
        self.optimizer.step(
            self.theta, self.velocity, self.mean, outer_step=outer_step, peers=peers
        )
        self.steps += 1

    @torch.no_grad()
    def adopt(self, keep: float = 0.0) -> None:
        """w = keep w + (1 - keep) base; just the base with 0."""
        for parameter, base in self._pairs(self.base):
            if keep:
                begin = base.to(parameter.device)
                parameter.copy_(begin + keep * (parameter.to(begin.dtype) - begin))
            else:
                parameter.copy_(base)

    def reclaim(self, keep: float = 1.0) -> None:
        """w = w - keep d: gives the model the progress that no mean will hold."""
        self.move(-keep * self.delta)

    @torch.no_grad()
    def move(self, by: torch.Tensor) -> None:
        """w = w + by, computed in fp32."""
        for parameter, piece in self._pairs(by):
            parameter.copy_(parameter.to(piece.dtype) + piece.to(parameter.device))

    def _locals(self) -> list[torch.Tensor]:
        return [local(parameter) for parameter in self._parameters]

    def _pairs(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._locals(), self.views(flat), strict=True)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The pieces of a flat buffer, each in the shape of its parameter."""
        parts = self._locals()
        pieces = torch.split(flat, [part.numel() for part in parts])
        return (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))
