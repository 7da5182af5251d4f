"""A record of a run: each input of the master and what followed, without secrets; and how another
master does the same again, to compare.

A reader of a record cannot take part in the run, or read its data.
Stand-ins are equal where what they stand for is, so that a master decides by them alike.

A record is enough to have another master do the same again, which the digests of the effects prove,
and to read what has happened. `Redactor` says what it does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.master import effects, inputs
from pccl.protocol.master.effects import Drop, Effect, Note, Send
from pccl.protocol.master.machine import Master
from pccl.support.text import KEY

RUN_BYTES = 7  # any number of a run has 62 bits


class Redactor:
    """Replaces what is secret.

    Args:
        key: from which stand-ins are made; to be kept nowhere. None: everything has been replaced
            already, and stand-ins stay as they are.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def run(self, number: int) -> int:
        """For the number of a run."""
        if self._key is None:
            return number
        return int.from_bytes(self._hash(b"run %d" % number, RUN_BYTES))

    def event(self, event: inputs.Input) -> inputs.Input:
        """For an input: without contributions and results, whose sizes `sizes` has."""
        match event:
            case inputs.Received(_, m.StartVote() as vote) if vote.data is not None:
                return replace(event, message=replace(vote, data=b""))
            case inputs.Received(_, m.RendezvousRequest() as meet):
                return replace(event, message=replace(meet, token=self._token(meet.token)))
            case inputs.Hello(_, hello):
                safe = replace(hello, curve=self._curve(hello.curve), dial="")
                return replace(event, message=safe)
            case inputs.Resume(_, resume):
                safe_resume = replace(
                    resume,
                    run=self.run(resume.run),
                    info=self._info(resume.info),
                    known=self._infos(resume.known),
                    small=tuple(replace(one, data=b"") for one in resume.small),
                    dial="",
                )
                return replace(event, message=safe_resume)
            case inputs.Began(run, _, journal):
                if journal is not None:
                    journal = type(journal)(
                        self.run(journal.run),
                        journal.incarnation,
                        journal.next_peer,
                        journal.accepted,
                        journal.complete,
                        journal.refused,
                    )
                return replace(event, run=self.run(run), journal=journal)
        return event

    def message(self, message: m.MasterMessage) -> m.MasterMessage:
        """For what a master says: of data the size is left, in the place of the data."""
        match message:
            case m.Started(data=data):
                size = None if data is None else b"%d" % len(data)
                return replace(message, data=size, nonce=0)
            case m.Plan(peers=peers):
                return replace(message, peers=self._infos(peers), nonce=0)
            case m.SyncPlan() | m.Probe():
                return replace(message, nonce=0)
            case m.Welcome():
                return replace(message, nonce=0)
            case m.Source(holder=info):
                return replace(message, holder=self._info(info), nonce=0)
            case m.Serve(receiver=info):
                return replace(message, receiver=self._info(info), nonce=0)
            case m.RendezvousJoin(sender=info, token=token):
                return replace(message, sender=self._info(info), token=self._token(token))
            case m.RendezvousResult(token=token, relay=relay):
                relay = None if relay is None else self._info(relay)
                return replace(message, token=self._token(token), relay=relay)
            case m.RendezvousRelay(token, sender, receiver):
                one, other = self._infos((sender, receiver))
                return m.RendezvousRelay(self._token(token), one, other)
            case m.Admitted(run=run):
                return replace(message, run=self.run(run))
            case m.Missed(small=small):
                return replace(message, small=replace(small, data=b"%d" % len(small.data)))
        return message

    def effect(self, effect: effects.Effect) -> Any:
        """For an effect, what is left of it, besides a message."""
        match effect:
            case effects.Remember(info):
                return self._info(info)
            case effects.Dial(info):
                return self._info(info)
            case effects.Adopt(run, incarnation):
                return self.run(run), incarnation
            case effects.Drop(conn, why):
                return conn, why
            case effects.Forget(number, why):
                return number if why is None else (number, *why)
            case effects.Note(text):
                return text
            case effects.Send(conn):
                return conn

    def _info(self, info: m.PeerInfo) -> m.PeerInfo:
        return replace(info, curve=self._curve(info.curve)) if info.curve else info

    def _infos(self, infos: Iterable[m.PeerInfo]) -> tuple[m.PeerInfo, ...]:
        return tuple(map(self._info, infos))

    def _curve(self, key: str) -> str:
        """A pseudonym for a key. Other text stays, because the errors about it quote it."""
        if self._key is None or not KEY.fullmatch(key):
            return key
        return self._hash(b"key " + key.encode(), len(key) // 2).hex()

    def _token(self, token: str) -> str:
        if self._key is None:
            return token
        return self._hash(b"token " + token.encode(), len(token) // 2).hex()

    def _hash(self, what: bytes, nbytes: int) -> bytes:
        assert self._key is not None
        return blake2b(what, key=self._key, digest_size=nbytes).digest()


def sizes(event: inputs.Input) -> tuple[int, ...]:
    """The sizes of the payloads that `Redactor.event` leaves out, in bytes."""
    match event:
        case inputs.Received(_, m.StartVote(data=data)) if data is not None:
            return (len(data),)
        case inputs.Resume(_, resume):
            return tuple(len(one.data) for one in resume.small)
    return ()


def refill(event: inputs.Input, nbytes: Iterable[int]) -> inputs.Input:
    """The event with zeros for its payloads, of these sizes."""
    parts = map(bytes, nbytes)
    match event:
        case inputs.Received(_, m.StartVote() as vote) if vote.data is not None:
            return replace(event, message=replace(vote, data=next(parts, b"")))
        case inputs.Resume(_, resume):
            small = tuple(
                replace(one, data=data) for one, data in zip(resume.small, parts, strict=False)
            )
            return replace(event, message=replace(resume, small=small))
    return event


DIGEST_BYTES = 8

Size: TypeAlias = Annotated[int, Meta(ge=0, le=m.INLINE_BYTES_MAX)]


class Told(Struct, frozen=True, omit_defaults=True):
    """A message that the master sent to some peers.

    Attributes:
        say: the type of the message.
        to: the numbers of the peers; 0 for a process that is none.
        calls: of each of these, the number of its call, if the message answers calls.
        seq: of a collective or a synchronization.
        final: whether a collective is over that has just started.
        ok: whether it was a success.
        epoch: of a plan.
        rings: of a plan.
        holders: of a transfer: who has what is fetched.
        fetches: how many entries of a transfer are fetched.
        revision: of the shared state, after a synchronization.
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
        peer: that it comes from, or that it registers; 0: none.
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
        key: see `Redactor`.
    """

    def __init__(self, key: bytes | None) -> None:
        self._redactor = Redactor(key)
        self._numbers: dict[bytes, int] = {}  # of peers, by connection
        self._news = False  # since the last tick
        self._timed = False  # whether anything depends on ticks, but for a recovery

    def matters(self, event: inputs.Input, recovering: bool, effects: Iterable[Effect]) -> bool:
        """True if an input must be recorded.

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
        if isinstance(event, inputs.Began):
            self._timed, self._news = event.straggler_s is not None, True
        self._learn(event, effects)
        peer = self._numbers.get(getattr(event, "conn", b""), 0)
        told, digest = self._describe(effects)
        return Line(
            at_s,
            self._redactor.event(event),
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
        """The messages by receiver, and the digest of all effects."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        last: m.MasterMessage | None = None
        data = b""
        sent: list[tuple[int, m.MasterMessage]] = []
        for effect in effects:
            left = self._redactor.effect(effect)
            digest.update(msgspec.msgpack.encode((type(effect).__name__, left)))
            if isinstance(effect, Send):
                if effect.message is not last:  # many peers are told the same
                    last, data = effect.message, m.encode(self._redactor.message(effect.message))
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


SECRET = b"of a master without peers"


class Differs(Exception):
    """The master did something else this time; the text says what."""


class Reenactment:
    """A master that is fed the lines of a record.

    Attributes:
        master: None before the first `Began`, and after `lose`.
    """

    def __init__(self) -> None:
        self.master: Master | None = None
        self._recorder = Recorder(None)

    def lose(self) -> None:
        """The next lines are missing: what follows cannot be fed until a master begins again."""
        self.master = None

    def feed(self, line: Line) -> bool:
        """Has one input happen again. False if it cannot, because earlier ones are missing.

        Raises:
            Differs: the effects are not those of the record.
        """
        # of a master that is not known, it is not known what it said last
        comparable = self.master is not None or not getattr(line.input, "why", "")
        failed = ""
        effects: list[Effect] = []
        try:
            if self.master is None and not isinstance(line.input, inputs.Began):
                return False
            effects = self.happen(line)
        except Differs:
            raise
        except Exception as error:
            failed = exception_text(error)
        if line.failed == "MemoryError":  # which does not come again; a new master follows
            self.lose()
            return True
        event = refill(line.input, line.sizes)
        again = self._recorder.line(line.at_s, event, effects, failed)  # its names change, too
        if comparable and (again.effects, again.failed) != (line.effects, line.failed):
            raise Differs(difference(line, again))
        return True

    def happen(self, line: Line) -> list[Effect]:
        """Has one input happen again, whatever follows. Raises what that raises."""
        event = refill(line.input, line.sizes)
        if isinstance(event, inputs.Began):
            return self._begin(event)
        assert self.master is not None, "a record begins with a Began"
        self.master.now_s = line.at_s
        return inputs.feed(self.master, event)

    def _begin(self, began: inputs.Began) -> list[Effect]:
        effects: list[Effect] = []
        if began.why and self.master is not None:
            journal, effects = self.master.reborn()
            if journal != began.journal:
                raise Differs(f"the next master began with {began.journal}, and now with {journal}")
        if not began.why:  # in a process of its own
            self._recorder = Recorder(None)
        self.master = inputs.begin(began, _zeros, SECRET)
        return effects


def lines(text: str) -> list[Line]:
    """Lines of a record, as an event log has them."""
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in text.split("\n") if line]


def exception_text(error: BaseException) -> str:
    """How a record names an exception."""
    return "MemoryError" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


def difference(line: Line, again: Line) -> str:
    """Where two lines of the same input differ, in words."""
    if line.failed != again.failed:
        return f"it failed with {line.failed or 'nothing'!r}, and now with {again.failed!r}"
    for what in ("notes", "told"):
        before, after = getattr(line, what), getattr(again, what)
        for one, other in zip(before, after, strict=False):
            if one != other:
                return f"before: {one}; now: {other}"
        if len(before) != len(after):
            return f"{what} before: {before}; now: {after}"
    return f"the effects had the digest {line.effects}, and now {again.effects}"


def _zeros(work: m.Spec, parts: Sequence[bytes]) -> bytes:
    """In place of the reduction: a record has the sizes of contributions only."""
    return bytes(len(parts[0]))
