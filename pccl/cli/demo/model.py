"""A small GPT, and the text that it learns."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT_EVERY = 20  # one file in this many is for validation
_SHARD_BYTES_MAX = 4 << 20


class Corpus:
    """One peer's shard of the training files, and the validation files, which all peers share.

    Raises FileNotFoundError: this Python comes without the source of its standard library.
    """

    def __init__(self, *, shard: int, shards: int, seed: int) -> None:
        files = source_files()
        training = [file for i, file in enumerate(files) if i % _HELD_OUT_EVERY]
        self._training = _read(training[shard::shards])
        self._validation = _read(files[::_HELD_OUT_EVERY])
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int, length: int) -> torch.Tensor:
        """Random windows of the shard: (size, length) int64 bytes."""
        starts = torch.randint(len(self._training) - length, (size,), generator=self._generator)
        return _windows(self._training, starts, length)

    def validation(self, size: int, length: int) -> torch.Tensor:
        """Always the same windows, spread evenly: (size, length) int64 bytes."""
        starts = torch.linspace(0, len(self._validation) - length, size).long()
        return _windows(self._validation, starts, length)


def source_files() -> list[Path]:
    """The files of the standard library, without tests, in the same order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (file.relative_to(root).as_posix(), file)
        for file in root.rglob("*.py")
        if not _LEFT_OUT & set(file.relative_to(root).parts)
    )
    if len(files) < 2 * _HELD_OUT_EVERY:
        raise FileNotFoundError(f"the standard library's source code is not in {root}")
    return [file for _, file in files]


def _read(files: list[Path]) -> torch.Tensor:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= _SHARD_BYTES_MAX:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


VOCABULARY = 256  # bytes
CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a GPT; `width` is a multiple of `heads`."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = CONTEXT


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, self._heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, time, width))
        forward: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + forward


class GPT(nn.Module):
    """Predicts the next byte. The output layer is the embedding, transposed."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialize)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss on `text`.

        Args:
            text: (batch, time + 1) int64 bytes, time <= context. The model predicts each byte but
                the first from the bytes before it.

        Returns:
            Mean cross-entropy in nats per byte, a scalar.
        """
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
