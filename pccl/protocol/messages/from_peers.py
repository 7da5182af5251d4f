"""Messages from a peer to the master."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from pccl.protocol.messages.values import (
    U16,
    U32,
    U64,
    Avoided,
    Data,
    Differences,
    Done,
    Failure,
    Hosts,
    Lanes,
    Name,
    Offer,
    Open,
    Package,
    Packages,
    Pair,
    PeerInfo,
    Rings,
    Rows,
    Small,
    Text,
    Token,
    Work,
)


class Hello(Struct, array_like=True, frozen=True, tag=1):
    """Asks to join. `host` is the address to advertise; empty: the one that the master sees.

    In a run with keys, `curve` is the public key of the peer's streams; without keys, `dial` is the
    password with which the master may dial the peer. `team` and `team_size`: as in `PeerInfo`.

    An `associate` is no peer: it publishes or follows weights, and has no part in any round.
    `outgoing`, `relay` and `others`: as in `PeerInfo`.
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
    associate: bool = False
    outgoing: bool = False
    relay: U16 = 0
    others: Hosts = ()


class TopologyVote(Struct, array_like=True, frozen=True, tag=2):
    """Enters `update_topology`, or `finish`, which admits nobody any more."""

    call: U64
    finish: bool = False


class PendingVote(Struct, array_like=True, frozen=True, tag=3):
    """Enters `are_peers_pending`. `stuck`: this peer cannot enter another call until it returns.

    When all voters are `patient`, the answer waits until a peer is pending. When `enough` members
    of the peer's group have entered and `grace_ms` have passed, those that have not are dropped;
    with 0 `enough`, this peer waits for all, and does not count.
    """

    call: U64
    stuck: bool = False
    patient: bool = False
    enough: U32 = 0
    grace_ms: U32 = 0


class Hurry(Struct, array_like=True, frozen=True, tag=16):
    """A patient caller of `are_peers_pending` wants the answer now, even if it is no."""

    call: U64


class Inquire(Struct, array_like=True, frozen=True, tag=17):
    """Asks what `call` is waiting for. `seq`: that of a collective that has started, or 0."""

    call: U64
    seq: U64 = 0


class StartVote(Struct, array_like=True, frozen=True, tag=4):
    """Enters a collective: the peer's engine knows the buffers, or `data` is the contribution.

    `heard` is the greatest seq that the peer has heard of; it has all results up to that one.
    `stuck`: as in `PendingVote`. `gives` and `takes`: how many rows of an all_to_all are for each
    rank, and from each; empty: one each. `pair` is not empty in a send: who sends to whom.
    """

    call: U64
    tag: U64
    work: Work
    data: Data | None = None
    heard: U64 = 0
    stuck: bool = False
    gives: Rows = ()
    takes: Rows = ()
    pair: Pair = ()


class FinishVote(Struct, array_like=True, frozen=True, tag=5):
    """Says that the peer holds the whole result of a collective; if not, `why`, and the `Cause`."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class Progress(Struct, array_like=True, frozen=True, tag=18):
    """Says how much of a long collective, or of its fetch of shared state, a peer has done.

    In thousandths. Only whoever watches the run hears of it.
    """

    seq: U64
    done: U16


class SyncVote(Struct, array_like=True, frozen=True, tag=6):
    """Enters `sync_shared_state`; the peer's engine already serves the offered content.

    `holds`: as in Done, of the latest synchronisation of its group. A caller that left before it
    heard of the result holds nothing, whatever the master has answered.
    """

    call: U64
    offer: Offer
    holds: bool = True


class FetchedVote(Struct, array_like=True, frozen=True, tag=7):
    """Says whether a receiver of shared state has fetched and verified all of it.

    `differences` describes how its content differed before, if the plan asks for that.
    """

    seq: U64
    ok: bool
    why: Text = ""
    differences: Differences = ()


class Leave(Struct, array_like=True, frozen=True, tag=8):
    """Leaves the run."""


class Withdraw(Struct, array_like=True, frozen=True, tag=9):
    """The caller's time is up: withdraws the vote of `call`, if it has not ended yet.

    `seq` is that of a collective which this peer has completed and others have not; 0 otherwise.
    """

    call: U64
    seq: U64 = 0


class Unreached(Struct, array_like=True, frozen=True, tag=11):
    """In `epoch`, no stream to `peer` could be opened, for the reason `why`."""

    peer: U64
    epoch: U32
    why: Text = ""


class Meet(Struct, array_like=True, frozen=True, tag=19):
    """Asks that the `outgoing` peer `peer` connects to a stream from this peer, `lanes` times.

    They meet at `port` of this peer; 0: it is `outgoing` itself. By the `token` the meeting point
    knows who belongs together.
    """

    peer: U64
    token: Token
    port: U16
    lanes: Lanes


class Stalled(Struct, array_like=True, frozen=True, tag=15):
    """The peer cannot forward data for which others may wait forever.

    In `epoch` it has lost the stream to a neighbour, or failed otherwise, after it held the whole
    result of a collective. If `seq` is not 0, it cannot serve everything that the plan of that
    number requires.
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
    others: Hosts = ()


class OptimizeVote(Struct, array_like=True, frozen=True, tag=13):
    """Enters `optimize_topology`; the peer's engine already serves data to measure links with."""

    call: U64


class Measured(Struct, array_like=True, frozen=True, tag=14):
    """The result of a probe of the links to this peer.

    `rate` is in bytes per second, 0 if nothing arrived. `delay_us` is the time until the first
    bytes, including that to connect.
    """

    seq: U64
    rate: U64
    delay_us: U64


class Resume(Struct, array_like=True, frozen=True, tag=10):
    """An accepted peer comes back to a master that has lost its connections: all that it knows.

    `known` are the peers of its group, `open` and `finished` its collectives without and with a
    known outcome (the latest ones: all peers know the older ones), `small` the results that others
    may lack, `rings` those of the last Plan, `failed` the latest failures that others may lack.
    `veteran`: it has completed a collective or synchronisation in this run.
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


class Publish(Struct, array_like=True, frozen=True, tag=40):
    """An associate publishes a version of the weights, and serves it already."""

    call: U64
    packages: Annotated[tuple[Package, ...], Meta(min_length=1, max_length=2)]


class Holds(Struct, array_like=True, frozen=True, tag=41):
    """All packages that an associate serves, and the version of the weights that it has."""

    packages: Packages
    version: U64


class Seek(Struct, array_like=True, frozen=True, tag=42):
    """An associate wants this package, but from none of `avoid`; in the place of any earlier one.

    The holder from which it was fetching until now has failed, if it had one.
    """

    version: U64
    base: U64
    avoid: Avoided = ()


class Got(Struct, array_like=True, frozen=True, tag=43):
    """An associate has the package that it sought, and proven; it came at so many bytes/s."""

    rate: U64


class Slow(Struct, array_like=True, frozen=True, tag=44):
    """What an associate fetches takes long: others need not wait for its place at the holder."""


PeerMessage: TypeAlias = (
    Hello
    | TopologyVote
    | PendingVote
    | Hurry
    | Inquire
    | StartVote
    | FinishVote
    | Progress
    | SyncVote
    | FetchedVote
    | Leave
    | Withdraw
    | Unreached
    | Meet
    | Stalled
    | Examine
    | OptimizeVote
    | Measured
    | Resume
    | Publish
    | Holds
    | Seek
    | Got
    | Slow
)
