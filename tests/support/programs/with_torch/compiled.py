"""Calls of torch.distributed in compiled functions; under torchrun with two processes.

By the backend of the argument. Each is right, as it is without torch.compile.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def broadcast(x: Tensor) -> Tensor:
    y = x + 1
    dist.broadcast(y, 0)
    return 2 * y


def reduce(x: Tensor) -> Tensor:
    y = x + 1
    dist.reduce(y, 0)
    return 2 * y


def all_reduce(x: Tensor) -> Tensor:
    y = x + 1
    dist.all_reduce(y)
    return 2 * y


def all_reduce_async(x: Tensor) -> Tensor:
    y = x + 1
    work = dist.all_reduce(y, async_op=True)
    z = 3 * x
    work.wait()
    return y + z


def all_gather(x: Tensor) -> Tensor:
    outputs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, x + 1)
    return torch.cat(outputs)


def send_recv(x: Tensor) -> Tensor:
    y = 2 * x
    if dist.get_rank() == 0:
        dist.send(y, 1)
    else:
        dist.recv(y, 0)
    return y + 1


def batch(x: Tensor) -> Tensor:
    other = 1 - dist.get_rank()
    y, z = 2 * x, torch.empty_like(x)
    both = [dist.P2POp(dist.isend, y, other), dist.P2POp(dist.irecv, z, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return y + z


def barrier(x: Tensor) -> Tensor:
    y = 2 * x
    dist.barrier()
    return y


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(steps):
        given = torch.full((3, 4), float(step + dist.get_rank()))
        loss = model(given).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(compiled: bool) -> list[float]:
    model = fully_shard(model_of())
    return trained(torch.compile(model, backend="aot_eager") if compiled else model)


def main() -> None:
    dist.init_process_group(sys.argv[1])
    x = torch.arange(4.0) + dist.get_rank()
    calls = [broadcast, reduce, all_reduce, all_reduce_async, all_gather, send_recv, batch, barrier]
    for call in calls:
        found = torch.compile(call, backend="aot_eager")(x)
        assert torch.equal(found, call(x)), call.__name__
    eager = trained(DistributedDataParallel(model_of()))
    whole = torch.compile(DistributedDataParallel(model_of()), backend="aot_eager")
    inner = DistributedDataParallel(torch.compile(model_of(), backend="aot_eager"))
    for losses in (trained(whole), trained(inner), sharded(False), sharded(True)):
        assert all(abs(a - b) < 1e-6 for a, b in zip(losses, eager, strict=True)), losses
    report = {"rank": dist.get_rank(), "size": dist.get_world_size(), "weights": 0}
    dist.destroy_process_group()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "pccl":
        import pccl.torch  # noqa: F401 - registers the backend
    main()
