"""The values of the API: enumerations, descriptors of collectives, and what calls return.

Names, values and argument orders are those of `pypccl` 1.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import DTypeLike


class Result(Enum):
    """How a call ended."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12
    TIMEOUT = 13  # not in pypccl, which has no time limits


class ReduceOp(Enum):
    """The operation of an all-reduce, applied element by element."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class CollectiveKind(StrEnum):
    """The kind of a collective; the value is the API call's name."""

    __hash__ = str.__hash__  # equal to its text; Enum's own hash runs in Python, which is slow

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"  # from one member to another one, which calls recv
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a kind of collective."""

    inline: bool = False  # the master may reduce it: its data travels with the votes
    reduces: bool = False
    rooted: bool = False
    exchange: bool = False  # moves rows from member to member, not around rings
    every_hop: bool = False  # its data uses every hop of the rings
    laps: int = 0  # times around the ring until the first bytes are everywhere
    # bytes on a link of the ring per byte that each of n members gives, as nccl-tests counts them
    link_bytes: Callable[[int], float] = lambda n: 0


TRAITS = {
    CollectiveKind.ALL_REDUCE: Traits(
        inline=True, reduces=True, every_hop=True, laps=2, link_bytes=lambda n: 2 * (n - 1) / n
    ),
    CollectiveKind.REDUCE_SCATTER: Traits(
        reduces=True, every_hop=True, laps=1, link_bytes=lambda n: n - 1
    ),
    CollectiveKind.ALL_GATHER: Traits(every_hop=True, laps=1, link_bytes=lambda n: n - 1),
    CollectiveKind.BROADCAST: Traits(rooted=True, laps=1, link_bytes=lambda n: 1),
    CollectiveKind.REDUCE: Traits(reduces=True, rooted=True, laps=1, link_bytes=lambda n: 1),
    CollectiveKind.GATHER: Traits(rooted=True, exchange=True),
    CollectiveKind.SCATTER: Traits(rooted=True, exchange=True),
    CollectiveKind.ALL_TO_ALL: Traits(exchange=True, every_hop=True),
    CollectiveKind.SEND: Traits(exchange=True),
    CollectiveKind.BARRIER: Traits(inline=True),
}


class Attribute(Enum):
    """The attributes that `Communicator.get_attribute` returns."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class SharedStateSyncStrategy(Enum):
    """A peer's role in a synchronization of the shared state.

    ENFORCE_POPULAR: the content that most peers have wins. RECEIVE_ONLY: this peer's content is not
    offered and may be overwritten. SEND_ONLY: it is offered and must not be overwritten.
    """

    ENFORCE_POPULAR = 0
    RECEIVE_ONLY = 1
    SEND_ONLY = 2


OpName: TypeAlias = Literal["sum", "avg", "mean", "prod", "max", "min"]
QuantizationName: TypeAlias = Literal["int8", "int4", "uint8"]
# of pccl.diloco, which needs torch; "eager" is another name of "delayed"
Mode: TypeAlias = Literal["sync", "delayed", "eager", "streaming", "decoupled"]


