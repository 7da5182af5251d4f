"""Replicas of a sharded model (FSDP2): gradients are averaged over them, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pccl.support.text import address_text, parse_address
from pccl.torch.creation import join
from pccl.torch.group import TIMEOUT
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

    The processes of a replica are started together (by torchrun), and end together; replicas come
    and go. The first shards of all replicas are a run of their own, as are the second ones: shard s
    joins the master at the address's port + s. A replica that is lost costs the others a retry;
    gradients are averaged over those that have contributed. A newcomer is admitted between two
    steps, when all its processes are there, and receives the shards of parameters, buffers and
    states, and the number of steps.

    Args:
        address: `host:port` of the master of the first shards.
        model: after `fully_shard`.
        states: what a newcomer receives beside the model, by name.
        begin: replicas that a run begins with.
        shards: the group of the processes of this replica; None: the default group.
        timeout: how long a collective may take.

    Raises:
        ValueError: the model is not sharded by FSDP2, or a replica's model differs from the run's.
        PCCLError: as `Communicator.connect`.
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
        host, port = parse_address(address)
        self._shards = shards
        here = address_text(host, port + dist.get_rank(shards))
        self._group = join(here, begin, timeout=timeout)
        for module in modules:
            module.set_all_reduce_hook(self._average)
        self._phase = Phase(self._group, model, states or {}, self._all)
        self._phase.settle(self._group.getSize())
        self._phase.synchronise()

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

    def _average(self, gradient: torch.Tensor) -> None:
        """Averages the reduced shard of a gradient over the replicas."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        self._group.allreduce([gradient], options).wait()

    def _all(self, numbers: list[int]) -> list[list[int]]:
        """The same numbers of all processes of this replica."""
        mine = torch.tensor(numbers)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._shards))]
        dist.all_gather(gathered, mine, group=self._shards)
        return [each.tolist() for each in gathered]
