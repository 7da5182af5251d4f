"""DiLoCo on pccl; `trainer` has the formulas. It needs torch."""

from pccl.diloco.model_state import BufferMode
from pccl.diloco.trainer import AlonePolicy, DiLoCo, OuterRound

__all__ = ["AlonePolicy", "BufferMode", "DiLoCo", "OuterRound"]
