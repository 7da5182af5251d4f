"""The messages between peers and the master, and their encoding.

Every message is a frozen structure, sent as one MessagePack array that begins with its tag. Three
rules keep old and new versions compatible: tags are never reused, new fields are appended, and an
appended field has a default. `Hello` carries the protocol version and is the first message of every
peer.

A `call` is the number that a peer gives to one of its API calls; answers repeat it. A `seq` is the
number that the master gives to a collective or synchronization when it commits, or when it fails
for all peers before it begins. It never repeats in a run. A `nonce` is a secret random number; bulk
data carries the nonce of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar, Union, dataclass_transform

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from pccl.support import ADVERTISED_MAX, address_text
from pccl.tensors import described
from pccl.types import TRAITS, CollectiveKind, DataType, QuantizationAlgorithm, ReduceOp, Result

_DTYPE_NAMES = {dtype.value: dtype.common_name for dtype in DataType}
_OP_NAMES = {op.value: op.name.lower() for op in ReduceOp}
_ALGORITHM_NAMES = {each.value: each.name for each in QuantizationAlgorithm}
_ROWS_SHOWN = 8
_WITH_DTYPE = {QuantizationAlgorithm.MIN_MAX.value, QuantizationAlgorithm.ZERO_POINT_SCALE.value}
_REORDER = (
    "; they do not lie in the same order in memory: have all call it with c = x.contiguous() "
    "(numpy.ascontiguousarray(x)), and then do x.copy_(c) (x[...] = c)"
)


def _named(names: Mapping[int, str], value: int, what: str) -> str:
    """The name of a value; a peer may send numbers without one."""
    return names.get(value, f"{what} {value}")


def dtype_name(dtype: int) -> str:
    """The name of a `DataType` value in numpy and torch."""
    return _named(_DTYPE_NAMES, dtype, "dtype")


def elements(count: int, dtype: int, layout: str = "") -> str:
    """A number of elements in words, with the memory order if it is not C order."""
    order = f" ({described(layout)})" if layout else ""
    return f"{count} element{'' if count == 1 else 's'} of {dtype_name(dtype)}{order}"


PROTOCOL_VERSION = 15  # of the control protocol, as in Hello
DIFFERENCES_MAX = 100  # entries described when content has diverged
PARTS_MAX = 1 << 16  # tensors of one collective, as in c/pccl_core.h
RINGS_MAX = 8  # rings of a group, as in c/pccl_core.h
MEMBERS_MAX = 4096  # members of a ring, as in c/pccl_core.h
INLINE_BYTES_MAX = 262144  # bytes of a contribution that travels with its vote
MESSAGE_BYTES_MAX = 16 << 20  # bytes of a message: a manifest of a hundred thousand entries
ENTRY_BYTES_MAX = 40  # bytes of an Entry in a message, without its name and layout
PART_BYTES_MAX = 19  # bytes of a Part in a message, without its name and layout
# bytes of all entries or parts; the rest of a message is small, except two numbers per member
LIST_BYTES_MAX = MESSAGE_BYTES_MAX - 1024 - 18 * MEMBERS_MAX
NAME_CHARS_MAX = 256  # characters of a name
PEER_NAME_CHARS_MAX = 64  # characters of a peer's name
GONE_MAX = 8  # lost peers for which a Plan gives the reason
GONE_CHARS_MAX = 300  # characters of such a reason
PACKAGES_MAX = 256  # packages of weights that a client serves, or that are available
AVOIDED_MAX = 64  # holders that a Seek avoids

U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Weight = Annotated[int, Meta(ge=1, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]  # MessagePack's own limit is 64 bits
Version = Annotated[int, Meta(ge=1, lt=1 << 62)]
Hash = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
PeerName = Annotated[str, Meta(max_length=PEER_NAME_CHARS_MAX)]
Hosts = Annotated[tuple[Name, ...], Meta(max_length=ADVERTISED_MAX - 1)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Lanes = Annotated[int, Meta(ge=1, le=256)]
if TYPE_CHECKING:
    Data: TypeAlias = bytes | memoryview
else:  # a view of the message that it is decoded from: no copy
    Data = Annotated[memoryview, Meta(max_length=INLINE_BYTES_MAX)]
Pair = Annotated[tuple[U64, ...], Meta(max_length=2)]
Rows = Annotated[tuple[U64, ...], Meta(max_length=MEMBERS_MAX)]


class Cause(IntEnum):
    """The kind of failure in a CallError or Finished, if the result does not determine it."""

    OTHER = 0
    MISMATCH = 1  # the calls can never match
    TIMEOUT = 2  # a caller has withdrawn
    DIVERGENCE = 3  # content had diverged, and a peer wants an error in that case
    MEMORY = 4  # a peer ran out of memory
    FINISHED = 5  # the run is finished
    REORDERED = 6  # ranks have changed, and no peer is lost


class Called(IntEnum):
    """The kind of a call that failed for all its callers; a send counts as COLLECTIVE."""

    COLLECTIVE = 0
    SYNC = 1
    OPTIMIZE = 2
    TOPOLOGY = 3
    PENDING = 4
    FINISH = 5


@dataclass_transform(frozen_default=True)  # for type checkers; msgspec inherits `frozen`
class Value(Struct, array_like=True, frozen=True):
    """A structure inside messages."""


class FromPeer(Value):
    """A message of a peer."""


class FromMaster(Value):
    """A message of the master."""


class PeerNotice(FromPeer):
    """A message that an accepted peer may send at any time."""


class MasterNotice(FromMaster):
    """A message that an accepted peer may receive at any time."""


class PeerInfo(Value):
    """A peer and its addresses: `host`:`port`, and `ipc` on the same `machine`.

    `curve` is its public key, which authenticates it; empty without encryption. `team` is its team,
    and `team_size` the number of the team's members; 0: none. `outgoing`: others cannot connect to
    this peer, for example behind NAT, so it connects to them. `relay` is the port at which it
    relays between two such peers; 0: it does not relay. `others` are further hosts at which it may
    be reached, at the same port. `name` is for people.
    """

    peer: U64
    group: U32
    host: Name
    port: U16
    ipc: Name
    machine: Name
    curve: Name = ""
    team: U64 = 0
    team_size: U16 = 0
    outgoing: bool = False
    relay: U16 = 0
    others: Hosts = ()
    name: PeerName = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.host, *self.others

    @property
    def where(self) -> str:
        address = address_text(self.host, self.port)
        return f"{self.name}, {address}" if self.name else address

    def __str__(self) -> str:
        return f"peer {self.peer} ({self.where})"


def personal(text: str, number: int) -> str:
    """A text of the master about peers, which says "you" for the reading peer."""
    title = f"peer {number} ("
    return text if f"{title}you, " in text else text.replace(title, f"{title}you, ")


class Gone(Value):
    """A lost peer, and the reason. `left`: it left by itself."""

    peer: U64
    why: Annotated[str, Meta(max_length=GONE_CHARS_MAX)]
    left: bool


class Package(Value):
    """A step from version `base` of the weights to `version`; with `base` 0, from any version.

    A package has a head, which describes the tensors, and a body, each with a size and a digest.
    The protocol does not interpret them. `content` is the digest of all tensors of `version`; it
    does not depend on the packages that lead there.
    """

    version: Version
    base: U64
    content: Hash
    head_bytes: U32
    head: Hash
    body_bytes: U64
    body: Hash

    @property
    def key(self) -> tuple[int, int]:
        return self.version, self.base

    @property
    def nbytes(self) -> int:
        return self.head_bytes + self.body_bytes


Packages = Annotated[tuple[Package, ...], Meta(max_length=PACKAGES_MAX)]
Avoided = Annotated[tuple[U64, ...], Meta(max_length=AVOIDED_MAX)]


class Ring(Value):
    """One ring: peers in order, each sending to the next; `weight`: its share of the data."""

    order: tuple[U64, ...]
    weight: Weight


Calls = Annotated[tuple[U64, ...], Meta(max_length=RINGS_MAX)]  # one for each ring
Rings = Annotated[tuple[Ring, ...], Meta(max_length=RINGS_MAX)]


class World(Value):
    """World sizes: the accepted peers of the run and of the group, the number of groups, and the
    peers of the largest group."""

    global_size: U32
    local_size: U32
    groups: U32
    largest: U32


class Part(Value):
    """One of several tensors in a collective; `name` is its key, if it has one.

    `layout` is the order of its elements in memory (pccl.tensors); empty for C order.
    """

    dtype: U16
    count: U64
    name: Name = ""
    layout: Text = ""

    def __str__(self) -> str:
        what = elements(self.count, self.dtype, self.layout)
        return f"{self.name or 'a tensor'} of {what}"


class Spec(Value):
    """The description of a collective. All peers must give the same one.

    `algorithm` is a QuantizationAlgorithm. `quantized` is the DataType that it quantizes to, if the
    algorithm leaves a choice. `count` is the number of elements that each member gives; in a
    reduce_scatter or scatter, the number that each member receives; in an all_to_all, the length of
    a row. `root` is a rank. `members` is the group's size as the caller knows it, if ranks matter
    or if the size decides how the data travels (protocol/tuning.py); else 0. `parts` describe a
    list or dict of tensors; then `count` and `dtype` are 0. `layout`: as in Part. `rows`: the
    numbers of rows by rank in an all_gather, if they differ; counts are then for one row. `ring`:
    if ranks matter, the checksum of the ring order behind them; 0: unknown.
    """

    what: CollectiveKind
    redop: U16
    dtype: U16
    count: U64
    algorithm: U16 = 0
    quantized: U16 = 0
    root: U32 = 0
    members: U32 = 0
    parts: Annotated[tuple[Part, ...], Meta(max_length=PARTS_MAX)] = ()
    layout: Text = ""
    rows: Rows = ()
    ring: U32 = 0

    def __str__(self) -> str:
        if self.what == CollectiveKind.BARRIER:
            return "barrier()"
        if self.parts:
            total = sum(part.count for part in self.parts)
            words = [f"{len(self.parts)} tensors of {total} elements"]
        else:
            words = [elements(self.count, self.dtype, self.layout)]
        if self.rows:
            more = ", ..." if len(self.rows) > _ROWS_SHOWN else ""
            words.append(f"times {', '.join(map(str, self.rows[:_ROWS_SHOWN]))}{more} rows")
        if TRAITS[self.what].reduces:
            words.append(_named(_OP_NAMES, self.redop, "op"))
        if TRAITS[self.what].rooted:
            words.append(f"root {self.root}")
        if self.algorithm:
            quantized = "quantized by " + _named(_ALGORITHM_NAMES, self.algorithm, "algorithm")
            if self.algorithm in _WITH_DTYPE:
                quantized += " to " + dtype_name(self.quantized)
            words.append(quantized)
        return f"{self.what}({', '.join(words)})"

    def sees_others_than(self, other: Spec) -> bool:
        """True if both are the same call by peers that disagree on ranks or members."""
        mine, theirs = (self.members, self.ring), (other.members, other.ring)
        both = bool(self.members) == bool(other.members)
        return self.what == other.what and both and mine != theirs

    def difference(self, other: Spec) -> str:
        """The difference that the calls' texts do not show; empty if there is none.

        It may be the first different tensor of two lists, or the first rank with other rows. For
        different memory orders it includes the remedy.
        """
        pairs = list(zip(self.parts, other.parts, strict=False))
        words = ""
        if len(self.parts) == len(other.parts):
            unlike = (f"; tensor {i} is {a}, and {b}" for i, (a, b) in enumerate(pairs) if a != b)
            words = next(unlike, "")
        if len(self.rows) == len(other.rows):
            pairs_of_rows = enumerate(zip(self.rows, other.rows, strict=True))
            unlike = (
                f"; rank {rank} gives {a} rows, and {b}" for rank, (a, b) in pairs_of_rows if a != b
            )
            words += next(unlike, "")
        if self.layout != other.layout or any(a.layout != b.layout for a, b in pairs):
            words += _REORDER
        return words


class Entry(Value):
    """One tensor of the shared state, in a manifest. `layout`: as in Part.

    An empty `digest` means unknown content, which is equal to no other content.
    """

    name: Name
    dtype: U16
    count: U64
    any_content: bool
    digest: Annotated[bytes, Meta(max_length=32)]
    layout: Text = ""


class Manifest(Value):
    """A peer's shared state. `strict`: divergence must be an error for all peers.

    A group's shared state must not begin with fewer than `min_peers` peers. `torn`: an unfinished
    transfer has overwritten a part of the state, so the peer can only receive.
    """

    revision: U64
    strategy: U16
    entries: tuple[Entry, ...]
    strict: bool = False
    min_peers: U64 = 0
    torn: bool = False

    @property
    def whole(self) -> bool:
        return not self.torn and all(entry.digest for entry in self.entries)

    def overwritten(self, entries: Collection[int]) -> Manifest:
        """This manifest after a transfer that may have overwritten these entries."""
        if not entries:
            return self
        unknown = tuple(
            replace(entry, digest=b"") if index in entries else entry
            for index, entry in enumerate(self.entries)
        )
        return replace(self, entries=unknown, torn=True)


class Difference(Value):
    """How one entry of a peer differed from the elected content.

    `ulp` is the largest difference of two elements that are not NaN, in units in the last place;
    `nans` and `nans_elected` count the NaNs of the peer and of the elected content.
    """

    entry: U32
    nbytes: U64
    ulp: U64
    nans: U64
    nans_elected: U64


Differences = Annotated[tuple[Difference, ...], Meta(max_length=DIFFERENCES_MAX)]


class Divergence(Value):
    """A peer whose content differed at the same revision, in `count` entries. `differences`
    describes the first of these."""

    peer: U64
    count: U32
    differences: Differences


class Done(Value):
    """The rounds whose results a peer knows: numbers of completed rounds, and the latest results.

    A restarted master compares these. If a peer waits in a round and another peer knows its result,
    the waiting peer has only missed the result.
    """

    topology: U64 = 0
    pending: U64 = 0
    were_pending: bool = False
    sync: U64 = 0
    revision: U64 = 0
    plan: U64 = 0  # seq of the last plan of that synchronization, if it had any
    holds: bool = False  # the peer took part in synchronization `sync`, and holds its content
    optimized: U64 = 0
    short: U64 = 0  # as in the last SyncResult
    finished: bool = False  # the run is finished


class Open(Value):
    """A collective whose outcome a peer does not know; `vote` is None until it has voted.

    `paired`: the first of two members sends to the second.
    """

    seq: U64
    members: tuple[U64, ...]
    vote: bool | None
    tag: U64 = 0
    paired: bool = False


class Failure(Value):
    """A call that the master refused, with the same error for all members that made the call.

    `called` is a `Called`; `tag` and `pair` are those of a collective; the rest as in CallError.
    """

    seq: U64
    called: U16
    tag: U64
    pair: Pair
    result: U16
    why: Text
    cause: U16

    @property
    def is_run_wide(self) -> bool:
        return self.called not in (Called.COLLECTIVE, Called.SYNC)


class Small(Value):
    """A committed small collective: its members and its result."""

    seq: U64
    tag: U64
    members: tuple[U64, ...]
    data: Data


class Hello(FromPeer, tag=1):
    """Asks to join. `host` is the address to advertise; empty: the address that the master sees.

    In a run with keys, `curve` is the public key of the peer's streams; without keys, `dial` is the
    password with which the master may dial the peer. `team` and `team_size`: as in `PeerInfo`.

    A `client` is not a peer: it publishes or follows weights, and takes part in no round.
    `outgoing`, `relay`, `others` and `name`: as in `PeerInfo`.
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
    team: U64 = 0
    team_size: U16 = 0
    client: bool = False
    outgoing: bool = False
    relay: U16 = 0
    others: Hosts = ()
    name: PeerName = ""


