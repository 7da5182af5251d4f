"""What a record of a run says of each input of its master, and of what followed.

A record is enough to have another master do the same again, which the digests of the effects prove,
and to read what has happened. veil.py says what it does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.effects import Drop, Effect, Note, Send
from pccl.protocol.master.veil import Veil, sizes

DIGEST_BYTES = 8

Size: TypeAlias = Annotated[int, Meta(ge=0, le=m.INLINE_BYTES_MAX)]


class Told(Struct, frozen=True, omit_defaults=True):
    """What the master told some peers.

    Attributes:
        say: the type of the message.
        to: the numbers of the peers; 0 for a process that is none.
        calls: of each of these, the number of its call, if the message answers calls.
        seq: of a collective or a synchronisation.
        final: whether a collective is over that has just started.
        ok: whether it was a success.
        epoch: of a plan.
        rings: of a plan.
        holders: of a transfer: who has what is fetched.
        fetches: how many entries of a transfer are fetched.
        revision: of the shared state, after a synchronisation.
        why: the reason, or who is probed, in words.
    """

    say: str
    to: tuple[int, ...]
    calls: tuple[int, ...] = ()
    seq: int = 0
    final: bool = False
    ok: bool = True
    epoch: int = 0
    rings: tuple[tuple[int, ...], ...] = ()
    holders: tuple[int, ...] = ()
    fetches: int = 0
    revision: int | None = None
    why: str = ""


class Line(Struct, frozen=True, omit_defaults=True, tag="event"):
    """One input of a master, and what followed.

    Attributes:
        at_s: when, by the master's clock.
        input: without what is secret.
        peer: that it comes from, or that it admits to the run's door; 0: none.
        sizes: bytes of each payload that is left out.
        notes: what the master's log says.
        told: what it told whom.
        gone: peers that it dropped, or that had left.
        effects: a digest of all effects, in hexadecimal.
        failed: the exception that ended it.
    """

    at_s: float
    input: inputs.Input
    peer: int = 0
    sizes: tuple[Size, ...] = ()
    notes: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()
    gone: tuple[int, ...] = ()
    effects: str = ""
    failed: str = ""


class Gap(Struct, frozen=True, tag="gap"):
    """Inputs that are not here, because they could not be written."""

    lost: int
    why: str


class Recorder:
    """Makes the lines of one master's record, in order.

    Args:
        key: see `Veil`.
    """

    def __init__(self, key: bytes | None) -> None:
        self._veil = Veil(key)
        self._numbers: dict[bytes, int] = {}  # of peers, by connection
        self._news = False  # since the last tick
        self._timed = False  # whether anything depends on ticks, but for a recovery

    def matters(self, event: inputs.Input, recovering: bool, effects: Iterable[Effect]) -> bool:
        """Whether an input, to a master that was recovering or not, must be recorded.

        Of the ticks between two other inputs only the first one changes anything, if a time limit
        runs, and the one that has effects.
        """
        if not isinstance(event, inputs.Tick):
            self._news = True
            message = event.message if isinstance(event, inputs.Received) else None
            if isinstance(message, m.PendingVote) and message.enough:
                self._timed = True
            return True
        first, self._news = self._news and (self._timed or recovering), False
        return first or bool(effects)

    def line(
        self, at_s: float, event: inputs.Input, effects: list[Effect], failed: str = ""
    ) -> Line:
        """What to record of an input."""
        if isinstance(event, inputs.Began):
            self._timed, self._news = event.straggler_s is not None, True
        self._learn(event, effects)
        peer = self._numbers.get(getattr(event, "conn", b""), 0)
        told, digest = self._describe(effects)
        return Line(
            at_s,
            self._veil.event(event),
            peer,
            sizes(event),
            tuple(effect.text for effect in effects if isinstance(effect, Note)),
            tuple(told),
            self._forget(event, effects),
            digest,
            failed,
        )

    def _learn(self, event: inputs.Input, effects: Iterable[Effect]) -> None:
        if isinstance(event, inputs.Resume):
            self._numbers[event.conn] = event.message.info.peer
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, m.Welcome):
                self._numbers[effect.conn] = effect.message.peer

    def _forget(self, event: inputs.Input, effects: Iterable[Effect]) -> tuple[int, ...]:
        """Forgets the connections that are over; the numbers of their peers."""
        over = [effect.conn for effect in effects if isinstance(effect, Drop)]
        if isinstance(event, inputs.Disconnected):
            over += event.conns
        numbers = [self._numbers.pop(conn, 0) for conn in over]
        return tuple(number for number in numbers if number)

    def _describe(self, effects: list[Effect]) -> tuple[Iterator[Told], str]:
        """What was told to whom, and the digest of all effects."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        last: m.MasterMessage | None = None
        data = b""
        sent: list[tuple[int, m.MasterMessage]] = []
        for effect in effects:
            left = self._veil.effect(effect)
            digest.update(msgspec.msgpack.encode((type(effect).__name__, left)))
            if isinstance(effect, Send):
                if effect.message is not last:  # many peers are told the same
                    last, data = effect.message, m.encode(self._veil.message(effect.message))
                digest.update(data)
                sent.append((self._numbers.get(effect.conn, 0), effect.message))
        alike = groupby(sent, key=lambda one: _without_call(one[1]))
        told = (_told(say, [*those]) for say, those in alike)
        return told, digest.hexdigest() if effects else ""


def _without_call(message: m.MasterMessage) -> Told:
    """A message without what differs from peer to peer."""
    name = type(message).__name__
    match message:
        case m.Started(_, seq, epoch, _, final):
            return Told(name, (), seq=seq, epoch=epoch, final=final)
        case m.Finished(seq, ok, why):
            return Told(name, (), seq=seq, ok=ok, why=why)
        case m.Interrupt(seq, why):
            return Told(name, (), seq=seq, ok=False, why=why)
        case m.CallError(_, _, why, _, seq):
            return Told(name, (), seq=seq, ok=False, why=why)
        case m.Refused(_, why) | m.Kicked(_, why):
            return Told(name, (), ok=False, why=why)
        case m.Plan(epoch, _, rings):
            return Told(name, (), epoch=epoch, rings=tuple(ring.order for ring in rings))
        case m.SyncPlan(_, seq, _, holders, fetch):
            return Told(name, (), seq=seq, holders=holders, fetches=len(fetch))
        case m.SyncResult(_, revision, _, plan, _, short):
            return Told(name, (), seq=plan, revision=revision, ok=not short)
        case m.Probe(_, seq, peers):
            return Told(name, (), seq=seq, holders=peers)
        case m.PendingResult(_, pending):
            return Told(name, (), ok=pending)
        case m.Waiting(_, why):
            return Told(name, (), why=why)
    return Told(name, ())


def _told(say: Told, those: list[tuple[int, m.MasterMessage]]) -> Told:
    """A message that several got, one after the other."""
    to = tuple(number for number, _ in those)
    calls: list[Any] = [getattr(message, "call", None) for _, message in those]
    return msgspec.structs.replace(say, to=to, calls=() if calls[0] is None else tuple(calls))
