"""Effects of an associate's state machine, to be performed in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import (
    AbortOp,
    Arrange,
    CloseStream,
    CommitOp,
    Fail,
    Send,
    StartTransfer,
)


@dataclass(frozen=True, slots=True)
class Door:
    """Admit others by this nonce, under this number."""

    number: int
    nonce: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Connect a stream to an associate, which admits it by the nonce; admit its streams."""

    stream: int
    to: m.PeerInfo
    nonce: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Register an op that serves a package, of which the caller has the memory."""

    op: int
    package: m.Package


@dataclass(frozen=True, slots=True)
class Gather:
    """Register an op that fetches a package; the caller provides the memory."""

    op: int
    package: m.Package


@dataclass(frozen=True, slots=True)
class Arrived:
    """All of a package is here and proven; the caller calls `taken` when it has worked it in."""

    package: m.Package


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A package is served no more; an op that refers to its memory may have to settle yet."""

    package: m.Package


@dataclass(frozen=True, slots=True)
class Rest:
    """Call `rested` after a moment: the next attempt would fail for the same reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A publication has ended; `why` it failed, or empty."""

    call: int
    why: str


@dataclass(frozen=True, slots=True)
class News:
    """What can be had has changed."""

    packages: tuple[m.Package, ...]
    head: int


@dataclass(frozen=True, slots=True)
class Over:
    """It is no associate any more."""

    fail: Fail


Effect: TypeAlias = (
    Send
    | Door
    | Reach
    | CloseStream
    | Offer
    | Gather
    | StartTransfer
    | CommitOp
    | AbortOp
    | Arrived
    | Forgotten
    | Rest
    | Answered
    | News
    | Over
    | Arrange
)
