"""Peers that would keep others waiting for longer than these want to."""

from __future__ import annotations

from pccl.protocol.master.membership import Membership
from pccl.protocol.rounds import Grace, Round


class Deadlines:
    """Finds the members that are too late for a round in which others wait only for a grace.

    In `are_peers_pending`, a vote may have a `Grace`. The grace of a group begins when enough of
    its members have entered with one, and is over so many seconds later; who is still absent then
    is late. If the votes of a group differ, the most patient one counts. Votes without a grace do
    not count as entered: a group of which too few have one waits for all its members, and no group
    decides about the members of another.

    Attributes:
        left_s: seconds until the next grace is over, at the time of the last `late`; None: none has
            begun.
    """

    def __init__(self, membership: Membership) -> None:
        self.left_s: float | None = None
        self._membership = membership
        self._round: Round[object] | None = None
        self._began_s: dict[int, float] = {}  # by group

    def late(self, now_s: float, round_: Round[object] | None) -> dict[int, str]:
        """The members that are late for the open round, each with the reason to drop it."""
        self.left_s = None
        if round_ is not self._round:
            self._round, self._began_s = round_, {}
        if round_ is None or not round_.has_grace:
            return {}
        whys: dict[int, str] = {}
        for group, graces in self._graces(round_).items():
            size = self._membership.size(group)
            enough = max(grace.enough for grace in graces)
            absent = [n for n in self._membership.accepted(group) if n not in round_.votes]
            if len(graces) < enough or not absent:
                self._began_s.pop(group, None)
                continue
            seconds = max(grace.seconds for grace in graces)
            left_s = self._began_s.setdefault(group, now_s) + seconds - now_s
            if left_s > 0:
                self.left_s = left_s if self.left_s is None else min(self.left_s, left_s)
            else:
                why = f"it was late: {len(graces)} of {size} had entered {round_.id.kind.value}(), "
                why += f"and waited for {seconds:g} s more, which is their grace"
                whys |= dict.fromkeys(absent, why)
        return whys

    def _graces(self, round_: Round[object]) -> dict[int, list[Grace]]:
        """Of the votes of each group."""
        found: dict[int, list[Grace]] = {}
        for number, vote in round_.votes.items():
            if vote.grace is not None:
                found.setdefault(self._membership.group_of(number), []).append(vote.grace)
        return found