class DataType(Enum):
    """Element types.

    Attributes:
        itemsize: bytes of one element.
        common_name: its name in numpy and torch, such as "float32".
    """

    __hash__ = object.__hash__  # each is one object; Enum hashes names, in Python

    itemsize: int
    common_name: str

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    UINT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @property
    def is_integer(self) -> bool:
        return self not in (self.FLOAT16, self.BFLOAT16, self.FLOAT, self.DOUBLE)

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> DataType:
        """The element type of a torch tensor.

        Raises:
            ValueError: there is none for `dtype`.
        """
        torch_module = sys.modules.get("torch")
        if torch_module is None or not isinstance(dtype, torch_module.dtype):
            raise ValueError(f"{dtype!r} is not a torch.dtype")
        return _by_name(str(dtype).removeprefix("torch."))

    @classmethod
    def from_numpy_dtype(cls, dtype: DTypeLike) -> DataType:
        """The element type of a numpy array, in this machine's byte order.

        Raises:
            ValueError: there is none for `dtype`.
        """
        numpy_dtype = import_module("numpy").dtype
        try:
            found: np.dtype[Any] = numpy_dtype(dtype)
        except TypeError:
            raise ValueError(f"{dtype!r} is not a numpy dtype") from None
        if not found.isnative:
            raise ValueError(f"{dtype!r} is not in this machine's byte order")
        return _by_name(found.name)

    def to_torch_dtype(self) -> torch.dtype:
        """The torch dtype of this element type.

        Raises:
            ImportError: torch is not installed.
            ValueError: the installed torch has no such dtype.
        """
        found: torch.dtype | None = getattr(import_module("torch"), self.common_name, None)
        if found is None:
            raise ValueError(f"this version of torch has no {self.common_name}")
        return found

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of this element type.

        Raises:
            ImportError: numpy is not installed.
            ValueError: for BFLOAT16, which numpy lacks.
        """
        if self is DataType.BFLOAT16:
            raise ValueError("numpy has no bfloat16; view the bits as uint16, or use torch")
        found: np.dtype[Any] = import_module("numpy").dtype(self.common_name)
        return found


# The names are those of numpy and torch. (ml_dtypes gives numpy a dtype named bfloat16.)
_NAMES = (
    "uint8 int8 int16 uint16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64"
).split()
for _dtype, _name in zip(DataType, _NAMES, strict=True):  # properties would be slower
    _dtype.common_name, _dtype.itemsize = _name, int(_name.lstrip("abfilnotu")) // 8
_DTYPES = {dtype.common_name: dtype for dtype in DataType}


def _by_name(name: str) -> DataType:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name} is not supported: it may be {', '.join(_DTYPES)}")
    return _DTYPES[name]


class DeviceType(Enum):
    """The kind of device whose memory holds an array."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> DeviceType | None:
        """The member for a `torch.device.type`; None for any other device type."""
        return {"cpu": cls.CPU, "cuda": cls.CUDA}.get(device_type)


class DistributionHint(Enum):
    """How values are distributed; no quantizer uses it."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(Enum):
    """How values are quantized on the wire: docs/internals/quantization.md has formulas and errors.

    MIN_MAX, ZERO_POINT_SCALE: 8 or 16 bits, by `QuantizationOptions.quantized_datatype`.
    BLOCKWISE_INT8, BLOCKWISE_INT4 (recommended): one scale for every 256, or 64, elements.
    """

    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2
    BLOCKWISE_INT8 = 3
    BLOCKWISE_INT4 = 4


@dataclass(slots=True)
class QuantizationOptions:
    """The quantization of a collective on the wire.

    >>> QuantizationOptions(DataType.INT8, QuantizationAlgorithm.ZERO_POINT_SCALE).algorithm.name
    'ZERO_POINT_SCALE'
    >>> QuantizationOptions.of("int4").algorithm.name
    'BLOCKWISE_INT4'

    Attributes:
        quantized_datatype: type of an element on the wire: UINT8, INT8, UINT16 or INT16. The
            block-wise algorithms ignore it: their names give the type.
        algorithm: NONE sends elements unchanged.
    """

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX

    @classmethod
    def of(cls, name: QuantizationName) -> QuantizationOptions:
        """The options for a short name: "int8" and "int4" are block-wise, "uint8" is MIN_MAX.

        Raises:
            ValueError: any other name.
        """
        if name not in _QUANTIZATIONS:
            raise ValueError(f"quantization is {name!r}: it may be {', '.join(_QUANTIZATIONS)}")
        return cls(*_QUANTIZATIONS[name])


_QUANTIZATIONS = {
    "int8": (DataType.INT8, QuantizationAlgorithm.BLOCKWISE_INT8),
    "int4": (DataType.INT8, QuantizationAlgorithm.BLOCKWISE_INT4),
    "uint8": (DataType.UINT8, QuantizationAlgorithm.MIN_MAX),
}


@dataclass(frozen=True, slots=True, repr=False)
class ReduceInfo:
    """The outcome of a collective.

    >>> info = ReduceInfo(local_world_size=4, tx_bytes=6_000_000, rx_bytes=6_000_000)
    >>> f"{info.tx_bytes / 1e6:.0f} MB to be averaged over {info.world_size} peers"
    '6 MB to be averaged over 4 peers'

    Attributes:
        local_world_size: peers of the group that contributed.
        tx_bytes: payload bytes that this peer sent.
        rx_bytes: payload bytes that this peer received.
        result: the array, or list or dict of arrays, that holds the result; new arrays of the same
            library replace read-only ones.
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    result: Any = field(default=None, init=False, compare=False)

    @property
    def world_size(self) -> int:
        """Peers that contributed: `local_world_size`."""
        return self.local_world_size

    def __repr__(self) -> str:
        sizes = f"tx_bytes={self.tx_bytes}, rx_bytes={self.rx_bytes}"
        return f"ReduceInfo(world_size={self.world_size}, {sizes})"


