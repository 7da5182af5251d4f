"""Lightning's Trainer over pccl: only `process_group_backend` of its strategy changes.

torchrun --nproc-per-node 2 examples/integrations/lightning_ddp.py
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """Learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(20, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.inner(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def samples() -> DataLoader[Any]:
    """Numbers, and their sums."""
    given = torch.rand(1024, 20)
    return DataLoader(TensorDataset(given, given.sum(1, keepdim=True)), 16, shuffle=True)


def main() -> None:
    """Trains for 20 steps."""
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="pccl"),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), samples())
    rank, size = trainer.global_rank, trainer.world_size
    loss = trainer.callback_metrics["loss"].item()
    print(
        f"rank {rank} of {size} by {torch.distributed.get_backend()}, loss {loss:.4f}", flush=True
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
