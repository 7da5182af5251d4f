"""By what a peer is known: to the master, to other peers, and to the master that dials it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import zmq

from pccl.runtime.client.engine import EngineOptions
from pccl.runtime.curve import new_keys, require_curve, secure_client
from pccl.security import KeyPair, Security


@dataclass(frozen=True, slots=True)
class Identity:
    """What one peer has of its own, for as long as it lives.

    Attributes:
        token: the password by which the master may dial it.
        keys: with keys, those that the master allows; several peers may share them.
        master_key: with keys, the master's public one.
        lanes: with keys, those of its streams, which nobody else has: so who opens a stream to it
            knows that he has reached it and no other.
    """

    token: str
    keys: KeyPair | None = None
    master_key: str = ""
    lanes: KeyPair | None = None

    @classmethod
    def of(cls, security: Security | None) -> Identity:
        """A new one.

        Raises:
            PCCLError: INVALID_USAGE when keys are missing or unsafe.
        """
        token = secrets.token_hex(16)
        if security is None:
            return cls(token)
        require_curve()
        return cls(token, security.peer_keys(), security.master_key(), new_keys())

    @property
    def curve(self) -> str:
        """The public key of its streams; empty without keys."""
        return "" if self.lanes is None else self.lanes.public

    def guard(self, options: EngineOptions) -> EngineOptions:
        """The options of an engine that lets those in whom it expects, and the master."""
        if self.lanes is None:
            return replace(options, dialler=self.token.encode())
        return replace(
            options,
            curve_public=self.lanes.public.encode(),
            curve_secret=self.lanes.secret.encode(),
            dialler=self.master_key.encode(),
        )

    def secure(self, dealer: zmq.Socket[Any]) -> None:
        """Gives a socket that will connect to the master what the master knows this peer by."""
        if self.keys is not None:
            secure_client(dealer, self.keys, self.master_key)
