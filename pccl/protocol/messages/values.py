"""Elements of messages: limits, numbers, texts and structures."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from pccl.protocol import wording
from pccl.protocol.kinds import CollectiveKind
from pccl.support.text import ADVERTISED_MAX, address_text

PROTOCOL_VERSION = 11
DIFFERENCES_MAX = 100  # entries described when content has diverged
PARTS_MAX = 1 << 16  # tensors of one collective, as in c/pccl.h
RINGS_MAX = 8  # of a group, as in c/pccl.h
MEMBERS_MAX = 4096  # of a ring, as in c/pccl.h
INLINE_BYTES_MAX = 262144  # of a contribution that travels with its vote
MESSAGE_BYTES_MAX = 16 << 20  # an offer of a hundred thousand entries
ENTRY_BYTES_MAX = 40  # of an Entry in a message, without its name and layout
PART_BYTES_MAX = 19  # of a Part in a message, without its name and layout
# of all entries or parts: the rest of a message is small, but for two numbers for each member
LIST_BYTES_MAX = MESSAGE_BYTES_MAX - 1024 - 18 * MEMBERS_MAX
NAME_CHARS_MAX = 256
PACKAGES_MAX = 256  # of weights that a process offers, or that can be had
AVOIDED_MAX = 64  # holders that a Seek names

U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Weight = Annotated[int, Meta(ge=1, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]  # MessagePack itself ends at 64 bits
Version = Annotated[int, Meta(ge=1, lt=1 << 62)]
Hash = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Hosts = Annotated[tuple[Name, ...], Meta(max_length=ADVERTISED_MAX - 1)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Lanes = Annotated[int, Meta(ge=1, le=256)]
Data = Annotated[bytes, Meta(max_length=INLINE_BYTES_MAX)]
Pair = Annotated[tuple[U64, ...], Meta(max_length=2)]
Rows = Annotated[tuple[U64, ...], Meta(max_length=MEMBERS_MAX)]


class Cause(IntEnum):
    """The kind of failure in a CallError or Finished, if the result alone does not tell it."""

    OTHER = 0
    MISMATCH = 1  # calls that can never meet
    TIMEOUT = 2  # withdrawn
    DIVERGENCE = 3  # content had diverged, and a peer wanted an error in that case
    MEMORY = 4  # a peer ran out of it
    FINISHED = 5  # the run is finished
    REORDERED = 6  # ranks have changed, and nobody is lost


class Called(IntEnum):
    """The kind of call that has failed for all who had made it; a send is a COLLECTIVE too."""

    COLLECTIVE = 0
    SYNC = 1
    OPTIMIZE = 2
    TOPOLOGY = 3
    PENDING = 4
    FINISH = 5


class PeerInfo(Struct, array_like=True, frozen=True):
    """A peer and its addresses: `host`:`port`, and `ipc` on the same `machine`.

    `curve` is the public key by which they authenticate each other; empty without encryption.
    `team` names the peers that it joins together with, `team_size` of them with itself; 0: none.
    `outgoing`: nobody can connect to it, as behind NAT; it connects itself. `relay` is the port at
    which it joins the connections of two such peers; 0: it does not. `others` are further hosts at
    which it may be reached, at the same port.
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

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts at which it may be reached."""
        return self.host, *self.others

    def __str__(self) -> str:
        return f"peer {self.peer} ({address_text(self.host, self.port)})"


class Package(Struct, array_like=True, frozen=True):
    """What leads from version `base` of the weights to `version`; a `base` of 0: from any.

    It has two parts, of so many bytes and with such digests: a head, which describes the tensors,
    and a body. What they mean is nothing to the protocol. `content` is the digest of all tensors of
    that version, however one gets there.
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
        """By which it is told from all others."""
        return self.version, self.base

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.head_bytes + self.body_bytes


Packages = Annotated[tuple[Package, ...], Meta(max_length=PACKAGES_MAX)]
Avoided = Annotated[tuple[U64, ...], Meta(max_length=AVOIDED_MAX)]


class Ring(Struct, array_like=True, frozen=True):
    """One ring: peers in order, each sending to the next; `weight`: its share of the data."""

    order: tuple[U64, ...]
    weight: Weight


Calls = Annotated[tuple[U64, ...], Meta(max_length=RINGS_MAX)]  # of each ring one
Rings = Annotated[tuple[Ring, ...], Meta(max_length=RINGS_MAX)]