@dataclass(frozen=True, slots=True)
class EntryDivergence:
    """The difference between one peer's content of an entry and the elected content.

    >>> print(EntryDivergence("peer 3", "bias", 400, 40, max_ulp=2, nans=0, nans_elected=0))
    peer 3: 'bias': 10 % of 400 bytes differ, by up to 2 ulp; 0 NaNs, 0 elected

    Attributes:
        peer: description of the peer.
        name: name of the entry.
        nbytes: size of the entry.
        differing_bytes: number of bytes that differed.
        max_ulp: the largest distance between two elements, excluding NaNs, in units in the last
            place; for integers, their difference.
        nans: NaNs in the peer's content.
        nans_elected: NaNs in the elected content.
    """

    peer: str
    name: str
    nbytes: int
    differing_bytes: int
    max_ulp: int
    nans: int
    nans_elected: int

    @property
    def share(self) -> float:
        """The fraction of the entry's bytes that differed."""
        return self.differing_bytes / self.nbytes if self.nbytes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.peer}: {self.name!r}: {100 * self.share:.3g} % of {self.nbytes} bytes differ, "
            f"by up to {self.max_ulp} ulp; {self.nans} NaNs, {self.nans_elected} elected"
        )


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """The cost and the result of a synchronization of the shared state.

    Two objects are equal if their `tx_bytes` and `rx_bytes` are.

    >>> info = SharedStateSyncInfo(tx_bytes=0, rx_bytes=1000)
    >>> if info.rx_bytes:
    ...     print("this peer lacked something, or was new")
    this peer lacked something, or was new

    Attributes:
        tx_bytes: payload bytes that this peer sent.
        rx_bytes: payload bytes that this peer received.
        hashed_bytes: bytes of this peer's shared state, which are all hashed each time.
        hash_seconds: the time of the hashing.
        divergence: the entries (the first 100 of each peer) in which peers differed at the same
            revision; the same on all peers.
    """

    tx_bytes: int
    rx_bytes: int
    hashed_bytes: int = field(default=0, init=False, compare=False)
    hash_seconds: float = field(default=0.0, init=False, compare=False)
    divergence: tuple[EntryDivergence, ...] = field(default=(), init=False, compare=False)

    @classmethod
    def _found(cls, tx_bytes: int, rx_bytes: int, **more: object) -> SharedStateSyncInfo:
        """An info with all attributes: pypccl's constructor takes only the first two."""
        info = cls(tx_bytes, rx_bytes)
        for name, value in more.items():
            object.__setattr__(info, name, value)
        return info


@dataclass(frozen=True, slots=True)
class SharedStateProgress:
    """Progress of a transfer of shared state to this peer; only verified bytes count.

    `comm.sync_shared_state(state, progress=print)` prints each of them:

    >>> print(SharedStateProgress(3, 10, 300_000_000, 1_000_000_000, seconds=6.0))
    3 of 10 entries, 300 of 1000 MB, 50 MB/s, 14 s left

    Attributes:
        entries: entries that have arrived completely.
        entries_total: entries to be transferred.
        nbytes: bytes that have arrived.
        nbytes_total: bytes to be transferred.
        seconds: time since the transfer began.
    """

    entries: int
    entries_total: int
    nbytes: int
    nbytes_total: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate so far."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Remaining time at that rate; infinite before the first bytes."""
        left = self.nbytes_total - self.nbytes
        return left / self.bytes_per_second if self.nbytes else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.entries} of {self.entries_total} entries, {self.nbytes / 1e6:.0f} of "
            f"{self.nbytes_total / 1e6:.0f} MB, {self.bytes_per_second / 1e6:.0f} MB/s, "
            f"{self.seconds_left:.0f} s left"
        )
