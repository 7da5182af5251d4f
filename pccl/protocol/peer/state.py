"""A peer's state: its run, and the calls whose callers have left before the outcome.

A caller leaves by an exception, or when its time is up while the master is away; only the master
knows the outcome. The call then ends at once: the engine's op is aborted, and the call is answered
when the engine is settled. But the master may have the vote, and may start the call. Until this
peer knows, the call is an *abandoned call*, and if the call starts, this peer votes no. Meanwhile
this peer sends the master no other call in the same *place* (a collective with the same tag, or the
same round). So every message of the master, even after a restart, clearly belongs to one of the two
calls.

The call may have succeeded for the other peers. If the caller received a time-out, this peer must
leave the run, because peers of a run never continue with different outcomes. If the caller left by
an exception, it received no outcome, so the peer stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.rounds import Kind
from pccl.protocol.tuning import DEFAULTS, Conditions, Settings

NO_PLAN = m.Plan(0, (), (), 0)
NO_WORLD = m.World(0, 0, 0, 0)

# Messages arrive in order: a peer that has heard of a collective's start has heard of all earlier
# outcomes. So other peers lack at most as many outcomes as there are collectives at once.
OUTCOMES_KEPT = 1024
FAILURE_CHARS_KEPT = 1 << 17  # of the failures' texts: the master limits the size of a Resume


@dataclass(slots=True)
class Knowledge:
    number: int = 0  # this peer's number; 0 before it is registered
    run: int = 0  # the run's number
    accepted: bool = False  # whether it is a member of the run, or was until it was `over`
    plan: m.Plan = NO_PLAN  # the peers and rings of its group
    world: m.World = NO_WORLD  # the world sizes
    last_seq: int = 0  # the greatest sequence number that it has heard of
    done: m.Done = field(default_factory=m.Done)  # the rounds whose results it knows
    veteran: bool = False  # whether it has completed a collective or synchronization in this run
    # the latest calls that have failed for all members; others may not know that yet
    failures: deque[m.Failure] = field(default_factory=lambda: deque(maxlen=OUTCOMES_KEPT))
    settings: Settings = DEFAULTS  # this peer's own
    _counted: m.Plan = NO_PLAN
    _members: tuple[int, ...] = ()
    _conditions: tuple[m.Plan | None, Conditions] = (None, Conditions(0, 0, (), True, True))

    @property
    def members(self) -> tuple[int, ...]:
        if self._counted is not self.plan:  # once for all calls under this plan
            self._counted, self._members = self.plan, tuple(info.peer for info in self.plan.peers)
        return self._members

    @property
    def by_rank(self) -> tuple[int, ...]:
        """The peers by rank; a lone peer has a rank, too. From any thread."""
        rings = self.plan.rings
        return rings[0].order if rings else (self.number,)

    @property
    def conditions(self) -> Conditions:
        """The conditions of collectives under the plan; from any thread."""
        (plan, found), now = self._conditions, self.plan
        if plan is not now:
            found = Conditions.of(now, self.number, self.settings)
            self._conditions = now, found
        return found

    def saw(self, seq: int) -> None:
        self.last_seq = max(self.last_seq, seq)

    def fails(self, failure: m.Failure) -> None:
        self.saw(failure.seq)
        self.failures.append(failure)
        while sum(len(one.why) for one in self.failures) > FAILURE_CHARS_KEPT:
            self.failures.popleft()

    def all_saw(self, seq: int) -> None:
        """All members of the group have heard of a seq, and so of all earlier ones."""
        if self.failures and self.failures[0].seq < seq:
            left = [one for one in self.failures if one.seq > seq or one.is_run_wide]
            self.failures = deque(left, OUTCOMES_KEPT)

    def learn(self, **results: object) -> None:
        """Notes rounds that have ended: changes fields of `done`."""
        self.done = replace(self.done, **results)

    def info(self, number: int) -> m.PeerInfo:
        return next(info for info in self.plan.peers if info.peer == number)


Place: TypeAlias = int | str  # a tag, or the name of a round
Enter: TypeAlias = Callable[[], None]


class AbandonedCalls:
    """The abandoned calls of one peer, and the calls that wait for their end."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by abandoned call: its place
        self._late: set[int] = set()  # calls whose callers received a time-out
        self._behind: dict[Place, dict[int, Enter]] = {}  # functions that enter the waiting calls

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, call: int) -> bool:
        return call in self._places

    @property
    def calls(self) -> list[int]:
        return list(self._places)

    def add(self, call: int, place: Place, late: bool) -> None:
        """Adds an abandoned call in a place; `late`: its caller received a time-out."""
        self._places[call] = place
        self._late |= {call} if late else set()

    def late(self, call: int) -> bool:
        return call in self._late

    def succeeded(self, call: int, before: m.Done, done: m.Done) -> str:
        """The name of an abandoned call's round if the round has committed since; else empty.

        The abandoned call took part in the round: the round needed this peer's vote, and this peer
        has made no other call of that kind since.
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
        """True if a call must wait for an abandoned one in its place; `resolve` then enters it."""
        if place not in self._places.values():
            return False
        self._behind.setdefault(place, {})[call] = enter
        return True

    def follow(self, call: int, then: Enter) -> None:
        """Adds a step that follows when a waiting call has entered."""
        for behind in self._behind.values():
            if call in behind:
                behind[call] = partial(_both, behind[call], then)

    def forget(self, call: int) -> bool:
        return any(waiting.pop(call, None) is not None for waiting in self._behind.values())

    def resolve(self, call: int) -> None:
        """Ends an abandoned call: calls that wait for it enter."""
        place = self._places.pop(call, None)
        self._late.discard(call)
        if place is not None and place not in self._places.values():
            for enter in self._behind.pop(place, {}).values():
                enter()

    def clear(self) -> list[int]:
        """Forgets all abandoned calls. Returns the calls that waited for them."""
        waiting = [call for behind in self._behind.values() for call in behind]
        self._places.clear()
        self._late.clear()
        self._behind.clear()
        return waiting


def _both(enter: Enter, then: Enter) -> None:
    enter()
    then()
