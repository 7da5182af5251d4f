"""DiLoCo on pccl; `trainer` has the formulas. It needs torch."""

from pccl.diloco.group import AlonePolicy
from pccl.diloco.model_state import BufferMode
from pccl.diloco.muon import MuonAndAdamW
from pccl.diloco.presets import Preset, muloco, sparseloco
from pccl.diloco.route import Way
from pccl.diloco.schedules import Mode
from pccl.diloco.trainer import DiLoCo, OuterRound
from pccl.diloco.wires import Wire

__all__ = [
    "AlonePolicy",
    "BufferMode",
    "DiLoCo",
    "Mode",
    "MuonAndAdamW",
    "OuterRound",
    "Preset",
    "Way",
    "Wire",
    "muloco",
    "sparseloco",
]
