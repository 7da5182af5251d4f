"""Who waits for whom: circles of which a send or recv is a part, and who still goes on. Pure
functions.

Who waits in a PAIR waits for one peer, and not for all: it is in the way only of those who wait for
it, directly or by way of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pccl.protocol.rounds import EXCLUSIVE, PENDING, Kind, OpenRounds, Round

Absent = Callable[[Round[object]], list[int]]  # the members that have not voted


def circle(
    peer: int, rounds: OpenRounds, absent: Absent
) -> tuple[Round[object], Round[object]] | tuple[()]:
    """Two rounds that wait for each other's voters: that of `peer`, which has just voted, and the
    last one of a circle; empty if there is no circle.

    A peer is held by a round if it makes no other call before that returns. A send or recv that was
    launched, and not awaited, holds its peer from the exclusive calls alone.
    """
    for first in rounds.of(peer).values():
        held = _holds(first, peer)
        if not held and first.id.kind is not Kind.PAIR:
            continue
        todo, seen = [first], {first.id}
        while todo:
            for other in _next(todo.pop(), peer, rounds, absent):
                pairs = Kind.PAIR in (first.id.kind, other.id.kind)
                if peer in absent(other) and pairs and (held or other.id.kind in EXCLUSIVE):
                    return first, other
                if other.id not in seen:
                    seen.add(other.id)
                    todo.append(other)
    return ()


def _next(
    round_: Round[object], peer: int, rounds: OpenRounds, absent: Absent
) -> Iterator[Round[object]]:
    """The rounds that hold those for whom a round waits."""
    exclusive = round_.id.kind in EXCLUSIVE
    for awaited in absent(round_):
        for each in rounds.of(awaited).values() if awaited != peer else ():
            if _holds(each, awaited) or (exclusive and each.id.kind is Kind.PAIR):
                yield each


def _holds(round_: Round[object], peer: int) -> bool:
    return round_.votes[peer].stuck or round_.id.kind in EXCLUSIVE


def held(rounds: OpenRounds, absent: Absent) -> set[int]:
    """Peers that may wait for each other, and so may make no other call.

    Not those that wait in no round, or only ask in another thread whether peers are pending; nor
    those that have launched collectives or sends for which only such peers are missing.
    """
    missing = {each.id: absent(each) for each in rounds if each.id.kind in (Kind.START, Kind.PAIR)}
    found = {number for round_ in rounds for number in round_.votes}

    def goes_on(round_: Round[object], peer: int) -> bool:
        launched = round_.id == PENDING or found.isdisjoint(missing.get(round_.id, found))
        return launched and not round_.votes[peer].stuck

    while free := {n for n in found if all(goes_on(one, n) for one in rounds.of(n).values())}:
        found -= free
    return found
