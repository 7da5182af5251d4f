"""One process of a replica that trains by DiLoCo, and saves its state whole and sharded.

fsdp_checkpoint.py ADDRESS DIRECTORY; under torchrun
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccl.torch
from pccl.diloco import Checkpoints, DiLoCo

OPTIONS = {"inner_steps": 2, "alone": "step", "wire": "int8", "mode": "delayed"}


def build(seed: int, processes: int) -> torch.nn.Module:
    """A model, sharded over so many; their first layer is frozen in part."""
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )
    model[0].bias.requires_grad = False
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(comm: pccl.Communicator, model: torch.nn.Module, rounds: int, **options: Any) -> DiLoCo:
    """After so many rounds alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    diloco = DiLoCo(comm, model, optimizer, **OPTIONS, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 * rounds):
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        diloco.step()
    return diloco


def main() -> None:
    address, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    with pccl.torch.communicator(address) as comm:
        together = Checkpoints(directory / "together", every=2)
        diloco = trained(comm, build(0, dist.get_world_size()), 3, checkpoints=together)
        dcp.save(diloco.state_dict(sharded=True), checkpoint_id=directory / "sharded")
        diloco.save(directory / "whole")
        diloco.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
