"""What a record of a run must not tell: payloads, passwords, keys, nonces, the run's number.

Whoever reads a record learns nothing by which it could take part in the run, or read its data.
Stand-ins are equal where what they stand for is, so that a master decides by them alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.master import effects, inputs
from pccl.support.text import KEY

RUN_BYTES = 7  # any number of a run has 62 bits


class Veil:
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
            case inputs.Received(_, m.Meet() as meet):
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
            case m.Come(sender=info, token=token):
                return replace(message, sender=self._info(info), token=self._token(token))
            case m.Met(token=token, relay=relay):
                relay = None if relay is None else self._info(relay)
                return replace(message, token=self._token(token), relay=relay)
            case m.Relay(token, sender, receiver):
                one, other = self._infos((sender, receiver))
                return m.Relay(self._token(token), one, other)
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
        """What is no key stays, because the errors about it quote it."""
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
    """The sizes of the payloads that `Veil.event` leaves out, in bytes."""
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
