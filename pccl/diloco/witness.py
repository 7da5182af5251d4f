"""One set of contributors in the means of all shards."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

import torch

from pccl import Result, TooFewPeersError
from pccl.diloco.flight import Average, Flight
from pccl.diloco.replica import Replica

_log = logging.getLogger("pccl.diloco")


class Witness:
    """Whether all processes of a replica have a mean of the same contributors.

    Each process averages its shard with those of the same shard only, so a replica that is lost
    meanwhile may be in the mean of one shard and not in that of another. Numbers that each replica
    draws at random are averaged with its progress, and tell of whom a mean is. The processes of
    each replica compare them: if one of them is alone, all are, because replicas are lost as a
    whole; if the means differ, they are made once more. All replicas find the same.

    Attributes:
        sent: what is averaged together with the progress; nothing for a replica of one process.
        received: what the mean is written to.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []
        if replica.size > 1:
            drawn = [replica.first(secrets.randbits(48)) for _ in range(2)]  # sums fit 64 bits
            self.sent = [torch.tensor(drawn)]
            self.received = [torch.zeros_like(self.sent[0])]

    def judge(self, average: Average, again: Callable[[], Average]) -> Average:
        """What the processes have in common."""
        if self._replica.size == 1:
            return average
        retries = average.retries
        while True:
            own = [average.peers, *self.received[0].tolist()]
            said = self._replica.exchange(own if average.info is not None else [1, 0, 0])
            if any(row[0] == 1 for row in said):
                return Average(None, retries)
            if all(row == own for row in said):
                return replace(average, retries=retries)
            _log.warning("a replica was lost, and is in the means of some shards: once more")
            average = again()
            retries += 1 + average.retries

    def launched(self, flight: Flight | None) -> Flight:
        """It is under way for all of them, or for none.

        Raises:
            TooFewPeersError: this replica is alone, as one of its processes has found.
        """
        if self._replica.all(flight is not None) and flight is not None:
            return flight
        if flight is not None:
            flight.land()  # nobody else is left to take part in it
        raise TooFewPeersError(Result.TOO_FEW_PEERS, "launch", "this replica is alone")
