"""The effects of one event, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Effect, Note, Send
from pccl.protocol.master.membership import PeerRecord
from pccl.protocol.rounds import Round
from pccl.types import Result

WHY_MAX = 2000  # characters of a text that quotes peers; a message holds 4096


def plain(text: str) -> str:
    """Makes a text that may quote peers safe for a log, a terminal and a message."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WHY_MAX else text[:WHY_MAX] + " ..."


class Outbox:
    """Collects effects until they are taken.

    Args:
        peers: the registered peers, by number.
    """

    def __init__(self, peers: Mapping[int, PeerRecord]) -> None:
        self._peers = peers
        self._effects: list[Effect] = []

    def send(self, number: int, message: m.MasterMessage) -> None:
        """Sends a message to a peer."""
        self._effects.append(Send(self._peers[number].conn, message))

    def answer(self, round_: Round[object], make: Callable[[int], m.MasterMessage]) -> None:
        """Sends each voter of a round a message, made from the number of its call."""
        for number, vote in round_.votes.items():
            self.send(number, make(vote.call))

    def fail(
        self,
        number: int,
        call: int,
        result: Result,
        why: str,
        cause: m.Cause = m.Cause.OTHER,
        seq: int = 0,
    ) -> None:
        """Tells a peer that its call failed before anything happened."""
        self.send(number, m.CallError(call, result.value, plain(why), cause, seq))

    def fail_all(
        self, round_: Round[object], result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Tells all voters of a round that their calls have failed."""
        for number, vote in round_.votes.items():
            self.fail(number, vote.call, result, why, cause)

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
