"""A small byte-level GPT: enough of a language model to learn something in a minute on a laptop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a GPT; `width` is a multiple of `heads`."""

    width: int = 128
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
        self.apply(_initialise)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss on `text`.

        Args:
            text: (batch, time + 1) int64 bytes, time <= context. Each byte but the first is to be
                predicted from those before it.

        Returns:
            Mean cross-entropy in nats per byte, a scalar.
        """
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
