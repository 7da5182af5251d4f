"""What a peer's state machine wants done, and what it answers to calls: effects, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.ring import RingPlace
from pccl.types import Result


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the master."""

    message: m.PeerMessage


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Connect a stream to a peer."""

    stream: int
    to: m.PeerInfo


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream; what is queued in it is of no use any more."""

    stream: int


@dataclass(frozen=True, slots=True)
class StartOp:
    """Start the registered op of a collective, on these rings."""

    op: int
    seq: int
    nonce: int
    rings: tuple[RingPlace, ...]


@dataclass(frozen=True, slots=True)
class End:
    """A stream that one end of a transfer sends on, and the slot at the holders of its receiver.

    The slot of a receiver is its place in the group, the same at all holders.
    """

    stream: int
    slot: int


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start the registered op of a transfer: serve receivers, or fetch from holders."""

    op: int
    seq: int
    nonce: int
    ends: tuple[End, ...]


@dataclass(frozen=True, slots=True)
class RegisterOp:
    """Register an op whose buffers the caller knows by its call number."""

    op: int
    run: int
    tag: int
    min_seq: int


@dataclass(frozen=True, slots=True)
class CommitOp:
    """Keep the result."""

    op: int


@dataclass(frozen=True, slots=True)
class AbortOp:
    """Stop, restore, let go."""

    op: int


@dataclass(frozen=True, slots=True)
class Store:
    """The result of a collective that no op of the engine was for; its call is answered next."""

    call: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A call succeeded."""

    call: int
    value: object


class Fault(Enum):
    """What kind of failure it is, where its result alone does not tell."""

    OTHER = "a failure of another kind"
    PEER_LOST = "a peer was lost, or failed"
    MASTER_LOST = "the master cannot be reached any more"
    KICKED = "the run goes on without this peer"
    MISMATCH = "calls that can never meet"
    TIMEOUT = "a caller's time was up"
    DIVERGENCE = "content had diverged, and a peer wants an error then"
    TOO_FEW_PEERS = "fewer peers than the shared state is to begin with"


@dataclass(frozen=True, slots=True)
class Fail:
    """A call failed; `phase` says how far it had come.

    `again`: the fault was another peer's, so the same call may succeed when it is made again.
    """

    call: int
    result: Result
    why: str
    fault: Fault = Fault.OTHER
    phase: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Follow:
    """A synchronisation has a plan, or another one, which makes what was fetched before void.

    If it says to fetch anything, do so, and vote with `fetched`. If it is resumed, what has been
    fetched so far is what this plan requires, too, and the rest is being fetched already.
    """

    call: int
    plan: m.SyncPlan
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """An optimisation has links measured: fetch from these holders, all at once, and call
    `measured`. An earlier probe is void; without holders, so is this one."""

    call: int
    seq: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was to be fetched has arrived, to be verified (`ok`), or cannot arrive."""

    call: int
    seq: int
    ok: bool
    why: str


@dataclass(frozen=True, slots=True)
class Waits:
    """A call that has lasted long waits for this, in words."""

    call: int
    why: str


Effect: TypeAlias = (
    Send
    | OpenStream
    | CloseStream
    | StartOp
    | StartTransfer
    | RegisterOp
    | CommitOp
    | AbortOp
    | Store
    | Answer
    | Fail
    | Follow
    | Measure
    | Fetched
    | Waits
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """The answer to a collective."""

    world_size: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The answer to a synchronisation: the elected revision, payload bytes, who had diverged."""

    revision: int
    tx_bytes: int
    rx_bytes: int
    divergence: tuple[m.Divergence, ...] = ()
