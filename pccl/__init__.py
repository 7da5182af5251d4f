"""Fault-tolerant collective communications for machine-learning training over the internet."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pccl import cuda
from pccl.communicator import Communicator
from pccl.descriptors import ReduceDescriptor, ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import (
    DivergenceError,
    KickedError,
    MasterLostError,
    MismatchError,
    NotFiniteError,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    RunFinishedError,
    TooFewPeersError,
    UnsupportedError,
)
from pccl.insight import Explanation, Stats
from pccl.membership import AsyncReduceHandle
from pccl.security import Security
from pccl.shared_state import SharedState, TensorInfo
from pccl.types import (
    Attribute,
    DataType,
    DeviceType,
    DistributionHint,
    EntryDivergence,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedStateProgress,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)
from pccl.version import __version__

if TYPE_CHECKING:
    from pccl.master_node import MasterNode

__all__ = [
    "AsyncReduceHandle",
    "Attribute",
    "Communicator",
    "DataType",
    "DeviceType",
    "DistributionHint",
    "DivergenceError",
    "EntryDivergence",
    "Explanation",
    "KickedError",
    "MasterLostError",
    "MasterNode",
    "MismatchError",
    "NotFiniteError",
    "PCCLError",
    "PCCLTimeoutError",
    "PeerLostError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "RunFinishedError",
    "Security",
    "SharedState",
    "SharedStateProgress",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "Stats",
    "TensorInfo",
    "TooFewPeersError",
    "UnsupportedError",
    "__version__",
    "cuda",
]


def __getattr__(name: str) -> Any:
    if name != "MasterNode":  # whose import is slow, and which only some programs need
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = import_module("pccl.master_node").MasterNode
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