class TopologyVote(FromPeer, tag=2):
    """Enters `update_topology`, or `finish`, which ends admissions."""

    call: U64
    finish: bool = False


class PendingVote(FromPeer, tag=3):
    """Enters `are_peers_pending`. `stuck`: this peer cannot enter another call until it returns.

    If all voters are `patient`, the answer waits until a peer is pending. When `enough` members of
    the peer's group have entered and `grace_ms` have passed, the other members are dropped. If
    `enough` is 0, this peer waits for all members, and does not count towards `enough`.
    """

    call: U64
    stuck: bool = False
    patient: bool = False
    enough: U32 = 0
    grace_ms: U32 = 0


class Hurry(FromPeer, tag=16):
    """A patient caller of `are_peers_pending` wants the answer now, even if it is no."""

    call: U64


class Inquire(PeerNotice, tag=17):
    """Asks what `call` waits for. `seq`: the number of a started collective; else 0."""

    call: U64
    seq: U64 = 0


class StartVote(FromPeer, tag=4):
    """Enters a collective: the peer's engine knows the buffers, or `data` is the contribution.

    `heard` is the greatest seq that the peer knows; the peer has all results up to `heard`.
    `stuck`: as in `PendingVote`. In an all_to_all, `gives` and `takes` are the numbers of rows to
    each rank and from each rank; empty: one each. `pair`: the sender and the receiver of a send;
    else empty.
    """

    call: U64
    tag: U64
    work: Spec
    data: Data | None = None
    heard: U64 = 0
    stuck: bool = False
    gives: Rows = ()
    takes: Rows = ()
    pair: Pair = ()


