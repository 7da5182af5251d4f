"""torchtitan's Trainer on CPUs: its Llama, sharded by FSDP2 over pccl, with random tokens.

    torchrun --standalone --nproc-per-node 2 torchtitan_cpu.py --training.seq_len 64

The options are torchtitan's. Without an accelerator, torchtitan 0.2.2 assumes CUDA. So this script
selects the CPU before it imports torchtitan, and adds missing functions to the device.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
vars(torch.cpu).update(
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    current_device=lambda: 0,
)

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.train import Trainer, main  # noqa: E402


class Tokens(torch.utils.data.IterableDataset[Any]):
    def __init__(self, seed: int, length: int) -> None:
        self.draw, self.length = torch.Generator().manual_seed(seed), length

    def __iter__(self) -> Iterator[Any]:
        while True:
            text = torch.randint(16, (self.length + 1,), generator=self.draw)
            yield {"input": text[:-1]}, text[1:]


def loader(dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> ParallelAwareDataloader:
    batch, length = job_config.training.local_batch_size, job_config.training.seq_len
    tokens = Tokens(dp_rank, length)
    return ParallelAwareDataloader(tokens, dp_rank, dp_world_size, batch_size=batch)


class Told(Trainer):
    def close(self) -> None:
        norms = [each.full_tensor().norm().item() for each in self.model_parts[0].parameters()]
        print(f"by {dist.get_backend()}, step {self.step}, weights {sum(norms):.6f}", flush=True)
        super().close()


dist.Backend.default_device_backend_map["cpu"] = "pccl"
spec = get_train_spec("llama3")
spec = dataclasses.replace(spec, build_tokenizer_fn=None, build_dataloader_fn=loader)
register_train_spec("llama3", spec)
main(Told)
