"""A small GPT-2 with the Trainer of transformers, with checkpoints.

hf_trainer.py STEPS SAVE_EVERY FOLDER: under torchrun
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from tell import digest, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import pccl.torch  # noqa: F401 - registers the backend


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(64, (16,), generator=generator).sort().values
        return {"input_ids": tokens, "labels": tokens}


class Tells(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        tell(begins=state.global_step)

    def on_step_end(self, args, state, control, model, **_):
        tell(epoch=state.global_step - 1, digest=digest(model.parameters()))


def main(steps: int, save_every: int, folder: str) -> None:
    dist.init_process_group(os.environ.get("BACKEND", "pccl"))
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=save_every,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_steps=10,
        disable_tqdm=True,
        save_total_limit=2,
        dataloader_num_workers=0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=Sentences(), callbacks=[Tells()]
    )
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    trainer.train(resume_from_checkpoint=last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
