"""Effects of the master's state machine, and the outbox that collects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, dataclass_transform

from msgspec import Struct

from pccl.protocol import messages as m
from pccl.protocol.master.membership import PeerRecord
from pccl.protocol.rounds import Kind, Round, RoundId
from pccl.types import Result


class Refusal(NamedTuple):
    """Why a peer was dropped or cannot come back, and the result and cause for its calls."""

    why: str
    result: Result = Result.RANK_CONNECTION_FAILED
    cause: m.Cause = m.Cause.OTHER


@dataclass_transform(frozen_default=True)
class Effect(Struct, frozen=True):
    """An effect."""


class Send(Effect):
    conn: bytes
    message: m.MasterMessage


class Drop(Effect):
    """Drop a connection: its later messages are ignored. `why` is for the log."""

    conn: bytes
    why: str


class Note(Effect):
    """Log a text for operators; `warns`: as a warning."""

    text: str
    warns: bool = False


class Remember(Effect):
    """Write to the journal that a peer is accepted, before later messages are sent."""

    info: m.PeerInfo


class Forget(Effect):
    """Write to the journal that a peer is gone, and the reason if it was dropped."""

    number: int
    why: Refusal | None = None


class Dial(Effect):
    """Dial a peer at its address, then feed an `inputs.Dialled`."""

    info: m.PeerInfo
    password: str


class Adopt(Effect):
    """Write to the journal the run's number, and how often its master was restarted."""

    run: int
    incarnation: int


WHY_MAX = 2000  # characters of a text that quotes peers; a message holds 4096
CALLED = {
    Kind.START: m.Called.COLLECTIVE,
    Kind.PAIR: m.Called.COLLECTIVE,
    Kind.SYNC: m.Called.SYNC,
    Kind.OPTIMIZE: m.Called.OPTIMIZE,
    Kind.TOPOLOGY: m.Called.TOPOLOGY,
    Kind.PENDING: m.Called.PENDING,
    Kind.FINISH: m.Called.FINISH,
}


def plain(text: str) -> str:
    """Makes a text that may quote peers safe for a log, a terminal and a message."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WHY_MAX else text[:WHY_MAX] + " ..."


class Outbox:
    """Collects effects until they are taken.

    Args:
        peers: the registered peers, by number.
        take_seq: takes the number for a failure that all members receive.
    """

    def __init__(self, peers: Mapping[int, PeerRecord], take_seq: Callable[[], int]) -> None:
        self._peers, self._take_seq = peers, take_seq
        self._effects: list[Effect] = []

    def send(self, number: int, message: m.MasterMessage) -> None:
        self._effects.append(Send(self._peers[number].conn, message))

    def answer(self, round_: Round, make: Callable[[int], m.MasterMessage]) -> None:
        """Sends each voter of a round a message, made from the number of its call."""
        for number, vote in round_.votes.items():
            self.send(number, make(vote.call))

    def fail(
        self, number: int, call: int, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        self.send(number, m.CallError(call, result.value, plain(why), cause))

    def fail_voters(
        self, round_: Round, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Fails the calls of all peers that have voted so far. The others may still vote."""
        for number, call in round_.calls.items():
            self.fail(number, call, result, why, cause)

    def fail_all(
        self,
        calls: Mapping[int, int],
        round_: RoundId,
        result: Result,
        why: str,
        cause: m.Cause = m.Cause.OTHER,
    ) -> None:
        """Tells the members of a round that it has failed, after all had voted. `calls` has their
        calls."""
        failure = self.failure(round_, result, why, cause)
        for number, call in calls.items():
            self.refuse(number, call, failure)

    def failure(
        self, round_: RoundId, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> m.Failure:
        """The failure of a round, to be sent to all its voters.

        A failure has a seq because it is an outcome. Peers that received it tell a restarted
        master, which tells the others. Otherwise these would wait for peers that have gone on.
        """
        seq, called = self._take_seq(), CALLED[round_.kind]
        place = round_.tag or 0, round_.pair or ()
        return m.Failure(seq, called, *place, result.value, plain(why), cause)

    def refuse(self, number: int, call: int, failure: m.Failure) -> None:
        """Tells a peer that its call has failed, together with those of other peers."""
        what = failure.seq, failure.called, failure.tag, failure.pair
        self.send(number, m.CallError(call, failure.result, failure.why, failure.cause, *what))

    def note(self, text: str, warns: bool = False) -> None:
        self._effects.append(Note(plain(text), warns))

    def do(self, *effects: Effect) -> None:
        self._effects += effects

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
