"""One process of a replica that DiLoCo trains, with a model sharded by FSDP2; it reports.

fsdp_diloco.py ADDRESS REPLICA ROUNDS RANK SIZE PORT OPTIONS STOP: RANK to PORT are of the replica,
OPTIONS are DiLoCo's, as JSON. After outer step STOP it waits until it is killed; 0: it goes on
"""

from __future__ import annotations

import json
import sys
import threading
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccl.torch
from pccl.diloco import DiLoCo

WIDTH = 5  # rows of 3: the shards are not equal


class Layer(torch.nn.Module):
    """Weights that come nearer to what they are given; all bits follow from elementwise sums."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH, 3), value))
        self.bias = torch.nn.Parameter(torch.full((1,), value))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.weight - given).square().sum() / 2 + (self.bias - given[0, :1]).square().sum()


class Model(torch.nn.Module):
    """Two layers; one has a frozen parameter."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(replica + 0.5), Layer(replica - 0.25)])
        self.layers[1].bias.requires_grad = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return sum(layer(given) for layer in self.layers)  # type: ignore[return-value]


def data(replica: int, rank: int, step: int) -> torch.Tensor:
    """The training data of a process: eighths."""
    seed = 10_000 * replica + 1000 * rank + step
    return torch.randint(-8, 8, (WIDTH, 3), generator=torch.Generator().manual_seed(seed)) / 8


def main() -> None:
    address, options = sys.argv[1], json.loads(sys.argv[7])
    replica, rounds, rank, size, port = map(int, sys.argv[2:7])
    stop = int(sys.argv[8])
    warnings.simplefilter("ignore")
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    model = Model(replica)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    with pccl.torch.communicator(address) as comm:
        diloco = DiLoCo(comm, model, optimizer, **options)
        print(json.dumps({"begins": diloco.outer_step}), flush=True)
        step = 0
        while diloco.outer_step < rounds:
            model(data(replica, rank, step)).backward()
            step += 1
            outer = diloco.step()
            if outer is None or outer.contributors < 2:
                continue
            report = {"step": outer.outer_step, "contributors": outer.contributors, "rank": rank}
            parts = [p.to_local().flatten().tolist() for p in model.parameters()]
            print(json.dumps({**report, "inner": step, "parts": parts}), flush=True)
            if outer.outer_step == stop:
                threading.Event().wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
