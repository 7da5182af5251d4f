"""A peer that trains until it is killed, by DiLoCo or by DDP: python warned.py METHOD.

It says how many peers the last mean had whenever that number changes. What it logs goes to stdout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import pccl
import pccl.torch
from pccl.diloco import DiLoCo


def by_diloco(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
        diloco = DiLoCo(comm, model, optimizer, inner_steps=2, min_peers=2, alone="step")
        while True:
            model(torch.randn(4, 3)).square().mean().backward()
            if outer := diloco.step():
                yield outer.contributors


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    dist.init_process_group("pccl", init_method="pccl://", world_size=2)
    ddp = pccl.torch.DistributedDataParallel(model, {"optimizer": optimizer})
    while True:
        ddp(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield dist.get_world_size()


def main() -> None:
    os.dup2(1, 2)
    torch.seed()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (method,) = sys.argv[1:]
    peers = 0
    for now in {"DiLoCo": by_diloco, "DDP": by_ddp}[method](model, optimizer):
        if now != peers:
            peers = now
            print(f"{now} peers", flush=True)


if __name__ == "__main__":
    main()
