"""A program that ends without destroying its process group. Under torchrun."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peers.waiting import wait_until

import pccl.torch  # noqa: F401 - registers the backend


def main() -> None:
    dist.init_process_group("pccl")
    mine = torch.ones(3)
    dist.all_reduce(mine)
    report = {"rank": dist.get_rank(), "size": dist.get_world_size(), "weights": mine.sum().item()}
    print(json.dumps(report), flush=True)
    ending = Path(os.environ["ENDING"])
    if dist.get_rank() == 0:
        atexit.register(ending.touch)  # it hosts the master, and waits for the others
    else:
        wait_until(ending.exists)


if __name__ == "__main__":
    main()
