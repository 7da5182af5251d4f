"""What a peer's progress weighs in a mean."""

from __future__ import annotations

from typing import Literal

from pccl.diloco.replica import Replica

WeightBy = Literal["peers", "samples"]


class Share:
    """Counts the samples that are in a pseudo-gradient: those of all processes of its replica.

    Attributes:
        late: whether this peer came late to a deadline round: its progress weighs nothing in it.
    """

    def __init__(self, by: WeightBy, always: bool, replica: Replica) -> None:
        """`always`: there are weights even if all are the same, because a late peer has none."""
        self.late = False
        self._by = by
        self._always = always
        self._trained = 0  # since the base
        self._measured = 0  # of these, those in the pseudo-gradient
        self._weight = 0  # that, and what the replica's other processes say
        self._replica = replica

    def count(self, samples: int) -> None:
        """This peer has trained on so many more.

        Raises:
            ValueError: the number is negative.
        """
        if samples < 0:
            raise ValueError(f"samples={samples} must not be negative")
        self._trained += samples

    def measure(self) -> None:
        """The pseudo-gradient has all until now."""
        self._measured = self._weight = self._trained
        if self._by == "samples":
            self._weight = sum(said for (said,) in self._replica.exchange([self._measured]))

    def applied(self) -> None:
        """It is in a mean that is going to be applied."""
        if not self.late:
            self._trained -= self._measured

    def drop(self) -> None:
        """The progress is gone."""
        self._trained = 0

    @property
    def weight(self) -> int | None:
        """Of the pseudo-gradient; None: that of all peers is the same."""
        if self.late:
            return 0
        if self._by == "samples":
            return self._weight
        return 1 if self._always else None
