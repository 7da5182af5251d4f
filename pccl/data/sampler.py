"""The samples of a round, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from pccl.data.ledger import Ledger


class LedgerSampler:
    """Indices of the samples that a ledger has given to this peer for the present round.

        loader = torch.utils.data.DataLoader(dataset, 16, sampler=LedgerSampler(ledger))
        while not ledger.finished:
            for batch in loader:
                ...

    One pass of the loader is one round. It asks no other peer, so the workers of a DataLoader may
    be ahead within it.

    Args:
        ledger: of the dataset.
        shuffle: whether each epoch has an order of its own. The order takes 8 bytes a sample.
        seed: of the order; the same on all peers.
    """

    def __init__(self, ledger: Ledger, *, shuffle: bool = True, seed: int = 0) -> None:
        self._ledger = ledger
        self._shuffle = shuffle
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """Indices below the number of samples."""
        for part in self._ledger.share:
            for number in part:
                epoch, place = divmod(number, self._ledger.samples)
                if self._shuffle:
                    yield int(_order(self._ledger.samples, self._seed, epoch)[place])
                else:
                    yield place

    def __len__(self) -> int:
        """Samples in the round."""
        return sum(map(len, self._ledger.share))


@lru_cache(maxsize=2)  # a round may begin in one epoch and end in the next
def _order(samples: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # This generator is the one of numpy that gives the same numbers in all versions.
    return np.random.RandomState((seed, epoch)).permutation(samples)
