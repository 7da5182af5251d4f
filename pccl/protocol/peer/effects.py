"""Effects of a peer's state machine, to be performed in order."""

from __future__ import annotations

from enum import Enum
from typing import dataclass_transform

from msgspec import Struct

from pccl import errors
from pccl.protocol import messages as m
from pccl.protocol.ring import RingPlace
from pccl.protocol.tuning import Algorithm, transfer_chunk
from pccl.types import Result


@dataclass_transform(frozen_default=True)
class Effect(Struct, frozen=True):
    """An effect."""


class Send(Effect):
    message: m.PeerMessage


class Expect(Effect):
    """Admit streams with this nonce, from peers with these keys; `number` is this peer's."""

    number: int
    nonce: int
    keys: tuple[str, ...]


class OpenStream(Effect):
    """Connect a stream to a peer, which admits it by the nonce.

    `shares`: the streams that send at the same time as this one, itself included.
    """

    stream: int
    to: m.PeerInfo
    nonce: int
    shares: int = 1


class CloseStream(Effect):
    """Close a stream; queued messages are dropped."""

    stream: int


class StartOp(Effect):
    """Start the registered op of a collective, from this peer's places in these rings.

    `seq`, `nonce`: what its messages have in common, and no others. `chunk_bytes`: the size of one
    message. `calls`: the call of the predecessor in each ring, if the predecessor may have sent
    before the start, or 0; empty: none has. `direct`: streams to the receivers of rows, by rank; if
    one is 0, or missing, its rows go around the rings.
    """

    op: int
    seq: int
    nonce: int
    rings: tuple[RingPlace, ...]
    chunk_bytes: int
    algorithm: Algorithm = Algorithm.RING
    calls: tuple[int, ...] = ()
    direct: tuple[int, ...] = ()


class EagerOp(Effect):
    """Let the registered op of a collective send before it starts.

    If the op then starts on other streams, the data sent before is void. Otherwise its start
    repeats these values.
    """

    op: int
    rings: tuple[RingPlace, ...]
    chunk_bytes: int
    algorithm: Algorithm = Algorithm.RING


class End(Struct, frozen=True):
    """A stream of a transfer, and the slot of its receiver.

    A receiver's slot is its position in the group. All holders use the same slot.
    """

    stream: int
    slot: int


class StartTransfer(Effect):
    """Start the registered op of a transfer: serve receivers, or fetch from holders.

    Further starts with the same `seq` add receivers or holders.
    """

    op: int
    seq: int
    nonce: int
    ends: tuple[End, ...]
    chunk_bytes: int = transfer_chunk()


class RegisterOp(Effect):
    """Register an op; the caller knows its buffers by the op number."""

    op: int
    run: int
    tag: int
    min_seq: int


class CommitOp(Effect):
    """Keep the result of an op."""

    op: int


class AbortOp(Effect):
    """Stop the op, and restore and release its memory."""

    op: int


class Store(Effect):
    """Store the result of a collective without an op; its call is answered next."""

    call: int
    data: m.Data


class Answer(Effect):
    call: int
    value: object


class Fault(Enum):
    """The kind of a failure, more exact than its result; the value is its exception."""

    OTHER = errors.PCCLError
    PEER_LOST = errors.PeerLostError  # a peer is lost or has failed
    MASTER_LOST = errors.MasterLostError
    KICKED = errors.KickedError
    MISMATCH = errors.MismatchError
    TIMEOUT = errors.PCCLTimeoutError
    DIVERGENCE = errors.DivergenceError
    FINISHED = errors.RunFinishedError
    REORDERED = errors.RanksChangedError  # ranks have changed, and no peer is lost
    TOO_FEW_PEERS = errors.TooFewPeersError  # fewer than the min_peers of the shared state


class Fail(Effect):
    """A call failed; `phase` describes its progress.

    `again`: another peer was at fault, so the same call may succeed when repeated.
    """

    call: int
    result: Result
    why: str
    fault: Fault = Fault.OTHER
    phase: str = ""
    again: bool = False


class Follow(Effect):
    """A synchronization has a new plan, which voids all fetched data.

    If the plan lists entries to fetch, the caller fetches them and votes with `fetched`. If the
    plan is `resumed`, the current fetch continues, and its data stays valid.
    """

    call: int
    plan: m.SyncPlan
    resumed: bool = False


class Measure(Effect):
    """A probe: the caller must fetch from all these holders at once, and call `measured`.

    A probe voids the previous one. Without holders, there is no new probe.
    """

    call: int
    seq: int
    holders: tuple[int, ...]


class Fetched(Effect):
    """A fetch has ended: all data has arrived and must be verified (`ok`), or the fetch failed."""

    call: int
    seq: int
    ok: bool
    why: str


class Arrange(Effect):
    """The master arranges a meeting of this peer and another one, or of two others here."""

    message: m.Rendezvous


class Waits(Effect):
    """Log what a long call waits for."""

    call: int
    why: str


class MembersChanged(Effect):
    """Log which peers have joined or left the group, with the reason; `size` is its new size.

    `begun`: the group has completed a call, so a newcomer deserves a warning.
    """

    joined: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    size: int
    begun: bool


class Reduced(Struct, frozen=True):
    world_size: int
    tx_bytes: int
    rx_bytes: int


class Synced(Struct, frozen=True):
    """The answer to a synchronization: the elected revision, payload bytes, diverged peers."""

    revision: int
    tx_bytes: int
    rx_bytes: int
    divergence: tuple[m.Divergence, ...] = ()
