"""The small byte model and the text of the examples. Replace them with your own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 8
LIBRARY = Path(os.__file__).parent  # Python's own source code is the text


class Model(nn.Sequential):
    """Predicts a byte from the bytes before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(
            nn.Embedding(256, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, width),
            nn.GELU(),
            nn.Linear(width, 256),
        )

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Nats per byte, of windows of CONTEXT + 1 bytes."""
        return F.cross_entropy(self(windows[:, :-1]), windows[:, -1])


class Text(torch.utils.data.Dataset[torch.Tensor]):
    """All windows of a text, each of CONTEXT + 1 bytes."""

    def __init__(self, file: Path) -> None:
        self._bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) - CONTEXT

    def __getitem__(self, place: int) -> torch.Tensor:
        return self._bytes[place : place + CONTEXT + 1].long()

    def batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Random windows, without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            places = torch.randint(len(self), (size,), generator=generator)
            yield torch.stack([self[int(place)] for place in places])


def options(about: str, **defaults: int) -> argparse.ArgumentParser:
    """The arguments of all examples."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument(
        "--text", type=Path, default=LIBRARY / "typing.py", metavar="FILE", help="to learn from"
    )
    parser.add_argument("--min-peers", type=int, default=2, help="peers that the run waits for")
    parser.add_argument("--seed", type=int, default=0, help="of this peer's samples")
    parser.add_argument("--width", type=int, default=64, help="of the model's hidden layer")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser
