"""Which ranks a program knows: what a collective counts on where they matter."""

from __future__ import annotations

import threading

from pccl.calls.operands import Ranks
from pccl.protocol import messages as m


class KnownRanks:
    """The ring as the program has seen it last: peers by rank.

    A call that changes who is there by the program's own will, when it returns, tells all threads.
    What a thread reads, or hears of a loss, does not change what others have seen: they may have a
    rank from before still in their hands. A thread that has seen nothing itself goes by what calls
    of any thread have told.
    """

    def __init__(self) -> None:
        self._order: tuple[int, ...] = ()
        self._told = 0  # how often the whole program was told
        self._own = threading.local()

    def tell(self, plan: m.Plan, number: int) -> None:
        """The whole program is told who is there now."""
        self._order = _order(plan, number)
        self._told += 1

    def see(self, plan: m.Plan, number: int) -> None:
        """This thread has seen who is there now."""
        self._own.order, self._own.told = _order(plan, number), self._told

    def lose(self, plan: m.Plan, number: int) -> None:
        """A call of this thread was told of a loss."""
        self.see(plan, number)
        self._order = self._own.order

    @property
    def order(self) -> tuple[int, ...]:
        """The peers by rank, as this thread knows them."""
        mine: tuple[int, ...] = getattr(self._own, "order", ())
        return mine if mine and self._own.told == self._told else self._order

    def of(self, number: int) -> Ranks:
        """The rank of a peer, how many there are, and who is first, as this thread knows them.

        Peers are numbered as they come, so the lowest number is longest in the run.
        """
        order = self.order
        return Ranks(order.index(number), len(order), order.index(min(order)))


def _order(plan: m.Plan, number: int) -> tuple[int, ...]:
    return plan.rings[0].order if plan.rings else (number,)
