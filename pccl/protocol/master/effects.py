"""What the master's state machine wants done: effects, to be performed in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pccl.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection."""

    conn: bytes
    message: m.MasterMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a connection: nothing that still comes from it counts. `why` is for the log."""

    conn: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator wants to read in the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to the journal that this peer is accepted, before anything that follows is sent."""

    info: m.PeerInfo


@dataclass(frozen=True, slots=True)
class Forget:
    """Write to the journal that a peer is gone."""

    number: int


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial a peer where it listens; `dialled` is to be called with what came of it."""

    info: m.PeerInfo
    password: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Write to the journal which run this is, and how often its master has begun anew."""

    run: int
    incarnation: int


Effect: TypeAlias = Send | Drop | Note | Remember | Forget | Adopt | Dial
