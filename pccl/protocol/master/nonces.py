"""Numbers that strangers cannot guess, and that a simulation can repeat. Pure functions."""

from __future__ import annotations

from hashlib import blake2b

NONCE_BYTES = 8


class Nonces:
    """The nonces of one master, each 64 bits of a keyed hash.

    Args:
        secret: known to this master alone and never used by another one; at most 64 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_epoch(self, epoch: int) -> int:
        """The nonce of an epoch: the password of streams between its peers."""
        return self._hash(b"epoch %d" % epoch)

    def of_door(self, number: int) -> int:
        """The nonce of an associate: the password of all streams to it."""
        return self._hash(b"door %d" % number)

    def of_call(self, seq: int) -> int:
        """The nonce of a sequence number, which its chunks, requests and data carry."""
        return self._hash(b"call %d" % seq)

    def _hash(self, what: bytes) -> int:
        return int.from_bytes(blake2b(what, key=self._secret, digest_size=NONCE_BYTES).digest())
