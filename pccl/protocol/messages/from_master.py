"""What the master says to a peer."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from pccl.protocol.messages.values import (
    U16,
    U32,
    U64,
    Data,
    Divergence,
    Done,
    Name,
    PeerInfo,
    Rings,
    Small,
    Text,
    World,
)


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


class WorldSizes(Struct, array_like=True, frozen=True, tag=67):
    """The world sizes from now on."""

    world: World


class Admitted(Struct, array_like=True, frozen=True, tag=68):
    """To a pending peer: accepted into `run`. `done` counts the rounds that were before its time.

    By this number bulk data of other runs is told apart, and a peer that knows it may come back to
    a restarted master: so only members of the run hear it.
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

    If the contributions came with the votes, `data` is the result; if it is `final`, it has
    committed. No peer lacks any result up to `stable`.
    """

    call: U64
    seq: U64
    epoch: U32
    data: Data | None = None
    final: bool = False
    stable: U64 = 0
    nonce: U64 = 0


class Interrupt(Struct, array_like=True, frozen=True, tag=72):
    """The collective may never complete: stop, and vote on whether this peer holds the result."""

    seq: U64
    why: Text


class Finished(Struct, array_like=True, frozen=True, tag=73):
    """The one outcome of a collective; `cause` is a `Cause`, of a failure."""

    seq: U64
    ok: bool
    why: Text = ""
    cause: U16 = 0


class SyncPlan(Struct, array_like=True, frozen=True, tag=74):
    """Which peers send which entries to which.

    Serve the peers `serve`; fetch the entries `fetch` from `holders` and verify `digests`.
    Supersedes an earlier plan of the same call. `diverged`: this peer has other content at the same
    revision; say how it differs.
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

    If `short` is not 0 nothing was synchronised: the shared state is to begin with so many peers,
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

    `seq` is not 0 if it had begun all the same, under an earlier master that could not tell this
    peer.
    """

    call: U64
    result: U16
    why: Text
    cause: U16 = 0
    seq: U64 = 0


class Resumed(Struct, array_like=True, frozen=True, tag=78):
    """The master knows the run again; `done` are its rounds that are over.

    A peer that stands in one of these has its result by this message; it votes anew in all others.
    """

    done: Done


class Missed(Struct, array_like=True, frozen=True, tag=79):
    """A small collective in which the peer stands has committed; the result did not reach it."""

    small: Small


class Report(Struct, array_like=True, frozen=True, tag=80):
    """The answer to Examine.

    `host` is the address that the master sees, `unreached` why it could not reach the peer there;
    empty if it could, or has not `dialled`. `unix_s` is the master's clock. `arithmetic` is that of
    the run's peers; `peers` is their number.
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
    """Measure what comes from `peers`, which do the same the other way; answer with `Measured`.

    Supersedes an earlier probe of the same call.
    """

    call: U64
    seq: U64
    peers: tuple[U64, ...]
    nonce: U64 = 0


class OptimizeResult(Struct, array_like=True, frozen=True, tag=82):
    """`optimize_topology` is done, and the rings are chosen; it was the `round`-th."""

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
    | Report
    | Probe
    | OptimizeResult
)
