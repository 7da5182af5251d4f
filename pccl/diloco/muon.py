"""Muon as the inner optimizer, and tuned settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch

from pccl.kernels import Wire
from pccl.support import whole


class Preset(TypedDict):
    """Keyword arguments for `DiLoCo`."""

    inner_steps: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    wire: Wire


def muloco(peers: int, wire: Wire = "int4") -> Preset:
    """MuLoCo (arXiv 2505.23725), with `MuonAndAdamW` as inner optimizer.

    The outer step is Nesterov's, with eta 0.7 and mu 0.6 for one peer, and 0.9 and 0.8 for eight or
    more. In between, they grow with the logarithm of the expected number of `peers`.
    """
    share = min(math.log2(whole("peers", peers, least=1)) / 3, 1.0)
    return {
        "inner_steps": 30,
        "outer_lr": round(0.7 + 0.2 * share, 3),
        "outer_momentum": round(0.6 + 0.2 * share, 3),
        "nesterov": True,
        "wire": wire,
    }


def sparseloco() -> Preset:
    """SparseLoCo (arXiv 2508.15706): the mean itself is the outer step, without momentum.

    A run with 72B parameters used an `outer_lr` of 0.65 near its end (arXiv 2603.08163).
    """
    return {
        "inner_steps": 30,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
        "wire": "sparse",
    }


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices inside a model, and its AdamW for all other parameters.

    Muon is for weights that multiply activations: it replaces the momentum of a matrix with the
    nearest orthogonal matrix. So embeddings, the output layer, biases and scales go to AdamW. Both
    use one learning rate: Muon's updates are scaled to the size of AdamW's (torch's
    adjust_lr_fn="match_rms_adamw").

    A schedule may change "lr" in `param_groups`, whose first group is Muon's.

    Attributes:
        hidden: names of the parameters that Muon trains.

    Args:
        model: trains its parameters that require a gradient. Muon gets the two-dimensional ones,
            except those of `torch.nn.Embedding`, and except the last one if it looks like an output
            layer (a row for each number of an embedding that no other module uses).
        lr: the learning rate.
        weight_decay: for both.
        momentum: for Muon.
        betas: for AdamW.
        adamw: names of further parameters for AdamW, or of modules that have them.

    Raises:
        ValueError: the model has no such matrix, or lacks a name in `adamw`.
        RuntimeError: this torch has no Muon, which came with 2.9.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        adamw: Iterable[str] = (),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"torch {torch.__version__} has no Muon: it came with torch 2.9")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.hidden = _hidden(model, trained, tuple(adamw))
        rest = [p for name, p in trained.items() if name not in self.hidden]
        muon = torch.optim.Muon(
            [trained[name] for name in self.hidden],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._each: dict[str, torch.optim.Optimizer] = {"muon": muon}
        if rest:
            self._each["adamw"] = torch.optim.AdamW(
                rest, lr=lr, betas=betas, weight_decay=weight_decay
            )
        super().__init__(self._groups(), {})
        self.param_groups = self._groups()  # the same dicts, so a schedule changes both

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._each.values() for group in each.param_groups]

    def step(  # type: ignore[override]  # torch has an overload for each of the two
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Steps both optimizers; returns the loss, if `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self._each.values():
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {name: each.state_dict() for name, each in self._each.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads such a state; raises ValueError if it belongs to other parameters."""
        if state_dict.keys() != self._each.keys():
            raise ValueError(f"the state has {sorted(state_dict)}, not {sorted(self._each)}")
        for name, each in self._each.items():
            each.load_state_dict(state_dict[name])
        self.param_groups = self._groups()


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """True for this module's Muon, and for torch's own."""
    own = getattr(torch.optim, "Muon", MuonAndAdamW)
    return isinstance(optimizer, (MuonAndAdamW, own))


def _hidden(
    model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], others: tuple[str, ...]
) -> list[str]:
    """The names of the parameters for Muon."""
    for name in others:
        if not any(_is_of(each, name) for each in trained):
            raise ValueError(f"adamw has {name!r}: the model trains nothing of that name")
    apart = _embeddings(model)
    hidden = [
        name
        for name, p in trained.items()
        if p.ndim == 2
        and all(p is not each for each in apart)
        and not any(_is_of(name, other) for other in others)
    ]
    if not hidden:
        raise ValueError("the model has no matrix for Muon: use torch.optim.AdamW")
    return hidden


def _embeddings(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights of embeddings, and that of the output layer unless it is shared."""
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    weights: list[torch.Tensor] = [each.weight for each in tables]
    layers = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    tied = any(layer is weight for layer in layers for weight in weights)
    if layers and not tied and layers[-1].shape[0] in {each.num_embeddings for each in tables}:
        weights.append(layers[-1])
    return weights


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")
