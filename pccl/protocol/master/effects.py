"""Effects of the master's state machine, to be performed in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pccl.protocol import messages as m
from pccl.types import Result


class Refusal(NamedTuple):
    """Why a peer is out of the run, or cannot come back; the result of its calls, and the cause."""

    why: str
    result: Result = Result.RANK_CONNECTION_FAILED
    cause: m.Cause = m.Cause.OTHER


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection."""

    conn: bytes
    message: m.MasterMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop a connection: its later messages are ignored. `why` is for the log."""

    conn: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Log a text for operators."""

    text: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to the journal that a peer is accepted, before later messages are sent."""

    info: m.PeerInfo


@dataclass(frozen=True, slots=True)
class Forget:
    """Write to the journal that a peer is gone; and why, if it was told so."""

    number: int
    why: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial a peer at its address, and call `dialled` with the result."""

    info: m.PeerInfo
    password: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Write to the journal the run's number, and how often its master was restarted."""

    run: int
    incarnation: int


Effect: TypeAlias = Send | Drop | Note | Remember | Forget | Adopt | Dial
