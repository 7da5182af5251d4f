"""A small byte-level GPT: enough of a language model to learn something in a minute on a laptop."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time, WIDTH) to the same shape."""
        batch, time, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        forward: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + forward


class GPT(nn.Module):
    """Predicts the next byte. The output layer is the embedding, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.apply(_initialise)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss on `text`.

        Args:
            text: (batch, time + 1) int64 bytes, time <= CONTEXT. Each byte but the first is to be
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
