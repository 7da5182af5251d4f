"""A replica of elastic data-parallel training, which reports each step.

replica.py ADDRESS WORLD_SIZE PEER STEPS [WIRE]: with torch's own class, if WIRE is "torch"
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
import xxhash

import pccl.torch


def main() -> None:
    address, (size, peer, steps) = sys.argv[1], map(int, sys.argv[2:5])
    wire = sys.argv[5] if len(sys.argv) > 5 else "fp32"
    warnings.simplefilter("ignore")
    dist.init_process_group("pccl", init_method=f"pccl://{address}", world_size=size)
    torch.manual_seed(peer)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    states = {"optimizer": optimizer}
    if wire == "torch":
        ddp, begins = torch.nn.parallel.DistributedDataParallel(model), 0
    else:
        ddp = pccl.torch.DistributedDataParallel(model, states, wire=wire)
        begins = ddp.steps
    print(json.dumps({"begins": begins, "rank": dist.get_rank()}), flush=True)
    for step in range(begins, steps):
        given = torch.randn(64, 32, generator=torch.Generator().manual_seed(997 * step + peer))
        loss = (ddp(given) - given.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest = xxhash.xxh3_64()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        report = {"step": step, "size": dist.get_world_size(), "digest": digest.hexdigest()}
        print(json.dumps({**report, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
