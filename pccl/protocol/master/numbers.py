"""Sequence numbers and epochs, which never repeat, and the nonces that belong to them."""

from __future__ import annotations

from pccl.protocol.master.nonces import Nonces
from pccl.protocol.master.recovery import EPOCH_SHIFT, INCARNATION_SHIFT


class Numbers:
    """The numbers that one master gives.

    Args:
        nonces: of this master.
        incarnation: how often the run's master was restarted; all numbers begin with it.
    """

    def __init__(self, nonces: Nonces, incarnation: int = 0) -> None:
        self._nonces = nonces
        self._first_seq = self._next_seq = self._epoch = 0
        self.begin(incarnation)

    def begin(self, incarnation: int) -> None:
        """Begins the numbers of an incarnation; peers may know those of earlier ones."""
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._epoch = incarnation << EPOCH_SHIFT

    @property
    def incarnation(self) -> int:
        """How often the run's master was restarted."""
        return self._next_seq >> INCARNATION_SHIFT

    @property
    def next_seq(self) -> int:
        """The next sequence number, which is not taken."""
        return self._next_seq

    @property
    def epoch(self) -> int:
        """The latest epoch of any group."""
        return self._epoch

    def take_seq(self) -> int:
        """Takes the next sequence number."""
        self._next_seq += 1
        return self._next_seq - 1

    def take_epoch(self) -> int:
        """Takes the next epoch."""
        self._epoch += 1
        return self._epoch

    def is_old(self, seq: int) -> bool:
        """Whether a sequence number belongs to an earlier incarnation."""
        return seq < self._first_seq

    def is_unknown(self, seq: int) -> bool:
        """Whether a sequence number was never given."""
        return seq >= self._next_seq

    def nonce_of_call(self, seq: int) -> int:
        """The nonce that identifies the bulk data of a sequence number."""
        return self._nonces.of_call(seq)

    def nonce_of_epoch(self, epoch: int) -> int:
        """The nonce by which peers admit each other's streams."""
        return self._nonces.of_epoch(epoch)

    def nonce_of_door(self, number: int) -> int:
        """The nonce by which an associate admits streams."""
        return self._nonces.of_door(number)
