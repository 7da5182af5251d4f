"""What a ledger of samples has to do with the rounds, if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pccl import Communicator, TensorInfo
from pccl.data import Ledger


class Accounts:
    """Votes, settles and claims for a ledger.

    Attributes:
        votes: what is averaged together with the progress of a round.
        means: what the mean is written to.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self.votes: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []
        if ledger is not None:
            self.means = [torch.zeros(ledger.peers_max, dtype=torch.uint8)]

    def vote(self) -> None:
        """The progress is about to be averaged."""
        if self._ledger is not None:
            self.votes = [torch.from_numpy(self._ledger.vote())]

    def settle(self, applied: bool) -> None:
        """The mean is applied; or there is none, and the progress is the peer's own again."""
        if self._ledger is not None:
            self._ledger.settle(self.means[0].numpy() if applied else None)

    def claim(self, comm: Communicator, wanted: int | None = None) -> None:
        """A round begins; all peers of the group are about to train."""
        if self._ledger is not None:
            self._ledger.claim(comm, wanted)

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