class FinishVote(FromPeer, tag=5):
    """Votes whether the peer holds a collective's whole result. If not, `why` gives the reason and
    `cause` the `Cause`."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class Progress(FromPeer, tag=18):
    """A peer's progress in a long collective, or in its fetch of shared state, in thousandths.

    Only `status` uses it.
    """

    seq: U64
    done: U16


class SyncVote(FromPeer, tag=6):
    """Enters `sync_shared_state`; the peer's engine already serves the offered content.

    `holds`: as in Done, for the latest synchronization of its group. If the caller left before the
    result came, the peer holds nothing, whatever the master answered.
    """

    call: U64
    manifest: Manifest
    holds: bool = True


class FetchedVote(FromPeer, tag=7):
    """Votes whether a receiver of shared state has fetched and verified all of it.

    `differences` describes how its content differed before, if the plan asks for it.
    """

    seq: U64
    ok: bool
    why: Text = ""
    differences: Differences = ()


class Leave(FromPeer, tag=8):
    """Leaves the run."""


class Withdraw(FromPeer, tag=9):
    """The caller has left: withdraws the vote of `call`, unless the call has ended.

    `seq`: the number of a collective that this peer has completed and others have not; else 0.
    `abandoned`: the caller left by an exception; if false, its time is up.
    """

    call: U64
    seq: U64 = 0
    abandoned: bool = False

    def failure(self, caller: object) -> tuple[Result, str, Cause]:
        """What the call's other callers get."""
        if self.abandoned:
            why = f"{caller} has left by an exception"
            return Result.RANK_CONNECTION_LOST, why, Cause.OTHER
        return Result.TIMEOUT, f"{caller} waited no longer", Cause.TIMEOUT


