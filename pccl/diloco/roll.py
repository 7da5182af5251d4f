"""What peers tell each other of a round: how long each has trained, and on how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pccl import Communicator, PCCLError, Result


@dataclass(frozen=True, slots=True)
class PeerShare:
    """What one peer did in a round.

    Attributes:
        inner_steps: that it has taken.
        samples: that it has trained on, as `DiLoCo.step` was told.
        compute_s: seconds in which it has trained.
        utilisation: these, as a part of the time from the end of its last round to this one's.
        late: whether it came late to a deadline round, so that its progress is in the next one.
    """

    inner_steps: int
    samples: int
    compute_s: float
    utilisation: float
    late: bool


def call_the_roll(comm: Communicator, own: PeerShare) -> tuple[PeerShare, ...]:
    """The shares of all peers, in the order of their ranks.

    It is called again whenever a peer is lost: some may have entered before that, others not.
    """
    row = [own.inner_steps, own.samples, own.compute_s, own.utilisation, own.late]
    sent = torch.tensor(row, dtype=torch.float64)
    while True:
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        try:
            handle = comm.all_gather_async(sent)
            committed, _, _ = handle.wait()
            if committed:
                break
            assert handle.error is not None
            raise handle.error
        except PCCLError as error:
            if error.result is Result.TOO_FEW_PEERS:
                return (own,)
            if error.result is not Result.RANK_CONNECTION_LOST:
                raise
    gathered: Any = handle.result  # a tensor
    rows: list[list[float]] = gathered.tolist()
    return tuple(
        PeerShare(int(steps), int(samples), compute_s, utilisation, bool(late))
        for steps, samples, compute_s, utilisation, late in rows
    )
