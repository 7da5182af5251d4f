"""A loop of Accelerate over pccl, with an unchanged script.

PCCL_ACCELERATE=1 accelerate launch --cpu --num_processes 2 examples/integrations/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains for one epoch."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    given = torch.rand(512, 20)
    samples = DataLoader(TensorDataset(given, given.sum(1, keepdim=True)), 16, shuffle=True)
    model, optimizer, samples = accelerator.prepare(model, optimizer, samples)
    for inputs, targets in samples:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    backend = torch.distributed.get_backend()
    rank, size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {size} by {backend}, loss {mean:.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
