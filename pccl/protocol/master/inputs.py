"""The inputs of a master, as data.

A master's state depends only on its inputs. Another master that gets the same inputs, from a
`Began` on, does the same.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from pccl.protocol import messages as m
from pccl.protocol.master.collectives import Combine
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.history import Journal
from pccl.protocol.master.machine import Master


class Began(Struct, frozen=True, tag="began"):
    """A master begins, with these arguments.

    `why` is the reason if it replaces a master of the same process, which has lost its peers.
    """

    run: int
    straggler_s: float | None
    journal: Journal | None
    why: str = ""
    small_max: int | None = None  # None: the default


class Hello(Struct, frozen=True, tag="hello"):
    conn: bytes
    message: m.Hello
    host: str
    unreached: str = ""


class Examine(Struct, frozen=True, tag="examine"):
    conn: bytes
    host: str
    unreached: str | None
    unix_s: float


class Resume(Struct, frozen=True, tag="resume"):
    conn: bytes
    message: m.Resume
    host: str


class Received(Struct, frozen=True, tag="received"):
    conn: bytes
    message: m.PeerMessage


class Rejected(Struct, frozen=True, tag="rejected"):
    conn: bytes
    why: str


class Disconnected(Struct, frozen=True, tag="disconnected"):
    """Master.all_disconnected."""

    conns: tuple[bytes, ...]
    why: str


class Dialled(Struct, frozen=True, tag="dialled"):
    peer: int
    why: str | None


class Tick(Struct, frozen=True, tag="tick"):
    now_s: float


class Farewell(Struct, frozen=True, tag="farewell"):
    """Master.farewell."""


Event: TypeAlias = (
    Hello | Examine | Resume | Received | Rejected | Disconnected | Dialled | Tick | Farewell
)
Input: TypeAlias = Began | Event


def begin(began: Began, combine: Combine, secret: bytes) -> Master:
    """Makes the master that begins with this input."""
    master = Master(began.run, combine, began.straggler_s, began.journal, secret=secret)
    if began.small_max is not None:
        master.run.collectives.small_max = began.small_max
    return master


def feed(master: Master, event: Event) -> list[Effect]:
    """Feeds an event to a master. Returns the effects, to be performed in order."""
    match event:
        case Received():  # by far the most
            return master.received(event.conn, event.message)
        case Tick():
            return master.tick(event.now_s)
        case Hello():
            return master.hello(event.conn, event.message, event.host, event.unreached)
        case Resume():
            return master.resume(event.conn, event.message, event.host)
        case Disconnected():
            return master.all_disconnected([*event.conns], event.why)
        case Rejected():
            return master.rejected(event.conn, event.why)
        case Dialled():
            return master.dialled(event.peer, event.why)
        case Examine():
            return master.examine(event.conn, event.host, event.unreached, event.unix_s)
        case Farewell():
            return master.farewell()
