"""Settings that published work has found good: keyword arguments for `DiLoCo`."""

from __future__ import annotations

import math
from typing import TypedDict

from pccl.diloco.wires import Wire


class Preset(TypedDict):
    """Arguments of `DiLoCo`, to be passed as `**preset`."""

    inner_steps: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    wire: Wire


def muloco(peers: int, wire: Wire = "int4") -> Preset:
    """MuLoCo (arXiv 2505.23725), with `MuonAndAdamW` as inner optimizer.

    The outer step is Nesterov's: eta 0.7 and mu 0.6 for one peer, 0.9 and 0.8 for eight or more;
    between them they grow with the logarithm of the number. 4 bits cost no loss there, "2bit"
    nearly none.

    Args:
        peers: number of peers that are expected.
        wire: how pseudo-gradients are sent.
    """
    if peers < 1:
        raise ValueError(f"peers={peers} must be at least 1")
    share = min(math.log2(peers) / 3, 1.0)
    return {
        "inner_steps": 30,
        "outer_lr": round(0.7 + 0.2 * share, 3),
        "outer_momentum": round(0.6 + 0.2 * share, 3),
        "nesterov": True,
        "wire": wire,
    }


def sparseloco() -> Preset:
    """SparseLoCo (arXiv 2508.15706): the mean itself is the outer step, without a momentum.

    The error feedback does what a momentum would. Late in a run, when the loss has become flat, an
    `outer_lr` of 0.65 was used for a model of 72B parameters (arXiv 2603.08163).
    """
    return {
        "inner_steps": 30,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
        "wire": "sparse",
    }
