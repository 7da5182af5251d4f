"""The tutorial's text, tokenizer, model and evaluation: a small GPT that reads Python's manual."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 64  # tokens of context
WIDTH, HEADS, LAYERS = 96, 4, 2
VOCABULARY = 256  # a token is a byte, so all machines have the same tokens


def encode(text: str) -> torch.Tensor:
    """A text as tokens."""
    return torch.tensor(list(text.encode()))


def decode(tokens: torch.Tensor) -> str:
    """Tokens as a text."""
    return bytes(tokens.tolist()).decode(errors="replace")


class Text:
    """Python's manual, 465,000 characters: nine tenths for training, the rest for evaluation."""

    def __init__(self) -> None:
        tokens = encode("\n".join(topics.values()))
        self.training, self.validation = tokens.split(
            [len(tokens) * 9 // 10, -(-len(tokens) // 10)]
        )

    def batch(self, size: int) -> torch.Tensor:
        """Random windows for training, of CONTEXT + 1 tokens."""
        places = torch.randint(len(self.training) - CONTEXT, (size,))
        return torch.stack([self.training[i : i + CONTEXT + 1] for i in places])

    def held_out(self, size: int = 128) -> torch.Tensor:
        """The same windows each time, from text that no peer trains on."""
        places = torch.linspace(0, len(self.validation) - CONTEXT - 1, size).long()
        return torch.stack([self.validation[i : i + CONTEXT + 1] for i in places])


class Block(nn.Module):
    """Attention, followed by a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (batch, head, token, width of a head) each
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Predicts each token from the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Nats per token of the windows, without their first tokens."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, text: Text) -> float:
    """The loss on text that no peer trains on."""
    return model.loss(text.held_out()).item()
