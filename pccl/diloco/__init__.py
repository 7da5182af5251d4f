"""DiLoCo on pccl; `trainer` has the formulas. It needs torch."""

from pccl.diloco.exchange import WeightBy
from pccl.diloco.group import AlonePolicy
from pccl.diloco.model_state import BufferMode
from pccl.diloco.muon import MuonAndAdamW, Preset, muloco, sparseloco
from pccl.diloco.outer import Mode, Pattern, Rate
from pccl.diloco.rounds import OuterRound, PeerShare
from pccl.diloco.trainer import DiLoCo
from pccl.diloco.wires import Way, Wire

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
