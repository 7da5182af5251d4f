"""torchft's Manager over pccl: a replica that dies costs a step, and comes back with the weights.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 &
export TORCHFT_LIGHTHOUSE=http://localhost:29510
python examples/integrations/torchft_manager.py 0 &
python examples/integrations/torchft_manager.py 1 &
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer

from pccl.torch.torchft import ProcessGroupPCCL


def main(replica: str, steps: int = 50) -> None:
    model: Any = torch.nn.Linear(20, 1)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupPCCL(timeout=timedelta(seconds=10)),
        min_replica_size=2,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"replica_{replica}_",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    while manager.current_step() < steps:
        inputs = torch.rand(32, 20)
        optimizer.zero_grad()  # begins a quorum
        loss = torch.nn.functional.mse_loss(ddp(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()  # if all replicas commit it
        step, peers = manager.current_step(), manager.num_participants()
        weights = sum(p.sum().item() for p in model.parameters())
        print(f"{os.getpid()}: step {step}, {peers} replicas, weights {weights!r}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1])
