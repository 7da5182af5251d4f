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
