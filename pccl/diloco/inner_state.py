"""The state of the inner optimizer, as a checkpoint has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pccl.diloco.replica import Replica, is_sharded, local

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class InnerState:
    """Saves and loads an inner optimizer, whose tensors may be sharded as its parameters are."""

    def __init__(self, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
        self._optimizer = optimizer
        self._replica = replica

    def fill(self) -> None:
        """Makes the state that an optimizer has after its first step, so that it can be loaded."""
        if self._optimizer.state:
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad()

    def state_dict(self, sharded: bool) -> dict[str, Any]:
        """A copy: whole, or with DTensors, whose keys are text as those of checkpoints are."""
        state = copy.deepcopy(self._optimizer.state_dict())
        if self._replica.is_sharded:
            self._check_kind(state)
            state["state"] = {
                str(index) if sharded else index: self._mapped(index, values, sharded)
                for index, values in state["state"].items()
            }
        return {"type": type(self._optimizer).__name__, "state": state}

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if "state" not in state:
            raise ValueError(
                f"the state of a {type(self._optimizer).__name__} of sharded parameters cannot be "
                "saved: it is not in the form that torch's own optimizers have"
            )

    def _mapped(self, index: int, values: Mapping[str, Any], sharded: bool) -> dict[str, Any]:
        def saved(value: Any) -> Any:
            if not is_sharded(value):
                return value
            return value if sharded else self._replica.whole(value, local(value))

        return {name: saved(value) for name, value in values.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over such a state.

        Raises:
            ValueError: it is of another optimizer.
        """
        anew = 'give it without "optimizer" to begin with a fresh one'
        if not isinstance(saved, Mapping) or not {"type", "state"} <= {*saved}:
            raise ValueError(f"the state of the inner optimizer is none: {anew}")
        kind, own = saved["type"], type(self._optimizer).__name__
        if kind != own:
            raise ValueError(
                f"the state is of the inner optimizer {kind}, and this peer's is {own}: {anew}"
            )
        if not isinstance(saved["state"], Mapping):
            raise ValueError(f"the state of the inner optimizer is none: {anew}")
        state = copy.deepcopy(dict(saved["state"]))
        if self._replica.is_sharded:
            self._check_kind(state)
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            state["state"] = {
                int(index): self._parts(parameters[int(index)], values)
                for index, values in state["state"].items()
                if int(index) < len(parameters)
            }
        before = self._optimizer.state_dict()
        try:
            self._optimizer.load_state_dict(state)
        except Exception as error:
            self._optimizer.load_state_dict(before)
            raise ValueError(
                f"the inner optimizer of the state does not fit: {error}; {anew}"
            ) from error

    def _parts(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of what is of the size of a sharded parameter, the part that is here."""

        def part(value: Any) -> Any:
            if not is_sharded(parameter) or not torch.is_tensor(value):
                return value
            if is_sharded(value) or value.shape != parameter.shape:
                return value
            return self._replica.joint(parameter, self._replica.part(parameter, value))

        return {name: part(value) for name, value in values.items()}
