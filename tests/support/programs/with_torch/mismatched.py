"""Calls of torch.distributed that do not match, under torchrun with two processes.

Each fails on both, with an error that names both calls; the next call succeeds.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import pccl


def failure(call: str, tensor: torch.Tensor) -> str:
    try:
        dist.broadcast(tensor, 0) if call == "broadcast" else dist.all_reduce(tensor)
    except pccl.MismatchError as error:
        return str(error)
    raise AssertionError(f"{call} has succeeded")


def main() -> None:
    dist.init_process_group("pccl")
    rank, x = dist.get_rank(), torch.ones(4)
    kinds = failure("broadcast" if rank else "all_reduce", x)
    assert "all_reduce(4 elements" in kinds and "broadcast(4 elements" in kinds, kinds
    sizes = failure("all_reduce", torch.ones(4 + rank))
    assert "all_reduce(4 elements" in sizes and "all_reduce(5 elements" in sizes, sizes
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4
    report = {"rank": rank, "size": dist.get_world_size(), "weights": 0}
    dist.destroy_process_group()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
