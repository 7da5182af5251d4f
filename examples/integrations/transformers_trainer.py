"""The Trainer of transformers over pccl: only `ddp_backend` changes.

torchrun --nproc-per-node 2 examples/integrations/transformers_trainer.py out
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pccl.torch


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sorted tokens, whose successors are easy to learn."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(64, (16,), generator=generator).sort().values
        return {"input_ids": tokens, "labels": tokens}


def small_model() -> GPT2LMHeadModel:
    """A GPT-2 of two layers."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    )


def main(folder: str) -> None:
    """Trains for 20 steps."""
    pccl.torch.use_with_accelerate()  # on a CPU; or PCCL_ACCELERATE=1 in the environment
    arguments = TrainingArguments(
        folder,
        ddp_backend="pccl",
        use_cpu=True,
        max_steps=20,
        logging_steps=10,
        save_steps=10,
        report_to=[],
    )
    torch.manual_seed(0)
    trainer = Trainer(small_model(), arguments, train_dataset=Sentences())
    trainer.train()
    backend = torch.distributed.get_backend()
    print(f"rank {arguments.process_index} of {arguments.world_size} by {backend}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
