"""The ranks that a program knows, for collectives that depend on ranks."""

from __future__ import annotations

import threading

from pccl.calls.operands import Ranks
from pccl.protocol import messages as m
from pccl.protocol.ring import checksum


class KnownRanks:
    """The ring as the program has last seen it: peers by rank.

    A call by which the program itself changes the membership updates the ranks of all threads when
    it returns. If one thread reads the ranks, or learns of a loss, other threads keep what they
    have seen, because they may still use an earlier rank. A thread that has not read the ranks
    itself uses those of the last update.
    """

    def __init__(self) -> None:
        self._order: tuple[int, ...] = ()
        self._told = 0  # how often the whole program was told
        self._own = threading.local()

    def tell(self, plan: m.Plan, number: int) -> None:
        """Updates the ranks of all threads."""
        self._order = _order(plan, number)
        self._told += 1

    def see(self, plan: m.Plan, number: int) -> None:
        """Updates the ranks of this thread."""
        self._own.order, self._own.told = _order(plan, number), self._told

    def lose(self, plan: m.Plan, number: int) -> None:
        """A call of this thread has failed because a peer was lost."""
        self.see(plan, number)
        self._order = self._own.order

    @property
    def order(self) -> tuple[int, ...]:
        """The peers by rank, as this thread knows them."""
        mine: tuple[int, ...] = getattr(self._own, "order", ())
        return mine if mine and self._own.told == self._told else self._order

    def of(self, number: int) -> Ranks:
        """The rank of a peer, the number of members, and the first member, for this thread.

        Peers are numbered in the order in which they join, so the lowest number joined first.
        """
        order = self.order
        at, first = order.index(number), order.index(min(order))
        return Ranks(at, len(order), first, checksum(order))


def _order(plan: m.Plan, number: int) -> tuple[int, ...]:
    return plan.rings[0].order if plan.rings else (number,)