class Unreached(PeerNotice, tag=11):
    """In `epoch`, no stream to `peer` could be opened, for the reason `why`."""

    peer: U64
    epoch: U32
    why: Text = ""


class RendezvousRequest(PeerNotice, tag=19):
    """Asks the `outgoing` peer `peer` to connect to a stream from this peer, `lanes` times.

    They meet at `port` of this peer; 0: this peer is `outgoing`, too. Connections with the same
    `token` belong together.
    """

    peer: U64
    token: Token
    port: U16
    lanes: Lanes


class Stalled(PeerNotice, tag=15):
    """The peer cannot forward data, and others may wait for it forever.

    In `epoch`, it held the whole result of a collective, and then lost the stream to a neighbor or
    failed otherwise. If `seq` is not 0, it is the number of a plan that the peer cannot fully
    serve, or of a send whose data is lost.
    """

    epoch: U32
    seq: U64
    why: Text


class Examine(FromPeer, tag=12):
    """Asks for the result of a Hello, without joining; see Hello."""

    protocol: U32
    version: Name
    host: Name
    port: U16
    curve: Name = ""
    dial: Name = ""
    others: Hosts = ()


class OptimizeVote(FromPeer, tag=13):
    """Enters `optimize_topology`; the peer's engine already serves data for measurements."""

    call: U64


