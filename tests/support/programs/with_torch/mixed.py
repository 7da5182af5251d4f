"""A group with pccl for the CPU, and gloo for another device. Under torchrun with two processes."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pccl.torch.group import DeviceBackend


def main() -> None:
    dist.init_process_group("cpu:pccl,cuda:gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), DeviceBackend)
    mine = torch.full((3,), rank + 1.0)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    assert mine.tolist() == [3.0] * 3
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    whole, part = torch.empty(2 * size), torch.empty(2)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    dist.reduce_scatter_tensor(part, whole)
    assert part.tolist() == [2.0 * rank] * 2
    if rank == 0:
        dist.send(whole, 1)
    else:
        dist.recv(whole, 0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        ddp(torch.randn(3, 4)).sum().backward()
    grads = sum(p.grad.sum().item() for p in ddp.parameters() if p.grad is not None)
    pair = dist.new_group([0, 1])
    dist.barrier(pair)
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "size": size, "weights": grads}), flush=True)


if __name__ == "__main__":
    main()
