"""Calls whose callers have gone before the master has said how they end. No I/O.

A caller goes when an exception takes it away, or when its time is up while the master, which alone
knows the outcome, is away. Its call ends at once: what the engine does is aborted, and the call is
answered when the engine is settled. But the master may have its vote, and may start what it voted
for. Until that is known the call is a *ghost*: wherever it is still asked, it votes no. Meanwhile
the master hears of no other call in the same *place* (a collective with the same tag, the same
round): so whatever the master says, also after a restart, is about one of the two.

The call may have succeeded for the others all the same. If its caller was told of a failure, its
peer can no longer be part of the run and leaves it: no two peers of a run go on with two outcomes.
A caller that an exception took away was told nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.rounds import Kind

Place: TypeAlias = int | str  # a tag, or the name of a round
Enter: TypeAlias = Callable[[], None]


class Ghosts:
    """The ghosts of one peer, and the calls that wait for them to go."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # of each ghost
        self._late: set[int] = set()  # those whose callers were told that their time was up
        self._behind: dict[Place, dict[int, Enter]] = {}  # what enters the calls that wait

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, call: int) -> bool:
        return call in self._places

    @property
    def calls(self) -> list[int]:
        """Of all ghosts."""
        return list(self._places)

    def add(self, call: int, place: Place, late: bool) -> None:
        """The caller of a call in that place has gone; `late`: it was told that it has failed."""
        self._places[call] = place
        self._late |= {call} if late else set()

    def late(self, call: int) -> bool:
        """Whether the caller of a ghost was told that its time was up."""
        return call in self._late

    def succeeded(self, call: int, before: m.Done, done: m.Done) -> str:
        """The name of a ghost's round if that has ended well since; else nothing.

        It is our vote that the others needed, and no other call has entered the round since.
        """
        rounds = {
            m.TopologyVote: (Kind.TOPOLOGY, before.topology < done.topology),
            m.PendingVote: (Kind.PENDING, before.pending < done.pending),
            m.SyncVote: (Kind.SYNC, before.sync < done.sync),
            m.OptimizeVote: (Kind.OPTIMIZE, before.optimized < done.optimized),
        }
        found = {vote.__name__: kind.value for vote, (kind, ended) in rounds.items() if ended}
        return found.get(str(self._places[call]), "")

    def keeps(self, call: int, place: Place, enter: Enter) -> bool:
        """Whether a call has to wait for a ghost in its place; if so, it is entered afterwards."""
        if place not in self._places.values():
            return False
        self._behind.setdefault(place, {})[call] = enter
        return True

    def follow(self, call: int, then: Enter) -> None:
        """If a call waits for a ghost to go, this is to follow when it has entered."""
        for behind in self._behind.values():
            if call in behind:
                behind[call] = partial(_both, behind[call], then)

    def forget(self, call: int) -> bool:
        """A call waits no longer for a ghost to go; whether it did."""
        return any(waiting.pop(call, None) is not None for waiting in self._behind.values())

    def lay(self, call: int) -> None:
        """The ghost of a call is gone: whoever waits for it enters."""
        place = self._places.pop(call, None)
        self._late.discard(call)
        if place is not None and place not in self._places.values():
            for enter in self._behind.pop(place, {}).values():
                enter()

    def clear(self) -> list[int]:
        """All ghosts are gone; the calls that waited for them, which nobody enters any more."""
        waiting = [call for behind in self._behind.values() for call in behind]
        self._places.clear()
        self._late.clear()
        self._behind.clear()
        return waiting


def _both(enter: Enter, then: Enter) -> None:
    enter()
    then()


class Withdrawals:
    """Calls whose callers wait no longer, until the master has said whether they had ended."""

    def __init__(self) -> None:
        self._whys: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._whys)

    def add(self, call: int, why: str) -> None:
        """The caller of this call waits no longer."""
        self._whys[call] = why

    def why(self, call: int, otherwise: str) -> str:
        """Why it does not, if that is known."""
        return self._whys.get(call, otherwise)

    def forget(self, call: int) -> None:
        """The call has ended."""
        self._whys.pop(call, None)

    def all(self) -> list[tuple[int, str]]:
        """All such calls, and why."""
        return list(self._whys.items())

    def clear(self) -> None:
        """All calls have ended."""
        self._whys.clear()
