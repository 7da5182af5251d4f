"""From where a peer trains while a mean is under way: from theta, or from a guess of its own."""

from __future__ import annotations

from typing import Protocol

import torch

from pccl.diloco.outer_state import OuterState


class View(Protocol):
    """The parameters from which a peer trains: `OuterState.base`."""

    def reset(self) -> None:
        """They are theta."""

    def rebase(self) -> None:
        """The same, and the model keeps its progress since then."""

    def look_ahead(self, applied: bool, peers: int, late: bool) -> None:
        """The progress of a round was measured; `applied`: theta has taken a step by the mean.

        `late`: this peer's progress will not be in the mean that is launched next.
        """


class Shared:
    """All peers train from theta."""

    def reset(self) -> None:
        """They are theta in any case."""

    def rebase(self) -> None:
        """They are theta in any case."""

    def look_ahead(self, applied: bool, peers: int, late: bool) -> None:
        """Nothing is guessed."""


class Eager:
    """A peer replaces its own part of the mean before by that of the mean under way.

        g(k) = d(k) / M + (D(k-1) - s(k-1));   s(k) = d(k) / M
        v_m(k+1), theta_m(k+1) = OuterOptimizer(v_m(k), theta_m(k), g(k))
        w <- theta_m(k+1)

    (Eager updates, arXiv 2502.12996.) s(k-1) is what this peer has applied of its own a round ago;
    it is taken back when the mean that holds it comes, so what M was does not matter in the long
    run: M is the number of contributors of D(k-1), or of the group, if there is none.

    theta_m and v_m differ on each peer, and serve nobody else: theta and v are driven by means
    only. A peer that joins, or resumes, begins with theta_m = theta, v_m = v and s = 0, and so
    does one that had no mean.
    """

    def __init__(self, state: OuterState) -> None:
        self._state = state
        self._velocity = state.velocity.clone()
        self._share = torch.zeros_like(state.delta)
        state.base = state.theta.clone()

    def reset(self) -> None:
        """theta_m = theta, v_m = v, s = 0."""
        self._state.base.copy_(self._state.theta)
        self._velocity.copy_(self._state.velocity)
        self._share.zero_()

    def rebase(self) -> None:
        """The same, and the model keeps its progress since theta_m."""
        self._state.move(self._state.theta - self._state.base)
        self.reset()

    @torch.no_grad()
    def look_ahead(self, applied: bool, peers: int, late: bool) -> None:
        """A step of the outer optimizer by g; s(k) is 0 of who is late."""
        state = self._state
        own = 0.0 if late else 1 / peers
        guess = self._share.neg_().add_(state.delta, alpha=own)
        if applied:
            guess.add_(state.mean)
        outer_step = int(state.steps)
        state.optimizer.step(state.base, self._velocity, guess, outer_step=outer_step, peers=peers)
        torch.mul(state.delta, own, out=self._share)
