"""What peers and the master say to each other, and how it is written.

Every message is a frozen structure, sent as one MessagePack array that begins with its tag. Rules
that keep old and new versions talking: tags are never reused, fields are only ever appended, an
appended field has a default. `Hello` carries the protocol version and is the first message of every
peer.

A `call` is a number a peer gives to one of its API calls; answers name it. A `seq` is a number the
master gives to one committed collective or synchronisation; it never repeats within a run. A
`nonce` is one that nobody else can guess: bulk data carries that of its call.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from pccl.protocol import wording
from pccl.text import address_text

PROTOCOL_VERSION = 2
DIFFERENCES_MAX = 100  # entries described when content has diverged
PARTS_MAX = 1 << 16  # tensors of one collective, as in c/pccl.h
RINGS_MAX = 8  # of a group, as in c/pccl.h
INLINE_BYTES_MAX = 32768  # of a contribution that travels with its vote
MESSAGE_BYTES_MAX = 16 << 20  # an offer of a hundred thousand entries; anything larger is not ours
ENTRY_BYTES_MAX = 40  # of an Entry in a message, without its name and layout
PART_BYTES_MAX = 19  # of a Part in a message, without its name and layout

U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Weight = Annotated[int, Meta(ge=1, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]  # MessagePack itself ends at 64 bits
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=256)]
Data = Annotated[bytes, Meta(max_length=INLINE_BYTES_MAX)]


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


class Cause(IntEnum):
    """What kind of failure a CallError or Finished tells, where its result alone does not."""

    OTHER = 0
    MISMATCH = 1  # calls that can never meet
    TIMEOUT = 2  # withdrawn
    DIVERGENCE = 3  # content that had diverged, and a peer that wants an error then
    MEMORY = 4  # a peer had none for its part


# ---- values inside messages ----


class PeerInfo(Struct, array_like=True, frozen=True):
    """A peer as others reach it: at `host`:`port`, or at `ipc` on the same `machine`.

    `curve` is the public key by which they authenticate each other; empty without encryption.
    """

    peer: U64
    group: U32
    host: Name
    port: U16
    ipc: Name
    machine: Name
    curve: Name = ""

    def __str__(self) -> str:
        return f"peer {self.peer} ({address_text(self.host, self.port)})"


class Ring(Struct, array_like=True, frozen=True):
    """One ring: the peers in order, each sending to the next, and its share of the data."""

    order: tuple[U64, ...]
    weight: Weight


Rings = Annotated[tuple[Ring, ...], Meta(max_length=RINGS_MAX)]


class World(Struct, array_like=True, frozen=True):
    """Counts of accepted peers: of the run, of the own group, of groups, of the largest group."""

    global_size: U32
    local_size: U32
    groups: U32
    largest: U32


class Part(Struct, array_like=True, frozen=True):
    """One tensor of a collective over several; `name` is its key, if it has one.

    `layout` is the order of its elements in memory (pccl.layout); empty for C's.
    """

    dtype: U16
    count: U64
    name: Name = ""
    layout: Text = ""

    def __str__(self) -> str:
        what = wording.elements(self.count, self.dtype, self.layout)
        return f"{self.name or 'a tensor'} of {what}"


class Work(Struct, array_like=True, frozen=True):
    """What a collective does, the same on all peers. `what` is the API call's name.

    `algorithm` and `quantized` are values of QuantizationAlgorithm and, where that leaves a choice,
    of DataType. `count` elements are those that each member gives, or gets of a reduce_scatter.
    `root` is a rank. `members` is the size of the group as the caller knows it, where ranks matter,
    else 0. `parts` are those of a list or dict of tensors, and `count` and `dtype` are 0 then.
    `layout`: as in Part.
    """

    what: Name
    redop: U16
    dtype: U16
    count: U64
    algorithm: U16 = 0
    quantized: U16 = 0
    root: U32 = 0
    members: U32 = 0
    parts: Annotated[tuple[Part, ...], Meta(max_length=PARTS_MAX)] = ()
    layout: Text = ""

    def __str__(self) -> str:
        return wording.call(self)

    def sees_others_than(self, other: Work) -> bool:
        """Whether both are the same call, of peers that differ on who is in the group."""
        return self.what == other.what and self.members != other.members

    def difference(self, other: Work) -> str:
        """What the names of both calls do not show, or nothing."""
        return wording.difference(self, other)


class Entry(Struct, array_like=True, frozen=True):
    """One tensor of the shared state, in an offer. `layout`: as in Part."""

    name: Name
    dtype: U16
    count: U64
    any_content: bool
    digest: Annotated[bytes, Meta(max_length=32)]
    layout: Text = ""


class Offer(Struct, array_like=True, frozen=True):
    """The shared state that a peer has; `strict`: divergence is to be an error for all.

    With fewer peers than `min_peers` no shared state is to begin.
    """

    revision: U64
    strategy: U16
    entries: tuple[Entry, ...]
    strict: bool = False
    min_peers: U64 = 0


class Difference(Struct, array_like=True, frozen=True):
    """How one entry of a peer differed from what was elected.

    `ulp` is the largest distance of two elements that are no NaN, in units in the last place;
    `nans` and `nans_elected` count the NaNs there and in the elected content.
    """

    entry: U32
    nbytes: U64
    ulp: U64
    nans: U64
    nans_elected: U64


Differences = Annotated[tuple[Difference, ...], Meta(max_length=DIFFERENCES_MAX)]


class Divergence(Struct, array_like=True, frozen=True):
    """A peer that had other content at the same revision: in `count` entries, the first of them."""

    peer: U64
    count: U32
    differences: Differences


class Done(Struct, array_like=True, frozen=True):
    """Which rounds a peer knows the results of: counts of completed rounds, and the last results.

    A master that comes back compares these: who stands in a round of which somebody else has the
    result already has only missed that result.
    """

    topology: U64 = 0
    pending: U64 = 0
    were_pending: bool = False
    sync: U64 = 0
    revision: U64 = 0
    plan: U64 = 0  # seq of the last plan of that synchronisation, if it had any
    holds: bool = False  # it took part in synchronisation number `sync`, and holds its content
    optimized: U64 = 0
    short: U64 = 0  # as in the last SyncResult


class Open(Struct, array_like=True, frozen=True):
    """A collective whose outcome a peer does not know; `vote` is None until it has voted."""

    seq: U64
    members: tuple[U64, ...]
    vote: bool | None
    tag: U64 = 0


class Small(Struct, array_like=True, frozen=True):
    """A small collective that has committed: who took part, and the result."""

    seq: U64
    tag: U64
    members: tuple[U64, ...]
    data: Data


# ---- from a peer to the master ----


class Hello(Struct, array_like=True, frozen=True, tag=1):
    """Asks to join. `host` is the address to advertise, empty for the one that the master sees.

    `curve` is the public key of its streams, in a run with keys; without, `dial` is the password by
    which the master may dial this peer.
    """

    protocol: U32
    version: Name
    group: U32
    host: Name
    port: U16
    ipc: Name
    machine: Name
    arithmetic: Annotated[bytes, Meta(max_length=32)]
    curve: Name = ""
    dial: Name = ""


class TopologyVote(Struct, array_like=True, frozen=True, tag=2):
    """Enters `update_topology`."""

    call: U64


class PendingVote(Struct, array_like=True, frozen=True, tag=3):
    """Enters `are_peers_pending`. `stuck`: this peer can enter nothing else until it returns.

    When all voters are `patient`, the answer waits until a peer is pending.
    """

    call: U64
    stuck: bool = False
    patient: bool = False


class Hurry(Struct, array_like=True, frozen=True, tag=16):
    """A patient caller of `are_peers_pending` wants the answer now, even if it is no."""

    call: U64


class Inquire(Struct, array_like=True, frozen=True, tag=17):
    """The caller of `call` has waited for long: for whom? Of a collective with its `seq`, or 0."""

    call: U64
    seq: U64 = 0


class StartVote(Struct, array_like=True, frozen=True, tag=4):
    """Enters a collective: its engine knows the buffers already, or `data` is the contribution.

    `heard` is the greatest seq the peer has heard of: it lacks no result up to there. `stuck`: as
    in `PendingVote`.
    """

    call: U64
    tag: U64
    work: Work
    data: Data | None = None
    heard: U64 = 0
    stuck: bool = False


class FinishVote(Struct, array_like=True, frozen=True, tag=5):
    """Holds the whole result of a collective, or cannot get it: `why`, and a `Cause`."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class SyncVote(Struct, array_like=True, frozen=True, tag=6):
    """Enters `sync_shared_state`; its engine serves the offered content already."""

    call: U64
    offer: Offer


