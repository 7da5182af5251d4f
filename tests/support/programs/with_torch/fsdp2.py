"""A transformer that FSDP2 shards, with checkpoints, in the shape of torch's example.

fsdp2.py STEPS SAVE_EVERY CHECKPOINTS [SHARDS]: under torchrun. With SHARDS, the backend of the
shard dimension, it is HSDP: two replicas, whose dimension is pccl's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tell import digest, tell
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import pccl.torch  # noqa: F401 - registers the backend

VOCABULARY, LENGTH, WIDTH = 64, 16, 32
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def mesh_of(shards: str) -> dist.device_mesh.DeviceMesh:
    size = dist.get_world_size()
    if not shards:
        return dist.device_mesh.init_device_mesh("cpu", (size,))
    names, backends = ("replicate", "shard"), {"replicate": "pccl", "shard": shards}
    return dist.device_mesh.init_device_mesh(
        "cpu", (2, size // 2), mesh_dim_names=names, backend_override=backends
    )


def main(steps: int, save_every: int, folder: Path, shards: str = "") -> None:
    dist.init_process_group(os.environ.get("BACKEND", "pccl"))
    rank, mesh = dist.get_rank(), mesh_of(shards)
    torch.manual_seed(0)
    model = Transformer()
    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    first = 0
    saved = folder / "whole.pt"
    if saved.exists():
        whole = torch.load(saved, mmap=True)
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole["model"] if rank == 0 else {}, options=broadcast)
        set_optimizer_state_dict(
            model, optimizer, whole["optimizer"] if rank == 0 else {}, options=broadcast
        )
        first = whole["steps"]
    tell(begins=first)
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator).sort(1).values
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mine = (p.to_local() for p in model.parameters() if isinstance(p, DTensor))
        tell(epoch=step, loss=loss.item(), shard=digest(mine))
        if (step + 1) % save_every == 0:
            whole = {
                "model": get_model_state_dict(model, options=WHOLE),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
                "steps": step + 1,
            }
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(whole, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
