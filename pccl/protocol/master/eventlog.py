"""The lines of an event log, and their replay.

A line has one input of a master and its effects, without secrets.

The reader of a log cannot take part in the run, or read its data: `Redactor` replaces secrets with
pseudonyms and omits payloads. Equal secrets get equal pseudonyms, so another master that gets the
log's inputs makes the same decisions, as the digests of the effects prove.

The file is runtime/server/eventlog.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.master import effects, inputs
from pccl.protocol.master.effects import Drop, Effect, Note, Send
from pccl.protocol.master.machine import Master
from pccl.support import KEY

T = TypeVar("T")
RUN_BYTES = 7  # any number of a run has 62 bits


class Redactor:
    """Replaces secrets with pseudonyms.

    Args:
        key: the key of the pseudonyms; never store it. None: the input is already redacted, and
            stays unchanged.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def run(self, number: int) -> int:
        if self._key is None:
            return number
        return int.from_bytes(self._hash(b"run %d" % number, RUN_BYTES))

    def event(self, event: inputs.Input) -> inputs.Input:
        """Redacts an input, and omits its payloads; `sizes` gives their sizes."""
        return self._clean(event, lambda data: b"")

    def message(self, message: m.MasterMessage) -> m.MasterMessage:
        """Redacts a message of the master, and replaces data with its size."""
        return self._clean(message, lambda data: b"%d" % len(data))

    def effect(self, effect: Effect) -> Any:
        """Redacts an effect, except for the message of a `Send`."""
        match effect:
            case effects.Remember(info) | effects.Dial(info):
                return self._clean(info, bytes)
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

    def _clean(self, value: T, data: Callable[[bytes], bytes]) -> T:
        """A structure, or several, without secrets, which field names identify."""
        if isinstance(value, tuple):
            return cast(T, tuple(self._clean(each, data) for each in value))
        if not isinstance(value, Struct):
            return value
        changed: dict[str, object] = {}
        for name in _secrets(type(value)):
            before = getattr(value, name)
            match name:
                case "run":
                    changed[name] = self.run(before)
                case "token":
                    changed[name] = self._pseudonym(b"token ", before)
                case "curve" if KEY.fullmatch(before):  # errors quote text that is not a key
                    changed[name] = self._pseudonym(b"key ", before)
                case "nonce":
                    changed[name] = 0
                case "dial":
                    changed[name] = ""
                case "data" if before is not None:
                    changed[name] = data(before)
                case _:
                    changed[name] = self._clean(before, data)
        return replace(value, **changed) if changed else value

    def _pseudonym(self, kind: bytes, text: str) -> str:
        return text if self._key is None else self._hash(kind + text.encode(), len(text) // 2).hex()

    def _hash(self, what: bytes, nbytes: int) -> bytes:
        assert self._key is not None
        return blake2b(what, key=self._key, digest_size=nbytes).digest()


SECRETS = {"run", "token", "curve", "nonce", "dial", "data"}


@functools.cache
def _secrets(kind: type[Struct]) -> tuple[str, ...]:
    """The fields of a structure that are or contain secrets."""
    hints = get_type_hints(kind).items()
    return tuple(n for n, hint in hints if n in SECRETS or any(map(_secrets, _structures(hint))))


def _structures(hint: Any) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structures(inner)


def sizes(event: inputs.Input) -> tuple[int, ...]:
    """The sizes in bytes of the payloads that `Redactor.event` omits."""
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
    """A message that the master sent to some peers."""

    say: str  # the type of the message
    to: tuple[int, ...]  # the numbers of the peers; 0: a process that is not a peer
    calls: tuple[int, ...] = ()  # the number of each peer's call, if the message answers calls
    seq: int = 0  # the number of the collective or synchronization
    final: bool = False  # whether the start of a collective also brings its result
    ok: bool = True  # whether it was a success
    epoch: int = 0  # the epoch of a plan
    rings: tuple[tuple[int, ...], ...] = ()  # the rings of a plan
    holders: tuple[int, ...] = ()  # the peers to fetch from, or to probe
    fetches: int = 0  # how many entries to fetch
    revision: int | None = None  # the revision of the shared state after a synchronization
    why: str = ""  # the reason, in words


class Line(Struct, frozen=True, omit_defaults=True, tag="event"):
    """One input of a master, and its effects."""

    at_s: float  # the time, by the master's clock
    input: inputs.Input  # the input, without secrets
    peer: int = 0  # the peer that it comes from, or that it registers; 0: none
    sizes: tuple[Size, ...] = ()  # bytes of each payload that is left out
    notes: tuple[str, ...] = ()  # the texts that the master logged
    told: tuple[Told, ...] = ()  # the messages that it sent
    gone: tuple[int, ...] = ()  # the peers that it dropped, or that had left
    effects: str = ""  # a digest of all effects, in hexadecimal
    failed: str = ""  # the exception that the input raised


class Gap(Struct, frozen=True, tag="gap"):
    """Takes the place of inputs that could not be written."""

    lost: int
    why: str


class Recorder:
    """Makes the lines of one master's event log, in order.

    Args:
        key: see `Redactor`.
    """

    def __init__(self, key: bytes | None) -> None:
        self._redactor = Redactor(key)
        self._numbers: dict[bytes, int] = {}  # by connection: the peer's number
        self._news = False  # since the last tick
        self._timed = False  # whether anything but a recovery depends on ticks

    def matters(self, event: inputs.Input, recovering: bool, effects: Iterable[Effect]) -> bool:
        """True if an input must be recorded.

        Most ticks change nothing. A log has the ticks with effects and, while a time limit runs,
        the first tick after another input.
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
        """Forgets closed connections. Returns the numbers of their peers."""
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
                if effect.message is not last:  # many peers get the same message
                    last, data = effect.message, m.encode(self._redactor.message(effect.message))
                digest.update(data)
                sent.append((self._numbers.get(effect.conn, 0), effect.message))
        alike = groupby(sent, key=lambda one: _without_call(one[1]))
        told = (_told(say, [*those]) for say, those in alike)
        return told, digest.hexdigest() if effects else ""


def _without_call(message: m.MasterMessage) -> Told:
    """A message without the fields that differ from peer to peer."""
    same = ("seq", "final", "ok", "epoch", "holders", "revision", "why")
    told = {name: getattr(message, name) for name in same if hasattr(message, name)}
    match message:
        case m.Interrupt() | m.CallError() | m.Refused() | m.Kicked():
            told["ok"] = False
        case m.Plan(rings=rings):
            told["rings"] = tuple(ring.order for ring in rings)
        case m.SyncPlan(fetch=fetch):
            told["fetches"] = len(fetch)
        case m.SyncResult(plan=plan, short=short):
            told["seq"], told["ok"] = plan, not short
        case m.Probe(peers=peers):
            told["holders"] = peers
        case m.PendingResult(pending=pending):
            told["ok"] = pending
    return Told(type(message).__name__, (), **told)


def _told(say: Told, those: list[tuple[int, m.MasterMessage]]) -> Told:
    """A message that several peers got, one after the other."""
    to = tuple(number for number, _ in those)
    calls: list[Any] = [getattr(message, "call", None) for _, message in those]
    return msgspec.structs.replace(say, to=to, calls=() if calls[0] is None else tuple(calls))


SECRET = b"of a master without peers"  # its nonces reach nobody


class Differs(Exception):
    """A replayed master acted differently from the log; the text gives the difference."""


class Replay:
    """A master whose inputs are the lines of an event log."""

    def __init__(self) -> None:
        self.master: Master | None = None  # None before the first `Began`, and after `lose`
        self._recorder = Recorder(None)

    def lose(self) -> None:
        """Notes missing lines: later lines cannot be fed until another master begins."""
        self.master = None

    def feed(self, line: Line) -> bool:
        """Feeds one input. Returns False if this is impossible because earlier inputs are missing.

        Raises Differs: the effects differ from the log.
        """
        # a Began with `why` has effects of the previous master, which is missing here
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
        if line.failed == "MemoryError":  # a replay has memory enough; a new master follows
            self.lose()
            return True
        event = refill(line.input, line.sizes)
        again = self._recorder.line(line.at_s, event, effects, failed)  # it learns names, too
        if comparable and (again.effects, again.failed) != (line.effects, line.failed):
            raise Differs(difference(line, again))
        return True

    def happen(self, line: Line) -> list[Effect]:
        """Feeds one input without checks. Raises the master's exceptions."""
        event = refill(line.input, line.sizes)
        if isinstance(event, inputs.Began):
            return self._begin(event)
        assert self.master is not None, "an event log begins with a Began"
        self.master.now_s = line.at_s
        return self.master.feed(event)

    def _begin(self, began: inputs.Began) -> list[Effect]:
        effects: list[Effect] = []
        if began.why and self.master is not None:
            journal, effects = self.master.reborn()
            if journal != began.journal:
                raise Differs(f"the next master began with {began.journal}, and now with {journal}")
        if not began.why:  # a new process
            self._recorder = Recorder(None)
        self.master = Master.began(began, _zeros, SECRET)
        return effects


def lines(text: str) -> list[Line]:
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in text.split("\n") if line]


def exception_text(error: BaseException) -> str:
    return "MemoryError" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


def difference(line: Line, again: Line) -> str:
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


def _zeros(work: m.Spec, parts: Sequence[m.Data]) -> m.Data:
    """Stands in for the reduction: a log has only the sizes of contributions."""
    return bytes(len(parts[0]))
