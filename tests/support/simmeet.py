"""Meetings in a simulated run: who has come where, by the tokens of streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pccl.protocol import messages as m

if TYPE_CHECKING:
    from simpeer import Key, SimPeer
    from simulator import Run


class SimMeetings:
    """All meetings of a run, by token."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wanted: dict[str, set[str]] = {}  # who must yet be told
        self._refused: set[str] = set()
        self._needed: dict[Key, set[str]] = {}  # by call

    def are_severed(self, sender: SimPeer, receiver: SimPeer) -> bool:
        """Whether neither can connect to the other, or the one who must cannot connect at all."""
        relayed = any(peer.relay for peer in self._run.peers)
        return receiver.outgoing and (receiver.caged or (sender.outgoing and not relayed))

    def asked(self, sender: SimPeer) -> str:
        """A sender has something for a peer that connects itself. Returns the token."""
        token = f"{len(self._wanted):032x}"
        self._wanted[token] = {"Come", *(("Met", "Relay") if sender.outgoing else ())}
        return token

    def arranged(self, peer: SimPeer, message: m.Come | m.Met | m.Relay) -> None:
        """A peer is told."""
        match message:
            case m.Come():
                assert peer.outgoing, "a peer was sent to another one that can reach it"
            case m.Relay():
                assert peer.relay, "a peer relays that has not offered it"
            case m.Met(relay=None):
                self._refused.add(message.token)
                return
        self._wanted[message.token].discard(type(message).__name__)

    def needs(self, key: Key, tokens: Iterable[str]) -> None:
        """A call cannot end well before they have met."""
        self._needed.setdefault(key, set()).update(tokens)

    def has_all(self, key: Key) -> bool:
        """Whether all have met that a call needs."""
        return not any(self._wanted[token] for token in self._needed.get(key, ()))

    def is_void(self, token: str) -> bool:
        """Whether a meeting will not take place: no message that it needs is under way."""
        name = token.encode()
        queues = [queue for peer in self._run.peers for queue in (peer.up, peer.down)]
        told = any(name in data for queue in queues for data in queue)
        return bool(self._wanted[token]) and (token in self._refused or not told)
