"""DiLoCo on pccl; `trainer` has the formulas. It needs torch."""

from pccl.diloco.fragments import Pattern
from pccl.diloco.group import AlonePolicy
from pccl.diloco.model_state import BufferMode
from pccl.diloco.muon import MuonAndAdamW
from pccl.diloco.presets import Preset, muloco, sparseloco
from pccl.diloco.rates import Mode, Rate
from pccl.diloco.roll import PeerShare
from pccl.diloco.rounds import OuterRound
from pccl.diloco.route import Way
from pccl.diloco.shares import WeightBy
from pccl.diloco.trainer import DiLoCo
from pccl.diloco.wires import Wire

__all__ = [
    "AlonePolicy",
    "BufferMode",
    "DiLoCo",
    "Mode",
    "MuonAndAdamW",
    "OuterRound",
    "Pattern",
    "PeerShare",
    "Preset",
    "Rate",
    "Way",
    "WeightBy",
    "Wire",
    "muloco",
    "sparseloco",
]
