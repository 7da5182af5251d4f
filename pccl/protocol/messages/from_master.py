"""Messages from the master to a peer."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from pccl.protocol.messages.values import (
    U16,
    U32,
    U64,
    Calls,
    Data,
    Divergence,
    Done,
    Failure,
    Hosts,
    Lanes,
    Name,
    Packages,
    Pair,
    PeerInfo,
    Rings,
    Small,
    Text,
    Token,
    World,
)


class Welcome(Struct, array_like=True, frozen=True, tag=64):
    """The peer is registered, and pending until `Admitted`. `warning` is for its user.

    An associate is never admitted. By the `nonce` others admit themselves to its streams.
    """

    peer: U64
    warning: Text = ""
    nonce: U64 = 0


class Refused(Struct, array_like=True, frozen=True, tag=65):
    """The answer to a Hello or Resume that is refused; `cause` as in Kicked."""

    result: U16
    why: Text
    cause: U16 = 0


class Plan(Struct, array_like=True, frozen=True, tag=66):
    """The group's peers and rings from now on. A new epoch means new streams.

    `topology` counts the rounds of `update_topology` so far. By the `nonce` peers admit each
    other's streams.
    """

    epoch: U32
    peers: tuple[PeerInfo, ...]
    rings: Rings
    topology: U64
    nonce: U64 = 0


class WorldSizes(Struct, array_like=True, frozen=True, tag=67):
    """The world sizes from now on."""

    world: World


class Admitted(Struct, array_like=True, frozen=True, tag=68):
    """A pending peer is accepted into `run`. `done` counts the rounds before its time, to which
    everything up to the seq `heard` belongs.

    The run's number distinguishes bulk data of other runs, and allows a peer to come back to a
    restarted master. So only members of the run are told.
    """

    run: U64
    done: Done
    heard: U64 = 0


class TopologyResult(Struct, array_like=True, frozen=True, tag=69):
    """`update_topology` or `finish` is done; it was the run's `round`-th of both."""

    call: U64
    round: U64


class PendingResult(Struct, array_like=True, frozen=True, tag=70):
    """The answer to `are_peers_pending`, the same for all; it was the run's `round`-th."""

    call: U64
    pending: bool
    round: U64


class Started(Struct, array_like=True, frozen=True, tag=71):
    """All members have entered the collective, which starts on the rings of `epoch`.

    If the contributions came with the votes, `data` is the result; if it is `final`, the collective
    has committed. All peers have all results up to `stable`.

    `calls`: of each ring, the call of this peer's predecessor, which may have sent data before it
    heard of the start.
    """

    call: U64
    seq: U64
    epoch: U32
    data: Data | None = None
    final: bool = False
    stable: U64 = 0
    nonce: U64 = 0
    calls: Calls = ()


class Interrupt(Struct, array_like=True, frozen=True, tag=72):
    """The collective may never complete: the peer must stop, and vote whether it has the result."""

    seq: U64
    why: Text


class Finished(Struct, array_like=True, frozen=True, tag=73):
    """The outcome of a collective; `cause` is the `Cause` of a failure."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class SyncPlan(Struct, array_like=True, frozen=True, tag=74):
    """Which peers send which entries to which.

    Serve the peers `serve`; fetch the entries `fetch` from `holders` and verify `digests`.
    Supersedes an earlier plan of the same call. `diverged`: this peer has other content at the same
    revision; say how it differs. `in_place`: its own content is worth nothing any more, so it is
    overwritten while the other content arrives.
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


class SyncResult(Struct, array_like=True, frozen=True, tag=75):
    """All receivers have the elected content and may keep it; the shared state is at `revision`.

    This was the run's `round`-th synchronisation; `plan` is the seq of its last plan, if any. A
    peer that has offered a higher revision was refused, and took no part.

    If `short` is not 0, nothing was synchronised: the shared state must begin with that many peers,
    and the group has fewer.
    """

    call: U64
    revision: U64
    round: U64
    plan: U64
    divergence: tuple[Divergence, ...] = ()
    short: U64 = 0


