"""DiLoCo with the Trainer of transformers: each peer is a trainer of its own, on its own data.

pccl master &
python examples/integrations/transformers_diloco.py out1 127.0.0.1:48148 &
python examples/integrations/transformers_diloco.py out2 127.0.0.1:48148 &
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_trainer import Sentences, small_model

import pccl
from pccl.diloco import DiLoCo


class DiLoCoCallback(TrainerCallback):
    """Averages the models of all peers every `inner_steps` steps of the Trainer's optimizer.

    Its state is in the Trainer's checkpoints, the number of outer steps in its log.
    """

    def __init__(self, comm: pccl.Communicator, **settings: Any) -> None:
        self.comm, self.settings = comm, settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "diloco.pt"
        saved = torch.load(file, weights_only=True) if file.exists() else None
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        self.diloco = DiLoCo(self.comm, given["model"], optimizer, state=saved, **self.settings)
        self.diloco.__enter__()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.diloco.state_dict(), folder / "diloco.pt")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        logs["outer_step"] = self.diloco.outer_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.diloco.__exit__(None, None, None)


def main(folder: str, address: str, steps: int = 40) -> None:
    """Trains, from the last checkpoint if there is one."""
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, logging_steps=10, save_steps=20, report_to=[]
    )
    with pccl.Communicator(address) as comm:
        diloco = DiLoCoCallback(comm, inner_steps=10, mode="sync", wire="int8", min_peers=2)
        trainer = Trainer(small_model(), arguments, train_dataset=Sentences(), callbacks=[diloco])
        trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
        print(f"outer steps {diloco.diloco.outer_step}: {diloco.diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
