"""A model that shows which samples DiLoCo has trained on, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pccl.data import Ledger
from pccl.diloco import DiLoCo

SAMPLES, EPOCHS, BATCH, INNER_STEPS = 100, 2, 2, 3


class Effects(torch.nn.Module):
    """A model in which the effect of each sample has a place of its own in each fragment."""

    def __init__(self, fragments: int = 1) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(SAMPLES * EPOCHS) for _ in range(fragments))

    def learn(self, places: list[int]) -> None:
        for part in self.parts:
            part.grad = torch.zeros(SAMPLES * EPOCHS)
            part.grad[places] = -1.0


class Shares:
    """The batches of a round, without the shuffling, of places and not of indices."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __iter__(self) -> Any:
        places = [place for part in self._ledger.share for place in part]
        return (places[i : i + BATCH] for i in range(0, len(places), BATCH))


def make(
    comm: Any, *, share: int = BATCH * INNER_STEPS, **options: Any
) -> tuple[Effects, Ledger, DiLoCo]:
    model = Effects(options.get("fragments", 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ledger = Ledger(SAMPLES, share=share, epochs=EPOCHS, peers_max=6)
    chosen = {
        "inner_steps": INNER_STEPS,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "alone": "step",
        "ledger": ledger,
        **options,
    }
    return model, ledger, DiLoCo(comm, model, optimizer, **chosen)


def train(
    diloco: DiLoCo, model: Effects, ledger: Ledger, before: Callable[[], object] = lambda: None
) -> list[int]:
    """A round, with something before each step. Returns the places that it has trained on."""
    trained: list[int] = []
    for places in diloco.round_of(Shares(ledger)):
        before()
        model.learn(places)
        trained += places
        diloco.step(samples=len(places))
    return trained


def once(theta: Any, peers: set[int]) -> None:
    """No effect is that of two rounds: with 3, 4 or 5 contributors none adds up to another."""
    allowed = torch.tensor([1 / n for n in sorted(peers)])
    off = (theta[:, None] - allowed).abs().min(dim=1)
    assert (off.values < 1e-6).all(), theta
