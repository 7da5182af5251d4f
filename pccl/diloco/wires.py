"""The wires: in what form pseudo-gradients travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pccl import kernels
from pccl.diloco.carriers import Carrier, Quantized, Ring
from pccl.diloco.route import Route

Wire = Literal["fp32", "int8", "int4", "e3m0", "2bit", "sparse"]


@dataclass(frozen=True, slots=True)
class Codec:
    """How a pseudo-gradient is quantized, and what becomes of that which this takes away.

    Attributes:
        format: of what is sent.
        decay: by which a residual is multiplied before it is added to the next pseudo-gradient.
    """

    format: kernels.Format
    decay: float = 1.0


CODECS: dict[Wire, Codec] = {
    "int8": Codec("int8"),
    "int4": Codec("int4"),
    "e3m0": Codec("e3m0"),  # Streaming DiLoCo, arXiv 2501.18512
    "2bit": Codec("2bit", decay=0.9),  # MuLoCo, arXiv 2505.23725
    "sparse": Codec("sparse", decay=0.95),  # SparseLoCo, arXiv 2508.15706
}


def carrier(wire: Wire, count: int, route: Route) -> Carrier:
    """What carries the progress of `count` parameters on a wire."""
    if wire == "fp32":
        return Ring()
    codec = CODECS[wire]
    return Quantized(codec.format, count, codec.decay, route)
