"""A peer that trains without end, and writes checkpoints with the others; it reports.

checkpointing.py ADDRESS DIRECTORY PEERS HANGS: if HANGS is not 0, it never ends writing its part of
the first checkpoint that is not earlier than this.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

import pccl
from pccl.diloco import Checkpoints, DiLoCo


def report(**what: object) -> None:
    print(json.dumps(what), flush=True)


def hang(step: int) -> None:
    """Writing a part does not end, and half of it is written."""
    write = FileSystemWriter.write_data

    def write_data(writer: Any, plan: Any, planner: Any) -> Any:
        if int(Path(writer.path).name) >= step:
            (Path(writer.path) / f"{plan.storage_data.prefix}0.distcp").write_bytes(b"half")
            report(writing=int(Path(writer.path).name))
            threading.Event().wait()
        return write(writer, plan, planner)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def main() -> None:
    address, directory, peers, hangs = sys.argv[1:]
    if int(hangs):
        hang(int(hangs))
    torch.set_num_threads(1)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pccl.Communicator(address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=2,
            min_peers=int(peers),
            checkpoints=Checkpoints(directory, every=2, keep=9),
        )
        report(begins=diloco.outer_step, digest=diloco.state_digest())
        while True:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            outer = diloco.step()
            if outer:
                digest = diloco.state_digest()
                report(step=outer.outer_step, peers=outer.contributors, digest=digest)


if __name__ == "__main__":
    main()
