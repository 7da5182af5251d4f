"""What a peer's state machine wants done, and what it answers to calls: effects, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pccl.errors import PCCLError
from pccl.protocol import messages as m
from pccl.protocol.ring import RingPart
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
    """Start a registered op. For state transfers `rings` name streams and slots (c/pccl.h)."""

    op: int
    seq: int
    nonce: int
    rings: tuple[RingPart, ...]


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


@dataclass(frozen=True, slots=True)
class Fail:
    """A call failed; `error` is what the API raises, `phase` says how far the call had come.

    `again`: the fault was another peer's, so the same call may succeed when it is made again.
    """

    call: int
    result: Result
    why: str
    error: type[PCCLError] = PCCLError
    phase: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A synchronisation has a plan, or another one, which makes what was fetched before void.

    If it says to fetch anything, do so, and vote with `fetched`. If it is resumed, what has been
    fetched so far is what this plan wants, too, and the rest is being fetched already.
    """

    call: int
    plan: m.SyncPlan
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a plan said has arrived, to be verified (`ok`), or cannot arrive."""

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
    | RegisterOp
    | CommitOp
    | AbortOp
    | Store
    | Answer
    | Fail
    | Plan
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
