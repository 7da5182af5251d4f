"""A loop with accelerate, with checkpoints.

accelerated.py STEPS SAVE_EVERY FOLDER: under torchrun, or accelerate launch
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tell import digest, tell
from torch.utils.data import DataLoader, TensorDataset

import pccl.torch  # noqa: F401 - registers the backend


def main(steps: int, save_every: int, folder: Path) -> None:
    dist.init_process_group(os.environ.get("BACKEND", "pccl"))
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    given = torch.rand(4096, 20, generator=torch.Generator().manual_seed(1))
    samples = DataLoader(TensorDataset(given, given.sum(1, keepdim=True)), 16, shuffle=True)
    model, optimizer, samples, schedule = accelerator.prepare(model, optimizer, samples, schedule)
    step, saved = 0, folder / "state"
    done = folder / "steps"
    if done.exists():
        accelerator.load_state(saved / done.read_text())
        step = int(done.read_text())
    tell(begins=step)
    while step < steps:
        for inputs, targets in samples:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            tell(epoch=step, loss=loss.item(), digest=digest(model.parameters()))
            step += 1
            if step % save_every == 0:
                accelerator.save_state(saved / str(step))
                if accelerator.is_main_process:
                    done.with_suffix(".new").write_text(str(step))
                    done.with_suffix(".new").rename(done)
            if step == steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
