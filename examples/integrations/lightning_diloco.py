"""DiLoCo with Lightning's Trainer: each peer is a separate trainer with its own data.

pccl master &
python examples/integrations/lightning_diloco.py out1 127.0.0.1:48148 &
python examples/integrations/lightning_diloco.py out2 127.0.0.1:48148 &
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
from diloco_training import DiLoCoTraining, main
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_ddp import Model, samples


class DiLoCoCallback(DiLoCoTraining, Callback):
    """Saves DiLoCo's state in the Trainer's checkpoints, and logs outer rounds to its logger."""

    saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        log = trainer.logger.log_metrics if trainer.logger else None
        self.begin(module, optimizer, state=self.saved, log_metrics=log)

    def state_dict(self) -> dict[str, Any]:
        return self.diloco.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.end()


def train(diloco: DiLoCoCallback, folder: str, steps: int) -> None:
    """Trains, from the last checkpoint if there is one."""
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=20)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[diloco, saving],
        logger=TensorBoardLogger(folder, name=None),  # or WandbLogger(offline=True), ...
    )
    trainer.fit(Model(), samples(), ckpt_path="last", weights_only=False)


if __name__ == "__main__":
    main(sys.argv[1:], DiLoCoCallback, train)
