"""torch's libraries over groups of pccl give what they give over gloo: pipelines, ZeRO, Join, DCP.

Under torchrun: libraries.py FOLDER, where FOLDER is for checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Shard, distribute_tensor


def layer_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def pipeline(group: Any, make: Any, stages_each: int) -> list[Tensor]:
    """The gradients of this rank's stages, and the losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    given, wanted = torch.randn(8, 8), torch.randn(8, 8)
    layers = [layer_of(rank + size * i) for i in range(stages_each)]
    stages = [
        PipelineStage(layer, rank + size * i, size * stages_each, torch.device("cpu"), group=group)
        for i, layer in enumerate(layers)
    ]
    schedule = make(stages if stages_each > 1 else stages[0], 4, nn.functional.mse_loss)
    losses: list[Tensor] = []
    last = rank == size - 1
    more = {"target": wanted, "losses": losses} if last else {}
    schedule.step(*([given] if rank == 0 else []), **more)
    return [p.grad for layer in layers for p in layer.parameters()] + losses


def zero(group: Any) -> list[Tensor]:
    model = layer_of(1)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    for step in range(3):
        model(torch.full((2, 8), float(step))).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    found = [p.detach() for p in model.parameters()]
    if dist.get_rank() == 0:
        found += [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    return found


class Counter(Joinable):
    """All-reduces in each step; a rank that has joined takes part in those of the others."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.total, self.last = group, 0.0, torch.tensor([-1])

    def step(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one, group=self.group)
        self.total += one.item()

    def join_hook(self, **_: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                dist.all_reduce(torch.zeros(1), group=counter.group)

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.last = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                dist.all_reduce(counter.last, dist.ReduceOp.MAX, group=counter.group)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


def join(group: Any) -> list[Tensor]:
    counter = Counter(group)
    with Join([counter]):
        for _ in range(2 + dist.get_rank()):
            counter.step()
    found = [torch.tensor([counter.total]), counter.last]
    try:
        with Join([counter], throw_on_early_termination=True):
            for _ in range(2 + dist.get_rank()):
                counter.step()
    except RuntimeError as error:
        return [*found, torch.tensor([len(str(error))])]
    raise AssertionError("a rank has fewer inputs than others")


def checkpoint(group: Any, folder: Path) -> list[Tensor]:
    """Saves in shards, and loads as other shards."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(16.0).view(4, 4) + 1
    saved = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.tensor([3.0])}
    dcp.save(saved, checkpoint_id=folder, process_group=group)
    state = {"a": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]), "b": torch.zeros(1)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    assert torch.equal(state["a"].full_tensor(), whole)
    return [state["a"].to_local(), state["b"]]


def main() -> None:
    dist.init_process_group("pccl")
    ours, theirs = dist.group.WORLD, dist.new_group(backend="gloo")
    folder = Path(sys.argv[1])
    parts: dict[str, Callable[[Any], list[Tensor]]] = {
        "GPipe": lambda group: pipeline(group, ScheduleGPipe, 1),
        "1F1B": lambda group: pipeline(group, Schedule1F1B, 1),
        "interleaved 1F1B": lambda group: pipeline(group, ScheduleInterleaved1F1B, 2),
        "ZeRO": zero,
        "Join": join,
        "DCP": lambda group: checkpoint(group, folder / dist.get_backend(group)),
    }
    for name, part in parts.items():
        for one, other in zip(part(ours), part(theirs), strict=True):
            assert torch.allclose(one, other, atol=1e-6), name
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "size": size, "weights": 0}), flush=True)


if __name__ == "__main__":
    main()
