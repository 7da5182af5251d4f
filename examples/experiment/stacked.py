"""The forward pass of several models of `pccl demo` at once; theirs is in `pccl.cli.demo.model`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F


def losses(weights: Mapping[str, torch.Tensor], text: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum of the losses of all models, each on its own text.

    Args:
        weights: of all models, by the names of the parameters: (models, *shape).
        text: (models, batch, time + 1) int64 bytes.
        heads: of the attention.
    """
    models, batch, _ = text.shape
    inputs, targets = text[..., :-1], text[..., 1:]
    table = weights["embedding.weight"]
    vocabulary, width = table.shape[1:]
    time = inputs.shape[-1]
    offsets = vocabulary * torch.arange(models)[:, None, None]
    x = F.embedding(inputs + offsets, table.reshape(-1, width))
    x = (x + weights["position"][:, None, :time]).view(models, batch * time, width)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[name + ".weight"], weights[name + ".bias"]
        return torch.addcmul(shift[:, None], F.layer_norm(x, (width,)), scale[:, None])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        w = weights[name + ".weight"].transpose(1, 2)
        bias = weights.get(name + ".bias")
        return torch.bmm(x, w) if bias is None else torch.baddbmm(bias[:, None], x, w)

    for name in weights:
        if not name.endswith(".qkv.weight"):
            continue
        block = name.removesuffix("qkv.weight")
        h = linear(norm(x, block + "attention_norm"), block + "qkv")
        q, k, v = h.view(models * batch, time, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + linear(attended.reshape(models, batch * time, width), block + "mix")
        h = F.gelu(linear(norm(x, block + "mlp_norm"), block + "mlp.0"), approximate="tanh")
        x = x + linear(h, block + "mlp.2")
    logits = torch.bmm(norm(x, "norm"), table.transpose(1, 2))
    return models * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