class Measured(FromPeer, tag=14):
    """The result of a probe of the links to this peer.

    `rate` is in bytes per second, 0 if nothing arrived. `delay_us` is the time until the first
    bytes, including the time to connect.
    """

    seq: U64
    rate: U64
    delay_us: U64


class Resume(FromPeer, tag=10):
    """An accepted peer tells a master that has lost its connections everything that it knows.

    `known` are the peers of its group. `open` are its collectives without a known outcome.
    `finished` are its latest collectives with one; all peers know the older outcomes. `small` and
    `failed` are the results and the latest failures that others may lack. `rings` are the rings of
    the last Plan. `veteran`: it has completed a collective or synchronization in this run.
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
    failed: tuple[Failure, ...] = ()
    veteran: bool = False


class Publish(FromPeer, tag=40):
    """A client publishes a version of the weights, which it already serves."""

    call: U64
    packages: Annotated[tuple[Package, ...], Meta(min_length=1, max_length=2)]


class Holds(FromPeer, tag=41):
    """All packages that a client serves, and its version of the weights."""

    packages: Packages
    version: U64


class Seek(FromPeer, tag=42):
    """A client wants this package, but from none of `avoid`. Replaces an earlier Seek.

    If the client was fetching, its holder has failed.
    """

    version: U64
    base: U64
    avoid: Avoided = ()


class Got(FromPeer, tag=43):
    """A client has fetched and verified the package that it sought, at `rate` bytes/s."""

    rate: U64


class Slow(FromPeer, tag=44):
    """The client's current fetch is slow: the holder may serve another client in its place."""


