"""The credentials of a peer: towards the master, other peers, and the master that dials it back."""

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
    """One peer's credentials, which do not change during its life.

    Attributes:
        token: the password with which the master may dial it.
        keys: the key pair that the master allows, if encrypted; several peers may share it.
        master_key: the master's public key, if encrypted.
        lanes: the key pair of its streams, if encrypted. It is unique to this peer, so a peer that
            opens a stream to it knows that it has reached this one.
    """

    token: str
    keys: KeyPair | None = None
    master_key: str = ""
    lanes: KeyPair | None = None

    @classmethod
    def of(cls, security: Security | None) -> Identity:
        """New credentials.

        Raises:
            PCCLError: INVALID_USAGE: keys are missing or unsafe.
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
        """The options of an engine that accepts only expected peers and the master."""
        if self.lanes is None:
            return replace(options, dialler=self.token.encode())
        return replace(
            options,
            curve_public=self.lanes.public.encode(),
            curve_secret=self.lanes.secret.encode(),
            dialler=self.master_key.encode(),
        )

    def secure(self, dealer: zmq.Socket[Any]) -> None:
        """Sets the keys of a socket that will connect to the master."""
        if self.keys is not None:
            secure_client(dealer, self.keys, self.master_key)
