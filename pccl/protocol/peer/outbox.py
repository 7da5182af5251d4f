"""What handling one event leads to: an explicit list of effects, in the order of their making."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Effect, Send


class Outbox:
    """Collects effects until they are taken.

    Attributes:
        linked: whether the master knows who speaks. While it does not, nothing is said to it but
            who this peer is; then Resume says all that matters.
    """

    def __init__(self) -> None:
        self.linked = True
        self._effects: list[Effect] = []

    def say(self, message: m.PeerMessage) -> None:
        """Tells the master, if it knows who speaks."""
        if self.linked:
            self._effects.append(Send(message))

    def introduce(self, message: m.Hello | m.Resume | m.Leave) -> None:
        """Tells the master who speaks, or that nobody will any more."""
        self._effects.append(Send(message))

    def do(self, *effects: Effect) -> None:
        """Whatever else is to be done."""
        self._effects += effects

    def take(self) -> list[Effect]:
        """All effects since they were last taken."""
        effects, self._effects = self._effects, []
        return effects