class FetchedVote(Struct, array_like=True, frozen=True, tag=7):
    """A receiver of shared state has all of it, verified, or could not get it.

    `differences` describe what it had before, where the plan asks for that.
    """

    seq: U64
    ok: bool
    why: Text = ""
    differences: Differences = ()


class Leave(Struct, array_like=True, frozen=True, tag=8):
    """Leaves the run, in good order."""


class Withdraw(Struct, array_like=True, frozen=True, tag=9):
    """The caller's time is up: take back what `call` waits for, if it can still be taken back.

    `seq` is that of a collective which this peer has completed and others have not; 0 otherwise.
    """

    call: U64
    seq: U64 = 0


class Unreached(Struct, array_like=True, frozen=True, tag=11):
    """In `epoch`, no stream to `peer` could be opened; `why` is what stood in the way."""

    peer: U64
    epoch: U32
    why: Text = ""


class Stalled(Struct, array_like=True, frozen=True, tag=15):
    """Others may wait for ever for what this peer had still to pass on, and now cannot.

    In `epoch` it has lost the stream to a neighbour, or failed otherwise, after it held the whole
    result of a collective itself; or, where `seq` is not 0, it cannot serve all that the plan of
    that number told it to.
    """

    epoch: U32
    seq: U64
    why: Text


