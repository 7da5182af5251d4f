"""What a ledger of samples has to do with the rounds, if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pccl import Communicator, TensorInfo
from pccl.data import Ledger


class Accounts:
    """Votes, settles and claims for a ledger.

    Args:
        ledger: None: there is none, and nothing happens.
        counted: whether a round may end before a peer has trained on all of its share.

    Attributes:
        counted: the same, if there is a ledger.
        votes: what the votes of all peers are added up in.
    """

    def __init__(self, ledger: Ledger | None, counted: bool) -> None:
        self._ledger = ledger
        self.counted = counted and ledger is not None
        self.votes: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        if ledger is not None:
            dtype = torch.int64 if counted else torch.uint8
            self.votes = [torch.zeros(ledger.peers_max, dtype=dtype)]

    @property
    def exist(self) -> bool:
        """Whether there is a ledger."""
        return self._ledger is not None

    def train(self, samples: int) -> None:
        """This peer has trained on so many more."""
        if self._ledger is not None and self.counted:
            self._ledger.train(samples)

    def vote(self, late: bool) -> list[torch.Tensor]:
        """The progress is about to be averaged; what travels with it.

        `late`: that of this peer is not in the mean.
        """
        if self._ledger is not None:
            self._own = [torch.from_numpy(self._ledger.vote(counted=self.counted, late=late))]
        return self._own

    def count_alone(self) -> None:
        """The mean is the progress of this peer, also if it came too late for one of others."""
        self.vote(late=False)
        for votes, own in zip(self.votes, self._own, strict=True):
            votes.copy_(own)

    def settle(self, applied: bool) -> None:
        """The mean is applied; or there is none, and the progress is the peer's own again."""
        if self._ledger is not None:
            votes: Any = self.votes[0].numpy()
            self._ledger.settle(votes if applied else None)

    def claim(self, comm: Communicator, wanted: int | None = None) -> None:
        """A round begins; all peers of the group are about to train."""
        if self._ledger is not None:
            self._ledger.claim(comm, wanted)

    def rejoin(self) -> bool:
        """The run has gone on without this peer; whether it may keep its progress.

        With a ledger others train on its samples, so it may not.
        """
        if self._ledger is not None:
            self._ledger.renew()
        return self._ledger is None

    def entries(self) -> list[TensorInfo]:
        """What all peers hold alike."""
        return [] if self._ledger is None else self._ledger.entries()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The same, for a checkpoint."""
        return {} if self._ledger is None else {"ledger": torch.from_numpy(self._ledger.dump())}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of a DiLoCo whose ledger this one cannot take over."""
        if "ledger" not in state:
            return
        if self._ledger is None:
            raise ValueError("the state has a ledger of samples: give DiLoCo one, as ledger=")
        self._ledger.check(state["ledger"].numpy())

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state. If it has none, the ledger stays as it is."""
        if self._ledger is not None and "ledger" in state:
            self._ledger.restore(state["ledger"].numpy())
