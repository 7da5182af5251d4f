"""How a part of the master has peers leave the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from pccl.protocol.master.blame import Verdict
from pccl.protocol.master.groups import Groups
from pccl.protocol.master.membership import Membership
from pccl.types import Result

# Takes peers out of the run, for a reason each; with a result they are told so.
RemoveAll: TypeAlias = Callable[[Mapping[int, str], Result | None], None]


class Dismissals:
    """Sends peers away.

    Args:
        membership: who is there.
        groups: where the evidence lies by which peers are convicted.
        remove_all: how peers leave. When it returns, all others go on without them.
    """

    def __init__(self, membership: Membership, groups: Groups, remove_all: RemoveAll) -> None:
        self._membership, self._groups = membership, groups
        self.dismiss_all = remove_all

    def dismiss(self, number: int, why: str, result: Result) -> None:
        """A peer has to go, and is told why."""
        self.dismiss_all({number: why}, result)

    def convict(self, group: int, verdict: Verdict) -> None:
        """A peer that cannot reach others, or cannot be reached, has to go; all are told why."""
        why = self._groups[group].blame.sentence(verdict, self._membership.info)
        self.dismiss(verdict.guilty, why, Result.RANK_CONNECTION_FAILED)
