"""Ray Train over pccl: only `backend` of TorchConfig changes.

python examples/integrations/ray_train.py out

If a worker dies, Ray restarts all of them, from the last checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(config: dict[str, int]) -> None:
    model = prepare_model(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        begin = state["step"]
    for step in range(begin + 1, config["steps"] + 1):
        inputs = torch.rand(32, 20)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend, weights = torch.distributed.get_backend(), model.module.weight.sum().item()
        print(f"{os.getpid()}: step {step} by {backend}, weights {weights!r}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"model": model.state_dict(), "step": step}, Path(folder, "state.pt"))
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=saved)


def main(folder: str) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 20},
        torch_config=TorchConfig(backend="pccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(folder).absolute()),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
