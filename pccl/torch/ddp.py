"""DistributedDataParallel whose replicas come and go."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Base

from pccl.torch import hooks
from pccl.torch.group import ProcessGroup
from pccl.torch.phase import Phase, Stateful

Wire = Literal["fp32", "int8", "int4", "e3m0", "2bit", "sparse"]

# whether replicas take the buffers of rank 0 in each step; its name since torch 2.13, and before
_NAMES = inspect.signature(Base.__init__).parameters
_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _NAMES)


class DistributedDataParallel(Base):
    """torch's DistributedDataParallel, with replicas that may be lost and may join at any step.

        ddp = pccl.torch.DistributedDataParallel(model, {"optimizer": optimizer})
        while ddp.steps < 1000:
            loss_function(ddp(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    A replica that is lost in a backward pass costs a retry: gradients are averaged over those that
    have contributed. A newcomer is admitted between two steps. Where it constructs this object, it
    receives parameters, buffers, the states and the number of steps from the others; after
    `init_process_group`, it must make no other collective before that.

    All replicas make equally many forward passes for training; those without gradients, and those
    in `no_sync()`, do not count. At the construction, rank 0 gives its model to all.

    Args:
        module: the model.
        states: what a newcomer receives beside it, by name: the optimizer, a scheduler, and
            whatever has `state_dict` and `load_state_dict`.
        process_group: None: the default group.
        wire: how gradients travel: "fp32" as they are, or quantized with error feedback.
        arguments: others of torch's class.

    Raises:
        ValueError: the group is not one of pccl, or an argument contradicts the elasticity.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        states: Mapping[str, Stateful] | None = None,
        *,
        process_group: Any = None,
        wire: Wire = "fp32",
        **arguments: Any,
    ) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, ProcessGroup):
            raise ValueError('the group is not one of pccl: init_process_group("pccl", ...)')
        if arguments.get("static_graph"):
            raise ValueError("static_graph is not possible: a newcomer would be in another step")
        # What its construction and its second step exchange with the other replicas would find no
        # partner, where they are in the middle of the training: so it is left out.
        fixed = {"init_sync": False, "find_unused_parameters": True, _BUFFERS: False}
        for name, value in fixed.items():
            if arguments.setdefault(name, value) != value:
                raise ValueError(f"{name} must be {value}: replicas join in the middle of a run")
        super().__init__(module, process_group=group, **arguments)
        if wire == "fp32":
            self.register_comm_hook(group, hooks.avg)
        else:
            self.register_comm_hook(hooks.Quantized(wire, group), hooks.quantized)
        self._phase = Phase(group, module, states or {})
        self._phase.synchronise()

    @property
    def steps(self) -> int:
        """Training steps that have begun since the run did; the same on all replicas."""
        return self._phase.steps

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """The forward pass of the model; the first of a training step admits newcomers."""
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._phase.step()
        return super().forward(*inputs, **more)  # type: ignore[no-untyped-call]
