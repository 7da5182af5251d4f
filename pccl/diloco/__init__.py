"""DiLoCo on pccl: see docs/howto/diloco.md. Needs torch."""

from pccl.diloco.averaging import Algorithm
from pccl.diloco.checkpoint import Checkpoints
from pccl.diloco.muon import MuonAndAdamW, Preset, muloco, sparseloco
from pccl.diloco.settings import (
    AlonePolicy,
    BufferMode,
    InnerSteps,
    Pattern,
    Rate,
    WeightBy,
    quadratic_steps,
)
from pccl.diloco.stats import OuterRound, PeerShare
from pccl.diloco.trainer import DiLoCo
from pccl.kernels import Wire
from pccl.types import Mode

__all__ = [
    "Algorithm",
    "AlonePolicy",
    "BufferMode",
    "Checkpoints",
    "DiLoCo",
    "InnerSteps",
    "Mode",
    "MuonAndAdamW",
    "OuterRound",
    "Pattern",
    "PeerShare",
    "Preset",
    "Rate",
    "WeightBy",
    "Wire",
    "muloco",
    "quadratic_steps",
    "sparseloco",
]
