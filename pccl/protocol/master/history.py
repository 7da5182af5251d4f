"""What a run has agreed on so far: rounds of the whole run, and each group's shared state."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.master.recovery import Before, GroupBefore


@dataclass(slots=True)
class StateHistory:
    """The history of a group's shared state."""

    revision: int | None = None
    syncs: int = 0  # number of its last synchronisation, counted over all groups
    last_plan: int = 0  # seq of the last plan of the last synchronisation
    holders: set[int] = field(default_factory=set)
    short: int = 0  # peers that the last synchronisation lacked to begin with
    # whether the last revision may be synchronised again: a peer joined or was lost, or a
    # collective failed, since then
    repeatable: bool = False


class History:
    """Numbers of completed rounds, and their latest results.

    Attributes:
        topology: rounds of `update_topology`.
        pending: rounds of `are_peers_pending`.
        were_pending: the result of the latest of these.
        optimized: rounds of `optimize_topology`.
        finished: whether the run is finished.
    """

    def __init__(self) -> None:
        self.topology = self.pending = self.optimized = 0
        self.were_pending = self.finished = False
        self._syncs = 0  # over all groups, so that a group that begins again repeats no number
        self._groups: dict[int, StateHistory] = {}

    def restore(self, before: Before) -> None:
        """Restores the state before a restart."""
        self.topology, self.pending = before.topology, before.pendings
        self.were_pending, self.optimized = before.were_pending, before.optimized
        self.finished |= before.finished
        self._syncs = max((was.syncs for was in before.groups.values()), default=0)
        self._groups = {number: _state_of(was) for number, was in before.groups.items()}

    def of(self, group: int) -> StateHistory:
        """The history of a group's shared state."""
        if group not in self._groups:
            self._groups[group] = StateHistory()
        return self._groups[group]

    def count_sync(self, group: int) -> StateHistory:
        """Numbers a synchronisation that has a result."""
        self._syncs += 1
        state = self.of(group)
        state.syncs = self._syncs
        return state

    def lose(self, group: int, numbers: Set[int]) -> bool:
        """Peers are lost. Whether the group's shared state is lost with them."""
        state = self.of(group)
        state.holders -= numbers
        if state.holders or state.revision is None:
            return False
        state.revision = None
        return True

    def forget(self, group: int) -> None:
        """Forgets a group that is empty."""
        self._groups.pop(group, None)

    def done(self, group: int) -> m.Done:
        """What a peer of a group may have missed; the group of a pending peer may not exist."""
        state = self._groups.get(group) or StateHistory()
        return m.Done(
            self.topology,
            self.pending,
            self.were_pending,
            state.syncs,
            state.revision or 0,
            state.last_plan,
            optimized=self.optimized,
            short=state.short,
            finished=self.finished,
        )


def _state_of(was: GroupBefore) -> StateHistory:
    return StateHistory(
        was.revision,
        was.syncs,
        was.last_plan,
        was.holders,
        was.short,
        repeatable=True,  # if in doubt
    )
