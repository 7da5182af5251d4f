"""A program of torch.distributed that knows nothing of pccl but the import and the backend's name.

tour.py [INIT_METHOD WORLD_SIZE]; without them, torchrun has set the environment.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pccl.torch


def train(rank: int) -> float:
    torch.manual_seed(rank)  # DDP makes them equal
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        given = torch.randn(16, 8)
        loss = (ddp(given) - given.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sum(p.sum().item() for p in model.parameters())


def train_unevenly(rank: int) -> None:
    """The ranks make 2, 3, ... steps; gradients are averaged over those that still train."""
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            assert ddp.module.weight.grad.tolist() == [[1.0, 1.0]]


def main() -> None:
    if len(sys.argv) > 1:
        dist.init_process_group("pccl", init_method=sys.argv[1], world_size=int(sys.argv[2]))
    else:
        dist.init_process_group("pccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert isinstance(dist.group.WORLD, pccl.torch.ProcessGroup)
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(size)]
    told = [{"from": rank}]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"from": 1}]
    weights = train(rank)
    train_unevenly(rank)
    last = dist.new_group([size - 1])
    pair, by_gloo = dist.new_group([0, 1]), dist.new_group(backend="gloo")
    for group, members in ((last, [size - 1]), (pair, [0, 1]), (by_gloo, list(range(size)))):
        if rank in members:
            mine = torch.tensor([1 << rank])
            dist.all_reduce(mine, group=group)
            assert mine.item() == sum(1 << r for r in members)
            assert dist.get_rank(group) == members.index(rank)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "size": size, "weights": weights}), flush=True)


if __name__ == "__main__":
    main()
