"""One process of a replica with a model sharded by FSDP2; reports each step.

sharded.py ADDRESS BEGIN REPLICA STEPS RANK SIZE PORT: the last three are of the replica
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccl.torch


def new_model(seed: int) -> torch.nn.Sequential:
    """The same in all processes that give the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def loss_of(model: torch.nn.Module, replica: int, rank: int, step: int) -> torch.Tensor:
    """The loss of what a process of a replica trains on in a step."""
    seed = 997 * step + 10 * replica + rank
    given = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = (model(given) - given.sum(1, keepdim=True)).square().mean()
    return loss


def main() -> None:
    address, begin, replica, steps, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    warnings.simplefilter("ignore")
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = new_model(replica)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    replicas = pccl.torch.Replicas(address, model, {"optimizer": optimizer}, begin=begin)
    print(json.dumps({"begins": replicas.steps, "rank": rank}), flush=True)
    while replicas.steps < steps:
        step = replicas.steps
        replicas.step()
        loss = loss_of(model, replica, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest = xxhash.xxh3_64()
        for parameter in model.parameters():
            digest.update(parameter.to_local().detach().numpy().tobytes())
        report = {"step": step, "size": replicas.size, "digest": digest.hexdigest()}
        who = {"replica": replica, "rank": rank}
        print(json.dumps({**report, **who, "loss": loss.item()}), flush=True)
    replicas.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
