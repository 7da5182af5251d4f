"""Elastic data parallel training: of whole models, and of models that are sharded by FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Base

from pccl.torch import hooks
from pccl.torch.group import TIMEOUT, ProcessGroup
from pccl.torch.members import communicator, exchange
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


class Replicas:
    """Replicas of a model that FSDP2 has sharded over the default group of each.

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # gloo or nccl: the shards
        fully_shard(model, mesh=mesh)
        replicas = pccl.torch.Replicas("host:48148", model, {"optimizer": optimizer}, begin=2)
        while replicas.steps < 1000:
            replicas.step()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    The processes of a replica are started together (by torchrun), and end together: they are a team
    of peers, and when one of them is lost, the run goes on without the others, whose calls raise
    `KickedError`. Shard s of all replicas is peer group s of one run. A replica that is lost costs
    the others a retry; all shards of a gradient are averaged over the same replicas. A newcomer is
    admitted between two steps, when all its processes are there, and receives the shards of
    parameters, buffers and states, and the number of steps.

    Args:
        address: `host:port` of the master.
        model: after `fully_shard`.
        states: what a newcomer receives beside the model, by name.
        begin: replicas that a run begins with.
        shards: the group of the processes of this replica; None: the default group.
        timeout: how long a collective may take.

    Raises:
        ValueError: the model is not sharded by FSDP2, or a replica's model differs from the run's.
        PCCLError: as `Communicator.connect`.
        PeerLostError: the replica that sent this one the state was lost meanwhile, and nobody else
            has it: this replica must be started again.
    """

    def __init__(
        self,
        address: str,
        model: torch.nn.Module,
        states: Mapping[str, Stateful] | None = None,
        *,
        begin: int = 1,
        shards: dist.ProcessGroup | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not modules:
            raise ValueError("the model is not sharded: call fully_shard() first")
        seconds = timeout.total_seconds()
        comm = communicator(address, shards, connect_timeout=seconds)
        try:
            comm.connect(timeout=seconds)
            self._group = ProcessGroup(
                comm,
                size=begin,
                timeout=timeout,
                store=HashStore(),  # nobody asks for it
                shards=exchange(shards, _device(model)),
            )
            for module in modules:
                module.set_all_reduce_hook(lambda gradient: average(self._group, gradient))
            self._phase = Phase(self._group, model, states or {})
            self._phase.synchronise()
        except BaseException:
            comm.close()
            raise

    @property
    def steps(self) -> int:
        """Steps that have begun since the run did; the same on all processes of all replicas."""
        return self._phase.steps

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self._group.getSize()

    def step(self) -> None:
        """The next step begins: replicas that have come since the last one are in it."""
        self._phase.step()

    def close(self) -> None:
        """Leaves the run."""
        self._group.shutdown()


def average(group: ProcessGroup, gradient: torch.Tensor) -> None:
    """Averages a shard of a gradient over the replicas, in place.

    Each process averages its shard with those of the same shard only, so a replica that is lost
    meanwhile may be in the mean of one shard and not in that of another. It is lost as a whole, and
    nobody joins in the middle of a step: means of equally many replicas are means of the same ones.
    Otherwise all of them are made once more. All replicas find the same.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    own = gradient.detach().clone()
    while True:
        work = group.allreduce([gradient], options)
        work.wait()
        contributors = [work.operation.contributors]
        if all(said == contributors for said in group.shards(contributors)):
            return
        gradient.detach().copy_(own)


def _device(model: torch.nn.Module) -> torch.device:
    """The device of the tensors that the processes of a replica exchange."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    raise ValueError("the model has no sharded parameters: call fully_shard() first")
