"""A replica whose model is sharded over several processes by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from pccl.diloco.replica import Replica, is_sharded, local


class Sharded(Replica):
    """The processes over which `fully_shard` has sharded a model, on a mesh of one dimension."""

    is_sharded = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.reshard()
        named = list(model.named_parameters())
        whole = [name for name, p in named if not is_sharded(p)]
        if whole:
            raise ValueError(
                f"parameter {whole[0]!r} is not sharded, and others are: "
                "call fully_shard() for the whole model, too"
            )
        meshes = [parameter.device_mesh for _, parameter in named]  # type: ignore[attr-defined]
        mesh = self._mesh = meshes[0]
        if any(one != mesh for one in meshes) or mesh.ndim != 1:
            raise ValueError(
                f"the parameters are on {mesh} and may be on others: DiLoCo needs one mesh of one "
                "dimension, which shards; what replicates it is the run"
            )
        for name, parameter in named:
            (placement,) = parameter.placements  # type: ignore[attr-defined]
            if not placement.is_shard():
                raise ValueError(f"parameter {name!r} is {placement} on the mesh, and not sharded")
        self._group = mesh.get_group()
        self.size, self.index = mesh.size(), mesh.get_local_rank()

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """What all processes say, by a collective of torch."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._mesh.device_type)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(said, mine, group=self._group)
        return [row.tolist() for row in said]

    def reshard(self) -> None:
        """Frees gathered parameters, which an evaluation leaves behind and which are old now."""
        for module in self._modules:
            module.reshard()

    def whole(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The parts of all processes."""
        return self._joint(like, part).full_tensor().cpu()

    def joint(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A DTensor, of which each process has its part."""
        return self._joint(like, part.clone())

    def _joint(self, like: torch.Tensor, part: torch.Tensor) -> DTensor:
        assert isinstance(like, DTensor)
        return DTensor.from_local(
            part.detach().to(self._mesh.device_type),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def part(self, like: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Cuts a whole tensor as `like` is cut, without asking the other processes."""
        if is_sharded(saved):
            return local(saved)
        assert isinstance(like, DTensor)
        given = saved.to(self._mesh.device_type)
        cut: Any = distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)
        return local(cut)