class World(Struct, array_like=True, frozen=True):
    """World sizes: accepted peers of the run and of the group, groups, peers of the largest."""

    global_size: U32
    local_size: U32
    groups: U32
    largest: U32


class Part(Struct, array_like=True, frozen=True):
    """One tensor of a collective over several; `name` is its key, if it has one.

    `layout` is the order of its elements in memory (pccl.tensors.layout); empty for C's.
    """

    dtype: U16
    count: U64
    name: Name = ""
    layout: Text = ""

    def __str__(self) -> str:
        what = wording.elements(self.count, self.dtype, self.layout)
        return f"{self.name or 'a tensor'} of {what}"


class Work(Struct, array_like=True, frozen=True):
    """The description of a collective, the same on all peers.

    `algorithm` and `quantized` are values of QuantizationAlgorithm and, if that leaves a choice, of
    DataType. `count`: elements that each member gives; in a reduce_scatter or scatter, receives; in
    an all_to_all, those of a row. `root` is a rank. `members` is the size of the group as the
    caller knows it if ranks matter, or if it decides how the data travels (small.py),
    else 0. `parts` describe a list or dict of tensors; `count` and `dtype` are 0 then. `layout`: as
    in Part. `rows`: of an all_gather to which members give
    different numbers of rows, these by rank; counts are those of a row then. `ring`: where ranks
    matter, the checksum of the order from which the caller has them; 0: it does not say.
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
        return wording.call(self)

    def sees_others_than(self, other: Work) -> bool:
        """Whether both are the same call, by peers that differ on the ranks or on the members."""
        mine, theirs = (self.members, self.ring), (other.members, other.ring)
        both = bool(self.members) == bool(other.members)
        return self.what == other.what and both and mine != theirs

    def difference(self, other: Work) -> str:
        """A difference that the texts of both calls do not show; empty if there is none."""
        return wording.difference(self, other)


class Entry(Struct, array_like=True, frozen=True):
    """One tensor of the shared state, in an offer. `layout`: as in Part.

    An empty `digest` is that of content that is not known, which equals nothing.
    """

    name: Name
    dtype: U16
    count: U64
    any_content: bool
    digest: Annotated[bytes, Meta(max_length=32)]
    layout: Text = ""


class Offer(Struct, array_like=True, frozen=True):
    """A peer's shared state. `strict`: divergence must be an error for all.

    A group's shared state must not begin with fewer than `min_peers` peers. `torn`: part of it was
    overwritten by a transfer that did not end; so it is received, and never offered to others.
    """

    revision: U64
    strategy: U16
    entries: tuple[Entry, ...]
    strict: bool = False
    min_peers: U64 = 0
    torn: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of its content is known."""
        return not self.torn and all(entry.digest for entry in self.entries)

    def overwritten(self, entries: Collection[int]) -> Offer:
        """The offer of the same peer when these entries may have been overwritten since."""
        if not entries:
            return self
        unknown = tuple(
            replace(entry, digest=b"") if index in entries else entry
            for index, entry in enumerate(self.entries)
        )
        return replace(self, entries=unknown, torn=True)


class Difference(Struct, array_like=True, frozen=True):
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


class Divergence(Struct, array_like=True, frozen=True):
    """A peer that had different content at the same revision, in `count` entries; `differences`
    describes the first ones."""

    peer: U64
    count: U32
    differences: Differences


class Done(Struct, array_like=True, frozen=True):
    """The rounds whose results a peer knows: numbers of completed rounds, and the latest results.

    A restarted master compares these: if a peer waits in a round whose result another peer knows,
    it has only missed that result.
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
    finished: bool = False  # the run is finished


class Open(Struct, array_like=True, frozen=True):
    """A collective whose outcome a peer does not know; `vote` is None until it has voted.

    `paired`: the first of two members sends to the second.
    """

    seq: U64
    members: tuple[U64, ...]
    vote: bool | None
    tag: U64 = 0
    paired: bool = False


class Failure(Struct, array_like=True, frozen=True):
    """A call that the master refused, with the same error for all members that had made it.
    `called` is a `Called`; `tag` and `pair` are those of a collective; the rest as in
    CallError.
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
        """Whether it concerns all groups."""
        return self.called not in (Called.COLLECTIVE, Called.SYNC)


class Small(Struct, array_like=True, frozen=True):
    """A committed small collective: its members and its result."""

    seq: U64
    tag: U64
    members: tuple[U64, ...]
    data: Data
