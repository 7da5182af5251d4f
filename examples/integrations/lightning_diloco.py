"""DiLoCo with Lightning's Trainer: each peer is a trainer of its own, on its own data.

pccl master &
python examples/integrations/lightning_diloco.py out1 127.0.0.1:48148 &
python examples/integrations/lightning_diloco.py out2 127.0.0.1:48148 &
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_ddp import Model, samples

import pccl
from pccl.diloco import DiLoCo


class DiLoCoCallback(Callback):
    """Averages the models of all peers every `inner_steps` steps of the Trainer's optimizer.

    Its state is in the Trainer's checkpoints, the number of outer steps in its log.
    """

    def __init__(self, comm: pccl.Communicator, **settings: Any) -> None:
        self.comm, self.settings = comm, settings
        self.saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.diloco = DiLoCo(self.comm, module, optimizer, state=self.saved, **self.settings)
        self.diloco.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.log("outer_step", float(self.diloco.outer_step))

    def state_dict(self) -> dict[str, Any]:
        return self.diloco.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.diloco.__exit__(None, None, None)


def main(folder: str, address: str, steps: int = 40) -> None:
    """Trains, from the last checkpoint if there is one."""
    with pccl.Communicator(address) as comm:
        diloco = DiLoCoCallback(comm, inner_steps=10, mode="sync", wire="int8", min_peers=2)
        saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=20)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[diloco, saving], logger=False
        )
        trainer.fit(Model(), samples(), ckpt_path="last", weights_only=False)
        print(f"outer steps {diloco.diloco.outer_step}: {diloco.diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
