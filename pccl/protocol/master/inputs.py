"""The inputs of a master, as data.

A master's state depends only on its inputs. Another master with the same inputs, from a `Began` on,
makes the same decisions.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from pccl.protocol import messages as m
from pccl.protocol.master.history import Journal


class Began(Struct, frozen=True, tag="began"):
    """A master begins, with these arguments.

    `why` is the reason if it replaces a master of the same process that has lost its peers.
    """

    run: int
    straggler_s: float | None
    journal: Journal | None
    why: str = ""
    small_max: int | None = None  # None: the default


class Hello(Struct, frozen=True, tag="hello"):
    """A peer's first message.

    `unreached` says why a dial did not reach the peer. It is empty if the dial succeeded, or if
    none was made.
    """

    conn: bytes
    message: m.Hello
    host: str  # the address that the master sees
    unreached: str = ""


class Examine(Struct, frozen=True, tag="examine"):
    """A process asks for the result of its `Hello`. `unreached` is None if no dial was made."""

    conn: bytes
    host: str
    unreached: str | None
    unix_s: float


class Resume(Struct, frozen=True, tag="resume"):
    """A peer comes back after a restart of the master."""

    conn: bytes
    message: m.Resume
    host: str


class Received(Struct, frozen=True, tag="received"):
    conn: bytes
    message: m.PeerMessage


class Rejected(Struct, frozen=True, tag="rejected"):
    """A connection has sent bytes that are not a message, or too many messages."""

    conn: bytes
    why: str


class Disconnected(Struct, frozen=True, tag="disconnected"):
    """Connections are lost. Only this shows a peer's death."""

    conns: tuple[bytes, ...]
    why: str


class Dialled(Struct, frozen=True, tag="dialled"):
    """A dial has ended: "": it reached the peer; None: it was not made; else why it failed."""

    peer: int
    why: str | None


class Tick(Struct, frozen=True, tag="tick"):
    now_s: float


class Farewell(Struct, frozen=True, tag="farewell"):
    """The master ends for good."""


Event: TypeAlias = (
    Hello | Examine | Resume | Received | Rejected | Disconnected | Dialled | Tick | Farewell
)
Input: TypeAlias = Began | Event
