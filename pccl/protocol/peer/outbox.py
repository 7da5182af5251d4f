"""The effects of one event, in order."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Effect, Send


class Outbox:
    """Collects effects until they are taken.

    Attributes:
        known: whether the master knows this peer on its current connection. If not, only who this
            peer is may be said; Resume then says everything that matters.
    """

    def __init__(self) -> None:
        self.known = True
        self._effects: list[Effect] = []

    def say(self, message: m.PeerMessage) -> None:
        """Sends a message, if the master knows this peer."""
        if self.known:
            self._effects.append(Send(message))

    def introduce(self, message: m.Hello | m.Resume | m.Leave) -> None:
        """Sends who this peer is, or that it leaves."""
        self._effects.append(Send(message))

    def do(self, *effects: Effect) -> None:
        """Adds other effects."""
        self._effects += effects

    def take(self) -> list[Effect]:
        """Takes all effects so far."""
        effects, self._effects = self._effects, []
        return effects
