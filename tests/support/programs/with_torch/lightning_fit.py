"""A LightningModule with Lightning's Trainer, with checkpoints.

lightning_fit.py STEPS SAVE_EVERY FOLDER: under torchrun
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tell import digest, tell
from torch.utils.data import DataLoader, TensorDataset

import pccl.torch  # noqa: F401 - registers the backend


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, _):
        given, wanted = batch
        loss = torch.nn.functional.mse_loss(self.inner(given), wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Tells(Callback):
    def on_train_start(self, trainer, module):
        tell(begins=trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        loss = outputs["loss"].item()
        tell(epoch=trainer.global_step - 1, loss=loss, digest=digest(module.parameters()))


def main(steps: int, save_every: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    lightning.seed_everything(0)
    given = torch.rand(4096, 20)
    samples = DataLoader(TensorDataset(given, given.sum(1, keepdim=True)), 16, shuffle=True)
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=save_every)
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend=os.environ.get("BACKEND", "pccl")),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=steps,
        callbacks=[saving, Tells()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), samples, ckpt_path="last", weights_only=False)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
