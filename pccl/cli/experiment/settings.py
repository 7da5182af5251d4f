"""What all runs of an experiment have in common: model, text, number of tokens, seed."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults take a machine of two cores about a minute a run.

    They are of a small model that learns from 200 times as many bytes as it has parameters. How far
    DiLoCo is behind depends on that: a model that still improves fast loses more.

    Attributes:
        text: files to learn from; none: the source code of Python's standard library.
        width: of the model.
        layers: of the model.
        heads: of the model's attention.
        context: bytes that the model sees at once.
        batch: samples of a step, on all peers together: the same for any number of peers.
        steps: inner steps of each peer, so all runs train on batch * steps samples.
        inner_steps: H, between two outer steps.
        lr: highest learning rate of the inner optimizer.
        seed: of weights and samples.
    """

    text: tuple[str, ...] = ()
    width: int = 32
    layers: int = 1
    heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 4800
    inner_steps: int = 30
    lr: float = 4e-3
    seed: int = 0

    @property
    def rounds(self) -> int:
        """Outer steps."""
        return self.steps // self.inner_steps

    @property
    def tokens(self) -> int:
        """Bytes of text that a run trains on."""
        return self.steps * self.batch * self.context
