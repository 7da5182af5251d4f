"""Effects of a peer's state machine, to be performed in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.ring import RingPlace
from pccl.protocol.strategy import Strategy
from pccl.types import Result


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the master."""

    message: m.PeerMessage


@dataclass(frozen=True, slots=True)
class Expect:
    """Admit streams that name this nonce, from those that have these keys, under this number."""

    number: int
    nonce: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Connect a stream to a peer, which admits it by the nonce."""

    stream: int
    to: m.PeerInfo
    nonce: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream; queued messages are dropped."""

    stream: int


@dataclass(frozen=True, slots=True)
class StartOp:
    """Start the registered op of a collective, on these rings.

    `calls`: that of the predecessor in each ring, which may have sent before the start; empty: none
    has.
    """

    op: int
    seq: int
    nonce: int
    rings: tuple[RingPlace, ...]
    strategy: Strategy
    calls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EagerOp:
    """Send what the registered op of a collective may send before it starts; otherwise as StartOp.

    If it then starts on other streams, what was sent is void.
    """

    op: int
    rings: tuple[RingPlace, ...]
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class End:
    """A stream on which one end of a transfer sends, and the receiver's slot at the holders.

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
    """Keep the result of an op."""

    op: int


@dataclass(frozen=True, slots=True)
class AbortOp:
    """Stop the op, and restore and release its memory."""

    op: int


@dataclass(frozen=True, slots=True)
class Store:
    """Store the result of a collective without an op; its call is answered next."""

    call: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A call succeeded."""

    call: int
    value: object


class Fault(Enum):
    """The kind of a failure, if its result alone does not tell it."""

    OTHER = "a failure of another kind"
    PEER_LOST = "a peer was lost, or failed"
    MASTER_LOST = "the master cannot be reached any more"
    KICKED = "the run goes on without this peer"
    MISMATCH = "calls that can never meet"
    TIMEOUT = "a caller's time was up"
    DIVERGENCE = "content had diverged, and a peer wants an error then"
    FINISHED = "the run is finished"
    REORDERED = "ranks have changed, and nobody is lost"
    TOO_FEW_PEERS = "fewer peers than the shared state is to begin with"


@dataclass(frozen=True, slots=True)
class Fail:
    """A call failed; `phase` describes its progress.

    `again`: another peer was at fault, so the same call may succeed when repeated.
    """

    call: int
    result: Result
    why: str
    fault: Fault = Fault.OTHER
    phase: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Follow:
    """A synchronization has a new plan, which voids what was fetched before.

    If the plan lists entries to fetch, the caller fetches them and votes with `fetched`. If it is
    `resumed`, the current fetch continues, and what it has fetched stays valid.
    """

    call: int
    plan: m.SyncPlan
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """A probe: the caller must fetch from these holders, all at once, and call `measured`. It voids
    an earlier probe; without holders there is no new one."""

    call: int
    seq: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch has ended: all has arrived, and must be verified (`ok`), or it failed."""

    call: int
    seq: int
    ok: bool
    why: str


@dataclass(frozen=True, slots=True)
class Arrange:
    """The master says where this peer meets another one, or where two others meet."""

    message: m.Rendezvous


@dataclass(frozen=True, slots=True)
class Waits:
    """Log what a long call waits for."""

    call: int
    why: str


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Log who has joined the group, and who is gone, with the reason; `size` peers are there.

    `begun`: the group has completed a call, so that a newcomer is news.
    """

    joined: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    size: int
    begun: bool


Effect: TypeAlias = (
    Send
    | Expect
    | OpenStream
    | CloseStream
    | EagerOp
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
    | Arrange
    | Waits
    | MembersChanged
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """The answer to a collective."""

    world_size: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The answer to a synchronization: the elected revision, payload bytes, diverged peers."""

    revision: int
    tx_bytes: int
    rx_bytes: int
    divergence: tuple[m.Divergence, ...] = ()


class Outbox:
    """Collects effects until they are taken.

    Attributes:
        known: whether the master knows this peer on its current connection. If not, only who this
            peer is may be said; Resume then says everything that matters.
    """

    def __init__(self) -> None:
        self.known = True
        self._effects: list[Effect] = []

    def send(self, message: m.PeerMessage) -> None:
        """Sends a message, if the master knows this peer."""
        if self.known:
            self._effects.append(Send(message))

    def introduce(self, message: m.Hello | m.Resume | m.Leave) -> None:
        """Sends who this peer is, or that it leaves."""
        self._effects.append(Send(message))

    def do(self, *effects: Effect) -> None:
        """Adds other effects."""
        self._effects += effects

    def take(self) -> list[Effect]:
        """Takes all effects so far."""
        effects, self._effects = self._effects, []
        return effects
