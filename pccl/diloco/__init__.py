"""DiLoCo on pccl; `trainer` has the formulas. It needs torch."""

from pccl.diloco.group import AlonePolicy
from pccl.diloco.model_state import BufferMode
from pccl.diloco.route import Way
from pccl.diloco.schedules import Mode
from pccl.diloco.trainer import DiLoCo, OuterRound
from pccl.diloco.wires import Wire

__all__ = ["AlonePolicy", "BufferMode", "DiLoCo", "Mode", "OuterRound", "Way", "Wire"]