class Examine(Struct, array_like=True, frozen=True, tag=12):
    """Asks what a Hello would lead to, without joining; see Hello."""

    protocol: U32
    version: Name
    host: Name
    port: U16
    curve: Name = ""
    dial: Name = ""


class OptimizeVote(Struct, array_like=True, frozen=True, tag=13):
    """Enters `optimize_topology`; its engine serves something to measure links with already."""

    call: U64


class Measured(Struct, array_like=True, frozen=True, tag=14):
    """What a probe found of the links that lead to this peer.

    `rate` is in bytes per second, 0 where nothing came. `delay_us` is how long the first bytes
    took, with the connection that they needed.
    """

    seq: U64
    rate: U64
    delay_us: U64


class Resume(Struct, array_like=True, frozen=True, tag=10):
    """An accepted peer comes back to a master that has lost its connections, with all it knows.

    `known` are the peers of its group, `open` and `finished` its collectives without and with a
    known outcome (the latest ones: older ones are known to all), `small` those results that others
    may lack, `rings` those of the last Plan.
    """

    protocol: U32
    version: Name
    arithmetic: Annotated[bytes, Meta(max_length=32)]
    run: U64
    info: PeerInfo
    known: tuple[PeerInfo, ...]
    epoch: U32
    last_seq: U64
    done: Done
    open: tuple[Open, ...]
    finished: tuple[tuple[U64, bool], ...]
    small: tuple[Small, ...] = ()
    rings: Rings = ()
    dial: Name = ""


# ---- from the master to a peer ----


class Welcome(Struct, array_like=True, frozen=True, tag=64):
    """Registered: a pending peer until `Admitted`. `warning` is for its user."""

    peer: U64
    warning: Text = ""


class Refused(Struct, array_like=True, frozen=True, tag=65):
    """The answer to a Hello that cannot be let in."""

    result: U16
    why: Text


class Plan(Struct, array_like=True, frozen=True, tag=66):
    """The group's peers and rings from now on. A new epoch means new streams.

    `topology` counts the rounds of `update_topology` that led to it. By the `nonce` its peers let
    each other's streams in.
    """

    epoch: U32
    peers: tuple[PeerInfo, ...]
    rings: Rings
    topology: U64
    nonce: U64 = 0


class Membership(Struct, array_like=True, frozen=True, tag=67):
    """The world sizes from now on."""

    world: World


class Admitted(Struct, array_like=True, frozen=True, tag=68):
    """To a pending peer: accepted into `run`. `done` counts the rounds that were before its time.

    Bulk data of another run is never mistaken for this one's, and who knows the number may come
    back to a master that was restarted: nobody else hears it.
    """

    run: U64
    done: Done


class TopologyResult(Struct, array_like=True, frozen=True, tag=69):
    """`update_topology` is done; it was the run's `round`-th."""

    call: U64
    round: U64


class PendingResult(Struct, array_like=True, frozen=True, tag=70):
    """The answer to `are_peers_pending`, the same for all; it was the run's `round`-th."""

    call: U64
    pending: bool
    round: U64


class Started(Struct, array_like=True, frozen=True, tag=71):
    """All members stand in the collective: go. The ring plan is that of `epoch`.

    Where the contributions came with the votes, `data` is the result, and if it is `final` it has
    committed. Nobody lacks any result up to `stable`.
    """

    call: U64
    seq: U64
    epoch: U32
    data: Data | None = None
    final: bool = False
    stable: U64 = 0
    nonce: U64 = 0


