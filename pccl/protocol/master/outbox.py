"""The effects of one event, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Effect, Note, Send
from pccl.protocol.master.membership import PeerRecord
from pccl.protocol.master.recovery import Numbers
from pccl.protocol.rounds import Kind, Round, RoundId
from pccl.types import Result

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
        numbers: of what all members are told.
    """

    def __init__(self, peers: Mapping[int, PeerRecord], numbers: Numbers) -> None:
        self._peers, self._numbers = peers, numbers
        self._effects: list[Effect] = []

    def send(self, number: int, message: m.MasterMessage) -> None:
        """Sends a message to a peer."""
        self._effects.append(Send(self._peers[number].conn, message))

    def answer(self, round_: Round[object], make: Callable[[int], m.MasterMessage]) -> None:
        """Sends each voter of a round a message, made from the number of its call."""
        for number, vote in round_.votes.items():
            self.send(number, make(vote.call))

    def fail(
        self, number: int, call: int, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Tells a peer that its call failed before anything happened."""
        self.send(number, m.CallError(call, result.value, plain(why), cause))

    def fail_voters(
        self, round_: Round[object], result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Tells those that have voted so far that their calls have failed; others may vote anew."""
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
        """Tells all members, by their calls, that a round in which all had voted has failed."""
        failure = self.failure(round_, result, why, cause)
        for number, call in calls.items():
            self.refuse(number, call, failure)

    def failure(
        self, round_: RoundId, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> m.Failure:
        """The failure of a round, of which all who have voted are to be told.

        It is an outcome, and has a number: those that have heard of it tell a restarted master,
        which tells the others. Else these would wait for those that have gone on.
        """
        seq, called = self._numbers.take_seq(), CALLED[round_.kind]
        place = round_.tag or 0, round_.pair or ()
        return m.Failure(seq, called, *place, result.value, plain(why), cause)

    def refuse(self, number: int, call: int, failure: m.Failure) -> None:
        """Tells a peer that its call has failed with others."""
        what = failure.seq, failure.called, failure.tag, failure.pair
        self.send(number, m.CallError(call, failure.result, failure.why, failure.cause, *what))

    def note(self, text: str) -> None:
        """Logs a text, which may quote peers."""
        self._effects.append(Note(plain(text)))

    def do(self, *effects: Effect) -> None:
        """Adds any other effect."""
        self._effects += effects

    def take(self) -> list[Effect]:
        """Takes all effects so far."""
        effects, self._effects = self._effects, []
        return effects