class CallError(Struct, array_like=True, frozen=True, tag=76):
    """A call failed before anything happened; `result` is a pccl.Result, `cause` a `Cause`.

    `seq` is not 0 if all members get this error that have made the call: a restarted master must
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


class Resumed(Struct, array_like=True, frozen=True, tag=78):
    """The master knows the run again; `done` describes the rounds that are over.

    A peer that waits in one of these gets its result by this message; it votes anew in all others.
    """

    done: Done


class Missed(Struct, array_like=True, frozen=True, tag=79):
    """A small collective in which the peer waits has committed, but the result was lost."""

    small: Small


class Failed(Struct, array_like=True, frozen=True, tag=87):
    """A call has failed for all who had made it.

    If that was under an earlier master, which could not say so, the peer may still wait in it. Else
    it is another one than this peer's, which has failed for the same reason.
    """

    failure: Failure


class Report(Struct, array_like=True, frozen=True, tag=80):
    """The answer to Examine.

    `host` is the address that the master sees; `unreached` says why it could not reach the peer
    there, and is empty if it could, or has not `dialled`. `unix_s` is the master's clock.
    `arithmetic` is that of the run's peers; `peers` is their number.
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
    """The peer must measure the rate from `peers`, while they may measure it; it sends `Measured`.

    Supersedes an earlier probe of the same call.
    """

    call: U64
    seq: U64
    peers: tuple[U64, ...]
    nonce: U64 = 0


class OptimizeResult(Struct, array_like=True, frozen=True, tag=82):
    """`optimize_topology` is done, and rings are chosen; it was the run's `round`-th."""

    call: U64
    round: U64


class Waiting(Struct, array_like=True, frozen=True, tag=83):
    """The answer to Inquire: what the call waits for."""

    call: U64
    why: Text


class Come(Struct, array_like=True, frozen=True, tag=84):
    """The peer must connect to a stream of `sender`, `lanes` times, at a host; see Meet."""

    sender: PeerInfo
    token: Token
    host: Name
    port: U16
    lanes: Lanes
    others: Hosts = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts at which the two may meet."""
        return self.host, *self.others


class Met(Struct, array_like=True, frozen=True, tag=85):
    """The answer to a Meet without a port: where the two meet, which is at `relay`; or `why` they
    cannot."""

    token: Token
    relay: PeerInfo | None = None
    why: Text = ""


class Relay(Struct, array_like=True, frozen=True, tag=86):
    """The peer must join the connections of these two that name the token; see Meet."""

    token: Token
    sender: PeerInfo
    receiver: PeerInfo


class Kicked(Struct, array_like=True, frozen=True, tag=77):
    """The peer is dropped from the run; `cause` is the `Cause` for its calls that wait."""

    result: U16
    why: Text
    cause: U16 = 0


class Published(Struct, array_like=True, frozen=True, tag=100):
    """The version of a Publish can be had by others."""

    call: U64


class Available(Struct, array_like=True, frozen=True, tag=101):
    """All packages of weights that can be had from now on; `head` is the newest version ever."""

    packages: Packages
    head: U64


class Source(Struct, array_like=True, frozen=True, tag=102):
    """An associate that seeks this package fetches it from `holder`, where it has that `slot`.

    By the `nonce` the holder admits its stream.
    """

    version: U64
    base: U64
    holder: PeerInfo
    nonce: U64
    slot: U32


class Serve(Struct, array_like=True, frozen=True, tag=103):
    """An associate serves this package to `receiver`; otherwise as Source."""

    version: U64
    base: U64
    receiver: PeerInfo
    nonce: U64
    slot: U32


class Served(Struct, array_like=True, frozen=True, tag=104):
    """The associate `receiver` fetches nothing from this one any more."""

    receiver: U64


MasterMessage: TypeAlias = (
    Welcome
    | Refused
    | Plan
    | WorldSizes
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
    | Failed
    | Report
    | Probe
    | OptimizeResult
    | Come
    | Met
    | Relay
    | Published
    | Available
    | Source
    | Serve
    | Served
)
