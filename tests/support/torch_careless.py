"""A program that ends without destroying its process group. Under torchrun."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

import pccl.torch  # noqa: F401 - registers the backend


def main() -> None:
    dist.init_process_group("pccl")
    mine = torch.ones(3)
    dist.all_reduce(mine)
    report = {"rank": dist.get_rank(), "size": dist.get_world_size(), "weights": mine.sum().item()}
    print(json.dumps(report), flush=True)
    time.sleep(0.5 * dist.get_rank())  # the others end after the one that hosts the master


if __name__ == "__main__":
    main()
