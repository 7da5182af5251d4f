"""How a part of the master drops peers from the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.master.blame import Verdict
from pccl.protocol.master.groups import Groups
from pccl.protocol.master.membership import Membership
from pccl.types import Result

# Drops peers from the run, each for a reason; if there is a result, they are told, with its cause.
RemoveAll: TypeAlias = Callable[[Mapping[int, str], Result | None, m.Cause], None]


class Dismissals:
    """Drops peers.

    Args:
        membership: the registered peers.
        groups: have the evidence against peers.
        remove_all: drops peers. When it returns, all others continue without them.
    """

    def __init__(self, membership: Membership, groups: Groups, remove_all: RemoveAll) -> None:
        self._membership, self._groups = membership, groups
        self._remove_all = remove_all

    def dismiss_all(
        self, whys: Mapping[int, str], result: Result, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """Drops peers, and tells each of them why."""
        self._remove_all(whys, result, cause)

    def dismiss(self, number: int, why: str, result: Result) -> None:
        """Drops a peer, and tells it why."""
        self.dismiss_all({number: why}, result)

    def convict(self, group: int, verdict: Verdict) -> None:
        """Drops a peer that cannot reach others, or cannot be reached; tells all peers why."""
        why = self._groups[group].blame.sentence(verdict, self._membership.info)
        self.dismiss(verdict.guilty, why, Result.RANK_CONNECTION_FAILED)
