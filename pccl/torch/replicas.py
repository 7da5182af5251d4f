"""Replicas of a sharded model (FSDP2): gradients are averaged over them, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pccl.torch.group import TIMEOUT, ProcessGroup
from pccl.torch.joint import communicator, exchange
from pccl.torch.phase import Phase, Stateful


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
    """Whose tensors the processes of a replica exchange."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    raise ValueError("the model has no sharded parameters: call fully_shard() first")
