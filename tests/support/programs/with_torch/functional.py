"""Functional collectives, eager and compiled, FSDP2, HSDP and DTensor over groups of pccl.

Under torchrun with four processes; each part says so on a line when it is right.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pccl.torch  # noqa: F401 - registers the backend


def by_functions(given: Tensor) -> list[Tensor]:
    group = dist.group.WORLD
    total = functional.all_reduce(given, "sum", group)
    whole = functional.all_gather_tensor(given, 0, group)
    part = functional.reduce_scatter_tensor(whole, "avg", 0, group)
    turned = functional.all_to_all_single(whole, None, None, group)
    several = functional.all_reduce_coalesced([given, 2 * given], "max", group)
    return [functional.wait_tensor(each) for each in (total, whole, part, turned, *several)]


def check_functions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = torch.tensor([float(rank), 1.0])
    wanted_whole = [x for r in range(size) for x in (float(r), 1.0)]
    for call in (by_functions, torch.compile(by_functions, backend="aot_eager")):
        total, whole, part, turned, first, second = call(given)
        assert total.tolist() == [sum(range(size)), size]
        assert whole.tolist() == wanted_whole
        assert part.tolist() == [float(rank), 1.0]
        assert turned.tolist() == [float(rank), 1.0] * size
        assert first.tolist() == [size - 1, 1] and second.tolist() == [2 * size - 2, 2]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def data_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def undisturbed(steps: int) -> nn.Module:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        for rank in range(dist.get_world_size()):
            (model(data_of(step, rank)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_sharded(mesh: object) -> None:
    """Three steps of FSDP2 or HSDP have the result of one process with all data."""
    model = model_of()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(data_of(step, dist.get_rank())).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), undisturbed(3).parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.allclose(ours.full_tensor(), theirs, atol=1e-6)


def check_tensors() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(4 * size)).view(2 * size, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    product = sharded @ distribute_tensor(torch.eye(2), mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole)


def main() -> None:
    dist.init_process_group("pccl")
    size = dist.get_world_size()
    check_functions()
    check_tensors()
    check_sharded(init_device_mesh("cpu", (size,)))
    for backends in ({}, {"replicate": "pccl", "shard": "gloo"}):
        mesh = init_device_mesh(
            "cpu",
            (size // 2, 2),
            mesh_dim_names=("replicate", "shard"),
            backend_override=backends,
        )
        check_sharded(mesh)
    rank = dist.get_rank()
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "size": size, "weights": 0}), flush=True)


if __name__ == "__main__":
    main()