class Interrupt(Struct, array_like=True, frozen=True, tag=72):
    """The collective can no longer be expected to complete: stop, and vote to finish it."""

    seq: U64
    why: Text


class Finished(Struct, array_like=True, frozen=True, tag=73):
    """The one outcome of a collective; `cause` is a `Cause`, of a failure."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class SyncPlan(Struct, array_like=True, frozen=True, tag=74):
    """Who sends what to whom.

    Serve the peers `serve`; fetch the entries `fetch` from `holders` and verify `digests`.
    Supersedes an earlier plan of the same call. `diverged`: say how the content differed that
    this peer has at the same revision.
    """

    call: U64
    seq: U64
    serve: tuple[U64, ...]
    holders: tuple[U64, ...]
    fetch: tuple[U32, ...]
    digests: tuple[bytes, ...]
    diverged: bool = False
    nonce: U64 = 0


class SyncResult(Struct, array_like=True, frozen=True, tag=75):
    """All receivers hold the elected content: keep it. The shared state is at `revision`.

    It was the run's `round`-th synchronisation, and `plan` the seq of its last plan, if any. A
    peer that has offered a higher revision was refused: it took no part.

    With `short` nothing was synchronised: so many peers are wanted to begin with, and are not here.
    """

    call: U64
    revision: U64
    round: U64
    plan: U64
    divergence: tuple[Divergence, ...] = ()
    short: U64 = 0


class CallError(Struct, array_like=True, frozen=True, tag=76):
    """A call failed before anything happened; `result` is a pccl.Result, `cause` a `Cause`.

    `seq` is not 0 where it had begun all the same, with a master that could not tell this peer.
    """

    call: U64
    result: U16
    why: Text
    cause: U16 = 0
    seq: U64 = 0


class Resumed(Struct, array_like=True, frozen=True, tag=78):
    """The master knows the run again, in which `done` are the rounds that are over.

    Who stands in one of these has its result herewith; other calls are to be voted anew.
    """

    done: Done


class Missed(Struct, array_like=True, frozen=True, tag=79):
    """A small collective in which the peer stands has committed; its result was lost on the way."""

    small: Small


class Report(Struct, array_like=True, frozen=True, tag=80):
    """The answer to Examine.

    `host` is where the master sees the peer, `unreached` why it cannot reach it, if it has
    `dialled` and so it is. `unix_s` is the master's clock. `arithmetic` is that of the run's
    peers, of whom there are `peers`.
    """

    protocol: U32
    version: Name
    host: Name
    unreached: Text
    unix_s: float
    arithmetic: Annotated[bytes, Meta(max_length=32)]
    peers: U32
    dialled: bool = True


class Probe(Struct, array_like=True, frozen=True, tag=81):
    """Measure what comes from `peers`, which do the same the other way, and say so by `Measured`.

    Supersedes an earlier probe of the same call.
    """

    call: U64
    seq: U64
    peers: tuple[U64, ...]
    nonce: U64 = 0


class OptimizeResult(Struct, array_like=True, frozen=True, tag=82):
    """`optimize_topology` is done, and the rings are what they are to be; it was the `round`-th."""

    call: U64
    round: U64


class Waiting(Struct, array_like=True, frozen=True, tag=83):
    """The answer to Inquire: what the call waits for."""

    call: U64
    why: Text


class Kicked(Struct, array_like=True, frozen=True, tag=77):
    """Dropped from the run."""

    result: U16
    why: Text


PeerMessage: TypeAlias = (
    Hello
    | TopologyVote
    | PendingVote
    | Hurry
    | Inquire
    | StartVote
    | FinishVote
    | SyncVote
    | FetchedVote
    | Leave
    | Withdraw
    | Unreached
    | Stalled
    | Examine
    | OptimizeVote
    | Measured
    | Resume
)
MasterMessage: TypeAlias = (
    Welcome
    | Refused
    | Plan
    | Membership
    | Admitted
    | TopologyResult
    | PendingResult
    | Waiting
    | Started
    | Interrupt
    | Finished
    | SyncPlan
    | SyncResult
    | CallError
    | Kicked
    | Resumed
    | Missed
    | Report
    | Probe
    | OptimizeResult
)
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_peer: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_from_master: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)


def encode(message: PeerMessage | MasterMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_from_peer(data: bytes | memoryview) -> PeerMessage:
    """The message a peer sent. Raises ProtocolError for anything else."""
    return _decode(_from_peer, data)


def decode_from_master(data: bytes | memoryview) -> MasterMessage:
    """The message the master sent. Raises ProtocolError for anything else."""
    return _decode(_from_master, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(str(error)) from None
