"""DiLoCo in a loop of Accelerate: each peer is a separate process with its own data.

pccl master &
python examples/integrations/accelerate_diloco.py out1 127.0.0.1:48148 &
python examples/integrations/accelerate_diloco.py out2 127.0.0.1:48148 &
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diloco_training import DiLoCoTraining, main


class DiLoCoState(DiLoCoTraining):
    """DiLoCo's state in the Accelerator's checkpoints, by `register_for_checkpointing`."""

    saved: dict[str, Any] | None = None
    steps = 0  # of the optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"diloco": self.diloco.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved, self.steps = state["diloco"], state["steps"]


def train(diloco: DiLoCoState, folder: str, steps: int) -> None:
    """Trains, from the last checkpoint if there is one."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run")
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    accelerator.register_for_checkpointing(diloco)
    checkpoint = Path(folder) / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    diloco.begin(model, optimizer.optimizer, state=diloco.saved, log_metrics=accelerator.log)
    while diloco.steps < steps:
        inputs = torch.rand(32, 20)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        diloco.steps += 1
        if diloco.steps % 20 == 0:
            accelerator.save_state(str(checkpoint))
    diloco.end()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:], DiLoCoState, train)
