"""Which way quantized progress goes: gathered from all, or as it is around the ring."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from pccl import TensorInfo

Way = Literal["gather", "ring"]

_log = logging.getLogger("pccl.diloco")


class Route:
    """Chooses by what a peer receives, so that no wire costs more than an fp32 all-reduce.

    With R peers a gather receives what all others have quantized, R - 1 times those bytes, and an
    all-reduce 2 (R - 1) / R times the bytes as they are. So from some R on the ring is better.

    All peers must choose the same way, and which peers there are is no ground for that: one of them
    has heard of a loss, another has not yet. So R is the number of contributors of the mean that
    was last applied, on which they have agreed and which newcomers receive; it may be out of date
    by a round. And a choice stands until the round has its mean, whoever is lost meanwhile.
    """

    def __init__(self) -> None:
        self._peers = torch.zeros(1, dtype=torch.int64)  # 0 until a mean was applied

    def entries(self) -> list[TensorInfo]:
        """What is part of the shared state."""
        return [TensorInfo.from_torch(self._peers, "diloco.contributors")]

    def choose(self, quantized: int, plain: int, before: Way) -> Way:
        """The way of a round, for which a peer has so many bytes in the one form or the other.

        If it is not that of the round before, the log says why.
        """
        peers = int(self._peers[0])
        way: Way = "ring" if 2 * plain < peers * quantized else "gather"
        if way != before:
            gathered, around = (peers - 1) * quantized, 2 * (peers - 1) * plain // max(peers, 1)
            _log.info(
                "from now on these pseudo-gradients %s: of %d peers, each receives %d bytes if "
                "they are quantized and gathered, and %d if they go around the ring in fp32",
                "go around the ring in fp32" if way == "ring" else "are gathered",
                peers,
                gathered,
                around,
            )
        return way

    def applied(self, peers: int) -> None:
        """A mean of so many peers is going to be applied, on all of them."""
        self._peers[0] = peers
