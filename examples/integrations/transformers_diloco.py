"""DiLoCo with the Trainer of transformers: each peer is a separate trainer with its own data.

pccl master &
python examples/integrations/transformers_diloco.py out1 127.0.0.1:48148 &
python examples/integrations/transformers_diloco.py out2 127.0.0.1:48148 &
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from diloco_training import DiLoCoTraining, main
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_trainer import Sentences, small_model


class DiLoCoCallback(DiLoCoTraining, TrainerCallback):
    """Saves DiLoCo's state in the Trainer's checkpoints, and logs outer rounds with the Trainer.

    Give it the `trainer` that it is a callback of.
    """

    trainer: Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "diloco.pt"
        saved = torch.load(file, weights_only=True) if file.exists() else None
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        self.begin(given["model"], optimizer, state=saved, log_metrics=self.log)

    def log(self, metrics: dict[str, Any], outer_step: int) -> None:
        self.trainer.log(metrics)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.diloco.state_dict(), folder / "diloco.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()


def train(diloco: DiLoCoCallback, folder: str, steps: int) -> None:
    """Trains, from the last checkpoint if there is one."""
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, save_steps=20, report_to=["tensorboard"]
    )
    diloco.trainer = Trainer(
        small_model(), arguments, train_dataset=Sentences(), callbacks=[diloco]
    )
    diloco.trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))


if __name__ == "__main__":
    main(sys.argv[1:], DiLoCoCallback, train)
