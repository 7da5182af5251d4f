"""Mutants of the rounds that do not wait for everybody."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = (
    Mutant(
        "a grace begins when enough have entered",
        "            if len(graces) < enough or not absent:\n",
        "            if not absent:\n",
    ),
    Mutant(
        "votes without a grace do not count",
        "            if vote.grace is not None:\n                found.setdefault",
        "            if True:\n                found.setdefault",
    ),
    Mutant(
        "a grace ends with its round",
        "            self._round, self._began_s = round_, {}\n",
        "            self._round = round_\n",
    ),
    Mutant(
        "a grace ends when a vote is taken back",
        "                self._began_s.pop(group, None)\n",
        "                pass\n",
    ),
    Mutant(
        "a grace does not begin anew with each vote",
        "self._began_s.setdefault(group, now_s) + seconds - now_s",
        "now_s + seconds - now_s",
    ),
    Mutant(
        "the most patient vote of a group counts",
        "            seconds = max(grace.seconds for grace in graces)\n",
        "            seconds = min(grace.seconds for grace in graces)\n",
    ),
    Mutant(
        "the most demanding vote of a group counts",
        "enough = max(grace.enough for grace in graces)",
        "enough = min(grace.enough for grace in graces)",
    ),
    Mutant(
        "only members of the group are late",
        "[n for n in self._membership.accepted(group) if n not in round_.votes]",
        "[n for n in self._membership.accepted() if n not in round_.votes]",
    ),
    Mutant(
        "the server is told when a grace ends",
        "self.left_s = left_s if self.left_s is None else min(self.left_s, left_s)",
        "pass",
    ),
    Mutant(
        "who is late is told",
        "            self.run.dismissals.dismiss_all(whys, Result.RANK_CONNECTION_FAILED)\n",
        "            self.run.dismissals.dismiss_all(whys, None)\n",
    ),
    Mutant(
        "a caller in a hurry keeps its grace",
        "msgspec.structs.replace(vote, patient=False)",
        "m.PendingVote(call, vote.stuck)",
    ),
    Mutant(
        "ticks are recorded once a vote has a grace",
        "            if isinstance(message, m.PendingVote) and message.enough:\n",
        "            if False:\n",
    ),
)
