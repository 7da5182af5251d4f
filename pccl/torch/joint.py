"""One peer of a run for each of the processes over which a replica of a model is sharded."""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist

from pccl import Communicator
from pccl.torch.agreement import Shards


def communicator(
    address: str, shards: dist.ProcessGroup | None = None, **more: Any
) -> Communicator:
    """A communicator for each process of a replica whose model is sharded; all make this call.

        dist.init_process_group("nccl")  # or gloo: the processes of this replica
        fully_shard(model)
        with pccl.torch.communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)

    Shard s of all replicas is peer group s of one run. The processes of a replica are a team: they
    are admitted together, and when one of them is lost, the run goes on without the others, whose
    calls raise `KickedError`. Start the whole replica again.

    Args:
        address: `host:port` of the master.
        shards: the group of the processes of this replica; None: the default group.
        more: other arguments of `Communicator`.

    Returns:
        One that is not connected yet.
    """
    drawn = [secrets.randbits(62) + 1]
    dist.broadcast_object_list(drawn, group_src=0, group=shards)
    size, rank = dist.get_world_size(shards), dist.get_rank(shards)
    return Communicator(address, rank, team=drawn[0], team_size=size, **more)


def exchange(shards: dist.ProcessGroup | None, device: torch.device) -> Shards:
    """What all processes of a replica say, by a collective of torch with memory of that device."""

    def said(numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(shards))]
        dist.all_gather(gathered, mine, group=shards)
        return [each.tolist() for each in gathered]

    return said