class Welcome(FromMaster, tag=64):
    """The peer is registered, and pending until `Admitted`. `warning` is for its user.

    A client is never admitted. Other clients connect to it with the `nonce`.
    """

    peer: U64
    warning: Text = ""
    nonce: U64 = 0


class Refused(FromMaster, tag=65):
    """The answer to a Hello or Resume that is refused; `cause` as in Kicked."""

    result: U16
    why: Text
    cause: U16 = 0


class Plan(MasterNotice, tag=66):
    """The group's new peers and rings. A new epoch means new streams.

    `topology` counts the rounds of `update_topology` so far. The `nonce` admits the peers to each
    other's streams. `gone`: the reasons why peers of the previous plan are missing.
    """

    epoch: U32
    peers: tuple[PeerInfo, ...]
    rings: Rings
    topology: U64
    nonce: U64 = 0
    gone: Annotated[tuple[Gone, ...], Meta(max_length=GONE_MAX)] = ()

    @property
    def names(self) -> dict[int, str]:
        """Descriptions of the peers by their numbers."""
        return {info.peer: str(info) for info in self.peers}


class WorldSizes(MasterNotice, tag=67):
    """The new world sizes."""

    world: World


class Admitted(FromMaster, tag=68):
    """A pending peer is accepted into `run`. `done` describes the earlier rounds, and `heard` is
    their last seq.

    The run's number distinguishes its bulk data from other runs' data, and allows a peer to come
    back to a restarted master. So only members of the run get this number.
    """

    run: U64
    done: Done
    heard: U64 = 0


class TopologyResult(FromMaster, tag=69):
    """`update_topology` or `finish` is done. `round` counts both kinds of rounds together."""

    call: U64
    round: U64


class PendingResult(FromMaster, tag=70):
    """The answer to `are_peers_pending`, the same for all peers. `round` counts these rounds."""

    call: U64
    pending: bool
    round: U64


class Started(FromMaster, tag=71):
    """All members have entered the collective, which starts on the rings of `epoch`.

    If the contributions came with the votes, `data` is the result. If the result is `final`, the
    collective has committed. All peers have all results up to the seq `stable`.

    `calls`: for each ring, the call of this peer's predecessor. The predecessor may have sent data
    before the start.
    """

    call: U64
    seq: U64
    epoch: U32
    data: Data | None = None
    final: bool = False
    stable: U64 = 0
    nonce: U64 = 0
    calls: Calls = ()


