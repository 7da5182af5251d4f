"""A small GPT, as `pccl bench ddp` trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 512


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape: batch, length, width."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        narrowed: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))
        return x + narrowed


class GPT(nn.Module):
    """Predicts the next token; its output is the loss."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        heads = next(n for n in (8, 4, 2, 1) if width % n == 0)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss on tokens: batch, length + 1."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(given.shape[1], device=given.device)
        x = self.blocks(self.tokens(given) + self.places(places))
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
