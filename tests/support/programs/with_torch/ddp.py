"""Data-parallel training with snapshots, in the shape of torch's tutorial.

ddp.py EPOCHS SAVE_EVERY SNAPSHOT: under torchrun, or `pccl run` with PROGRAM_INIT=pccl
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tell import digest, tell
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import pccl.torch  # noqa: F401 - registers the backend


def set_up() -> None:
    if os.environ.get("RANK") is None:  # by `pccl run`, or by hand
        where, size = os.environ["PCCL_MASTER"], int(os.environ["BEGIN"])
        dist.init_process_group("pccl", init_method=f"pccl://{where}", world_size=size)
    else:
        dist.init_process_group(os.environ.get("BACKEND", "pccl"))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.given = torch.rand(size, 20, generator=generator)
        self.wanted = self.given.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.given[index], self.wanted[index]


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        data: DataLoader[tuple[torch.Tensor, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        save_every: int,
        snapshot: Path,
    ) -> None:
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot = snapshot
        self.first_epoch = 0
        if snapshot.exists():
            self.load()
        self.model = DDP(self.model)
        tell(begins=self.first_epoch)

    def load(self) -> None:
        found = torch.load(self.snapshot)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.first_epoch = found["epochs"]

    def save(self, epoch: int) -> None:
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs": epoch + 1,
        }
        new = self.snapshot.with_suffix(".new")
        torch.save(state, new)
        new.rename(self.snapshot)

    def step(self, given: torch.Tensor, wanted: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(given), wanted)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        loss = sum(self.step(given, wanted) for given, wanted in self.data) / len(self.data)
        tell(epoch=epoch, loss=loss, digest=digest(self.model.parameters()))

    def train(self, epochs: int) -> None:
        for epoch in range(self.first_epoch, epochs):
            self.epoch(epoch)
            if dist.get_rank() == 0 and (epoch + 1) % self.save_every == 0:
                self.save(epoch)


def main(epochs: int, save_every: int, snapshot: Path) -> None:
    set_up()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    samples = Samples(2048)
    data = DataLoader(samples, batch_size=32, sampler=DistributedSampler(samples))
    Trainer(model, data, optimizer, save_every, snapshot).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