class Interrupt(FromMaster, tag=72):
    """The collective may never complete. The peer must stop, and vote whether it has the result."""

    seq: U64
    why: Text


class Finished(FromMaster, tag=73):
    """The outcome of a collective; `cause` is the `Cause` of a failure."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class SyncPlan(FromMaster, tag=74):
    """Tells a peer what to send and fetch in a synchronization.

    The peer serves the peers `serve`, fetches the entries `fetch` from `holders`, and verifies
    `digests`. Replaces an earlier plan of the same call. `diverged`: this peer has other content at
    the same revision, and must report the differences. `in_place`: the peer's own content is no
    longer needed, so the elected content may overwrite it on arrival.
    """

    call: U64
    seq: U64
    serve: tuple[U64, ...]
    holders: tuple[U64, ...]
    fetch: tuple[U32, ...]
    digests: tuple[bytes, ...]
    diverged: bool = False
    nonce: U64 = 0
    in_place: bool = False


class SyncResult(FromMaster, tag=75):
    """All receivers have the elected content and may keep it; the shared state is at `revision`.

    `round` counts the run's synchronizations. `plan` is the seq of the last plan, if any. A peer
    that offered a higher revision was refused, and took no part.

    If `short` is not 0, nothing was synchronized: the shared state must begin with `short` peers,
    and the group has fewer.
    """

    call: U64
    revision: U64
    round: U64
    plan: U64
    divergence: tuple[Divergence, ...] = ()
    short: U64 = 0


class CallError(FromMaster, tag=76):
    """A call failed before anything happened. `result` is a pccl.Result, `cause` a `Cause`.

    `seq` is not 0 if all members that made the call get this error. A restarted master must then
    know of it. `called`, `tag` and `pair` are as in Failure.
    """

    call: U64
    result: U16
    why: Text
    cause: U16 = 0
    seq: U64 = 0
    called: U16 = 0
    tag: U64 = 0
    pair: Pair = ()


class Resumed(FromMaster, tag=78):
    """The restarted master knows the run again. `done` describes the rounds that are over.

    A peer that waits in one of these rounds gets the result from this message. In all other rounds
    the peer votes again.
    """

    done: Done


class Missed(FromMaster, tag=79):
    """A small collective has committed, but this peer missed the result and still waits for it."""

    small: Small


class Failed(MasterNotice, tag=87):
    """A call has failed for all peers that had made it.

    If an earlier master failed the call and the answer was lost, the peer may still wait in this
    call. Otherwise the peer made another call, which failed for the same reason.
    """

    failure: Failure


class Report(FromMaster, tag=80):
    """The answer to Examine.

    `host` is the address that the master sees. `unreached` says why the master could not reach the
    peer there; it is empty if the master reached the peer, or has not `dialled`. `unix_s` is the
    master's clock. `arithmetic` is the arithmetic digest of the run's peers, and `peers` their
    number.
    """

    protocol: U32
    version: Name
    host: Name
    unreached: Text
    unix_s: float
    arithmetic: Annotated[bytes, Meta(max_length=32)]
    peers: U32
    dialled: bool = True


class Probe(FromMaster, tag=81):
    """The peer must measure the rate from `peers`, and send `Measured`. They may measure too.

    Replaces an earlier probe of the same call.
    """

    call: U64
    seq: U64
    peers: tuple[U64, ...]
    nonce: U64 = 0


class OptimizeResult(FromMaster, tag=82):
    """`optimize_topology` is done, and rings are chosen. `round` counts these rounds."""

    call: U64
    round: U64


class Waiting(MasterNotice, tag=83):
    """The answer to Inquire: what the call waits for."""

    call: U64
    why: Text


class RendezvousJoin(MasterNotice, tag=84):
    """The peer must connect to a stream of `sender`, `lanes` times, at a host."""

    sender: PeerInfo
    token: Token
    host: Name
    port: U16
    lanes: Lanes
    others: Hosts = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.host, *self.others


class RendezvousResult(MasterNotice, tag=85):
    """The answer to a request without a port: the peers meet at `relay`, or `why` they cannot."""

    token: Token
    relay: PeerInfo | None = None
    why: Text = ""


class RendezvousRelay(MasterNotice, tag=86):
    """The peer must relay between the connections of two peers that name the token."""

    token: Token
    sender: PeerInfo
    receiver: PeerInfo


Rendezvous = RendezvousJoin | RendezvousResult | RendezvousRelay  # how the master arranges one


class Kicked(FromMaster, tag=77):
    """The peer is dropped from the run. `cause` is the `Cause` for its waiting calls."""

    result: U16
    why: Text
    cause: U16 = 0


class Published(FromMaster, tag=100):
    """The version of a Publish is available to others."""

    call: U64


class Available(FromMaster, tag=101):
    """All available packages of weights. `head` is the newest version ever published."""

    packages: Packages
    head: U64


class Source(FromMaster, tag=102):
    """The client fetches its package from `holder`, in this `slot` of the holder.

    The `nonce` admits its stream there.
    """

    version: U64
    base: U64
    holder: PeerInfo
    nonce: U64
    slot: U32


class Serve(FromMaster, tag=103):
    """The client serves this package to `receiver`; the rest as in Source."""

    version: U64
    base: U64
    receiver: PeerInfo
    nonce: U64
    slot: U32


class Served(FromMaster, tag=104):
    """The client `receiver` no longer fetches from this one."""

    receiver: U64


if TYPE_CHECKING:
    PeerMessage: TypeAlias = FromPeer
    MasterMessage: TypeAlias = FromMaster
else:
    _bases = {FromPeer, PeerNotice}, {FromMaster, MasterNotice}
    PeerMessage, MasterMessage = (
        Union[tuple({kind for base in each for kind in base.__subclasses__()} - each)]  # noqa: UP007
        for each in _bases
    )

T = TypeVar("T")


class ProtocolError(ValueError):
    """The bytes are not a message of this protocol."""


encode: Callable[[PeerMessage | MasterMessage], bytes] = msgspec.msgpack.Encoder().encode


def _decoder(message: type[T]) -> Callable[[bytes | memoryview], T]:
    """A function that decodes a message. It raises ProtocolError for anything else."""
    decoder = msgspec.msgpack.Decoder(message)

    def decode(data: bytes | memoryview) -> T:
        if len(data) > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of {len(data)} bytes")
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # also of ValidationError
            raise ProtocolError(str(error)) from None

    return decode


decode_from_peer = _decoder(PeerMessage)
decode_from_master = _decoder(MasterMessage)

SEVERAL = 0  # the tag of a frame with several messages
FRAME_MESSAGES_MAX = 64  # messages of a frame
FRAME_BYTES = 65536  # bytes of a frame; a larger message has a frame of its own

_HEAD = bytes((0x92, SEVERAL))
_Raws = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=FRAME_MESSAGES_MAX)]
_several: msgspec.msgpack.Decoder[tuple[int, list[msgspec.Raw]]]
_several = msgspec.msgpack.Decoder(tuple[int, _Raws])


def frames(messages: Sequence[bytes]) -> Sequence[bytes]:
    if len(messages) == 1:
        return messages
    made: list[bytes] = []
    together: list[bytes] = []
    nbytes = 0
    for message in messages:
        nbytes += len(message)
        if together and (nbytes > FRAME_BYTES or len(together) == FRAME_MESSAGES_MAX):
            made.append(_frame(together))
            together, nbytes = [], len(message)
        together.append(message)
    if together:
        made.append(_frame(together))
    return made


def _frame(messages: Sequence[bytes]) -> bytes:
    if len(messages) == 1:
        return messages[0]
    return b"".join((_HEAD, b"\xdc", len(messages).to_bytes(2, "big"), *messages))


def opened(frame: bytes | memoryview) -> Sequence[bytes | memoryview]:
    """Unpacks the encoded messages of a frame.

    Raises ProtocolError: it is not a frame of this protocol. The messages inside are not checked.
    """
    if frame[: len(_HEAD)] != _HEAD:
        return (frame,)
    if len(frame) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    try:
        return [bytes(message) for message in _several.decode(frame)[1]]
    except msgspec.DecodeError as error:
        raise ProtocolError(str(error)) from None
