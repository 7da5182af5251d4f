"""Tells the eras of a shared state apart: it begins anew when all who held it are gone.

A run that loses everybody goes on with whoever comes next, at the first step. What its workers did
before has nothing to do with what they do now, so each era is judged by itself. But while any
worker holds the state, no other one may begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from diary import Begin, End, Fault

FOREVER_S = float("inf")
Times: TypeAlias = defaultdict[int, list[float]]  # by worker


@dataclass(eq=False)
class Member:
    """A worker from when it joins until its membership ends.

    Attributes:
        over_s: when it has ended, as the worker has written; FOREVER_S: it was killed, or has not.
        era: of the group's shared state, which it holds or held; 0 is the first.
        held: whether it has ever held it.
        syncs: those that ended well.
    """

    worker: int
    group: int = 0
    since_s: float = 0.0
    over_s: float = FOREVER_S
    era: int = 0
    held: bool = False
    syncs: list[tuple[Begin, End]] = field(default_factory=list)


@dataclass
class _Era:
    """An era so far: when each revision was first reached, and who has held any."""

    reached: dict[int, float] = field(default_factory=dict)
    holders: list[Member] = field(default_factory=list)


class Eras:
    """The eras of all groups.

    Args:
        faults: what befell whom.
        fatal: the kinds of faults that end a worker.
        dropping: those that may end its membership.
    """

    def __init__(
        self, faults: Sequence[Fault], fatal: Collection[str], dropping: Collection[str]
    ) -> None:
        self._deaths = _times([fault for fault in faults if fault.what in fatal])
        self._excuses = _times([fault for fault in faults if fault.what in {*fatal, *dropping}])

    def tell_apart(self, members: Sequence[Member]) -> Iterator[str]:
        """Gives each member its era. Yields, for each that began before the last one was over, who
        still held that."""
        groups: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            groups[member.group].append(member)
        for group in sorted(groups):
            yield from self._of_group(group, groups[group])

    def _of_group(self, group: int, members: list[Member]) -> Iterator[str]:
        syncs = [(*sync, member) for member in members for sync in member.syncs]
        eras = [_Era()]
        for begin, end, member in sorted(syncs, key=lambda sync: sync[1].at_s):
            if not member.held:
                if self._begins_anew(begin, end, eras[-1]):
                    if holder := self._holder(eras[-1], end.at_s):
                        yield (
                            f"the state of group {group} began anew at revision {end.revision} "
                            f"with worker {member.worker}, while {holder}"
                        )
                    eras.append(_Era())
                member.held, member.era = True, len(eras) - 1
                eras[-1].holders.append(member)
            eras[member.era].reached.setdefault(end.revision, end.at_s)

    def _begins_anew(self, begin: Begin, end: End, era: _Era) -> bool:
        """Whether this first sync of a member cannot be part of the era.

        Nobody reaches a revision before all have begun to synchronise the one before. And who
        begins when all holders are gone can have received nothing from them.
        """
        later = [at_s for revision, at_s in era.reached.items() if revision > end.revision]
        gone = [self._gone(one, begin.at_s, self._deaths) for one in era.holders]
        return any(at_s < begin.at_s for at_s in later) or (bool(gone) and all(gone))

    def _holder(self, era: _Era, at_s: float) -> str:
        """Who holds the state at a moment, and nothing has happened that could have ended that;
        empty: nobody."""
        for one in era.holders:
            went_on = any(begin.at_s > at_s for begin, _ in one.syncs)
            if went_on or not self._gone(one, at_s, self._excuses):
                revision = max(end.revision for _, end in one.syncs if end.at_s <= at_s)
                return f"worker {one.worker} held revision {revision}"
        return ""

    @staticmethod
    def _gone(member: Member, at_s: float, times: Times) -> bool:
        """Whether a membership was over at a moment, by what is said there of its worker."""
        ends = [end_s for end_s in times[member.worker] if end_s >= member.since_s]
        return min([member.over_s, *ends]) <= at_s


def _times(faults: Sequence[Fault]) -> Times:
    """When they befell each worker."""
    times: Times = defaultdict(list)
    for fault in faults:
        times[fault.worker].append(fault.at_s)
    return times
