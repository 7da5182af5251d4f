"""What a peer knows of its run and of itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail

NO_PLAN = m.Plan(0, (), (), 0)
NO_WORLD = m.World(0, 0, 0, 0)

# Messages arrive in order: a peer that has heard of the start of a collective has heard of all
# outcomes before it. So others lack at most as many outcomes as collectives run at once.
OUTCOMES_KEPT = 1024
FAILURE_CHARS_KEPT = 1 << 17  # of their texts: Resume must stay below what a stranger may say


@dataclass(slots=True)
class Knowledge:
    """A peer's knowledge, as told by the master.

    Attributes:
        number: this peer's number; 0 before it is registered.
        run: the run's number.
        accepted: whether it is a member of the run, or was until it was `over`.
        plan: the peers and rings of its group.
        world: the world sizes.
        last_seq: the greatest sequence number that it has heard of.
        done: the rounds whose results it knows.
        veteran: whether it has completed a collective or synchronisation in this run.
        failures: the latest calls that have failed for all members: others may not know it yet.
        over: why it is no longer in the run; None while it is.
    """

    number: int = 0
    run: int = 0
    accepted: bool = False
    plan: m.Plan = NO_PLAN
    world: m.World = NO_WORLD
    last_seq: int = 0
    done: m.Done = field(default_factory=m.Done)
    veteran: bool = False
    failures: deque[m.Failure] = field(default_factory=lambda: deque(maxlen=OUTCOMES_KEPT))
    over: Fail | None = None
    _counted: m.Plan = NO_PLAN
    _members: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the plan's peers."""
        if self._counted is not self.plan:  # once for all calls under this plan
            self._counted, self._members = self.plan, tuple(info.peer for info in self.plan.peers)
        return self._members

    def heard(self, seq: int) -> None:
        """Notes a sequence number."""
        self.last_seq = max(self.last_seq, seq)

    def fails(self, failure: m.Failure) -> None:
        """Notes a call that has failed for all members."""
        self.heard(failure.seq)
        self.failures.append(failure)
        while sum(len(one.why) for one in self.failures) > FAILURE_CHARS_KEPT:
            self.failures.popleft()

    def all_heard(self, seq: int) -> None:
        """All members of the group have heard of a seq, and so of all before it."""
        if self.failures and self.failures[0].seq < seq:
            left = [one for one in self.failures if one.seq > seq or one.is_run_wide]
            self.failures = deque(left, OUTCOMES_KEPT)

    def learn(self, **results: object) -> None:
        """Notes rounds that have ended: changes fields of `done`."""
        self.done = msgspec.structs.replace(self.done, **results)

    def info(self, number: int) -> m.PeerInfo:
        """The addresses of a peer of the group."""
        return next(info for info in self.plan.peers if info.peer == number)
