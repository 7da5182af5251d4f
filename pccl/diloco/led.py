"""The pace of a replica of several processes: all of them train equally many steps."""

from __future__ import annotations

from pccl.diloco.pace import OfAll, Pace
from pccl.diloco.replica import Replica


class Led(OfAll):
    """The pace of the replica's first process, which the others ask after each inner step."""

    def __init__(self, pace: Pace, replica: Replica) -> None:
        super().__init__()
        self._pace = pace
        self._replica = replica

    def begin(self) -> None:
        """A round has ended."""
        self._pace.begin()

    def due(self, inner_step: int) -> bool:
        """Whether it is for the first process."""
        return bool(self._replica.first(int(self._pace.due(inner_step))))
