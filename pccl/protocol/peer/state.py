"""The state that the parts of a peer share: its knowledge of the run, abandoned calls, streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.peer.effects import CloseStream, Effect, OpenStream, Send
from pccl.protocol.ring import successors
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
    """Calls whose callers have left before the outcome, and the calls that wait for their end.

    A caller leaves by an exception, or when its time is up while the master is away; only the
    master knows the outcome. The call then ends at once: the engine's op is aborted, and the call
    is answered when the engine is settled. But the master may have the vote, and may start the
    call. Until this peer knows, the call is an *abandoned call*, and if the call starts, this peer
    votes no. Meanwhile this peer sends the master no other call in the same *place* (a collective
    with the same tag, or the same round). So every message of the master, even after a restart,
    clearly belongs to one of the two calls.

    The call may have succeeded for the other peers. If the caller received a time-out, this peer
    must leave the run, because peers of a run never continue with different outcomes. If the caller
    left by an exception, it received no outcome, so the peer stays.
    """

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


class Outbox:
    """Collects effects until they are taken."""

    def __init__(self) -> None:
        # whether the master knows this peer on its current connection. If not, this peer may only
        # introduce itself (by a `Send`), and Resume reports everything else.
        self.known = True
        self._effects: list[Effect] = []
        self.do = self._effects.append  # adds an effect

    def send(self, message: m.PeerMessage) -> None:
        """Sends a message, if the master knows this peer."""
        if self.known:
            self._effects.append(Send(message))

    def take(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects


class Streams:
    """This peer's streams: for its rings, for receivers of rows, for sends, and others.

    The rings' streams belong to an epoch. The first collective or synchronization that this peer
    enters in a new epoch closes the old streams and opens new ones, which connect while others
    enter. No call still needs the old streams, because an epoch ends only when no collective is
    running or all are interrupted. Direct streams lead to members that are not next on a ring, and
    belong to the epoch, too. A peer opens them when it first has rows for these members. If a
    direct stream cannot connect, the rows travel around the rings, and no peer is blamed.

    When a collective has committed in an epoch, all members have streams of that epoch. From then
    on, a peer may send data to its successors before the master starts a collective. The successors
    hold the data until the start, and drop it if the epoch ends instead.

    Attributes:
        ring: the streams to this peer's successors, one for each ring of `epoch`.
        epoch: the epoch of these streams.
        proven: the epoch of the last collective that has committed; 0: the last one has failed.
    """

    def __init__(self, knowledge: Knowledge, outbox: Outbox) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._next = 1
        self.ring: tuple[int, ...] = ()
        self.epoch = self.proven = 0
        self._direct: dict[int, int] = {}  # the direct streams of `epoch`, by peer
        self._unreached: set[int] = set()  # peers that no direct stream can be connected to
        self._sends: dict[int, int] = {}  # the streams of sends, by peer
        self._lost: set[int] = set()  # lost streams that are not closed yet

    def open(self, info: m.PeerInfo, shares: int = 1) -> int:
        stream = self._next
        self._next += 1
        self._outbox.do(OpenStream(stream, info, self._knowledge.plan.nonce, shares))
        return stream

    def close(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._outbox.do(CloseStream(stream))

    def renew(self) -> None:
        """Closes the streams of an earlier epoch, and opens those of the current one.

        Direct streams are opened when they are needed.
        """
        plan = self._knowledge.plan
        if self.epoch == plan.epoch:
            return
        self._close_epoch()
        infos = {info.peer: info for info in plan.peers}
        to = successors(plan.rings, self._knowledge.number)
        self.ring, self.epoch = tuple(self.open(infos[n]) for n in to), plan.epoch

    def _close_epoch(self) -> None:
        self._clear()
        self.close((*self.ring, *self._direct.values()))
        self.ring = ()
        self._direct.clear()

    @property
    def ready(self) -> bool:
        """True if the successors hold data sent to them before a collective starts."""
        return bool(self.ring) and self.epoch == self.proven == self._knowledge.plan.epoch

    # ---- to receivers of rows ----

    def direct(self, receivers: Collection[int]) -> tuple[int, ...]:
        """Streams to the receivers of this peer's rows, by rank, opened if necessary.

        0: the rows travel around the rings.
        """
        plan, number = self._knowledge.plan, self._knowledge.number
        infos = {info.peer: info for info in plan.peers}
        near = {*successors(plan.rings, number), *self._unreached}
        found: list[int] = []
        for peer in plan.rings[0].order:
            wanted = peer in receivers and peer not in near
            if wanted and peer not in self._direct and not reach.apart(infos[number], infos[peer]):
                self._direct[peer] = self.open(infos[peer], len(receivers))
            found.append(self._direct.get(peer, 0) if wanted else 0)
        return tuple(found)

    def is_direct(self, stream: int) -> bool:
        return stream in self._direct.values()

    def unreached(self, peer: int) -> None:
        self._unreached.add(peer)

    # ---- of sends ----

    def of_send(self, peer: int) -> int:
        """The stream for sends to a peer; opened if necessary. It does not depend on the epoch."""
        self._clear()
        if peer not in self._sends:
            self._sends[peer] = self.open(self._knowledge.info(peer))
        return self._sends[peer]

    def keep(self, peers: Set[int]) -> None:
        self._clear()
        self._unreached.intersection_update(peers)
        gone = self._sends.keys() - peers
        self.close(self._sends.pop(peer) for peer in sorted(gone))

    def lost(self, stream: int) -> None:
        """A direct stream or a send's stream is lost; another is opened when it is needed."""
        for streams in (self._direct, self._sends):
            for peer in [peer for peer, each in streams.items() if each == stream]:
                self._lost.add(streams.pop(peer))

    def _clear(self) -> None:
        self.close(sorted(self._lost))
        self._lost.clear()

    def end(self) -> None:
        """Closes the streams of the epoch and of sends for good."""
        self._close_epoch()
        self.keep(frozenset())


class PeerContext:
    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge, self.outbox = knowledge, Outbox()
        self.streams = Streams(knowledge, self.outbox)
        self.abandoned = AbandonedCalls()
        # calls that the master was asked to take back, and why, until it answers
        self.withdrawals: dict[int, str] = {}


class PeerPart:
    def __init__(self, context: PeerContext) -> None:
        self._knowledge, self._outbox = context.knowledge, context.outbox
        self._streams, self._abandoned = context.streams, context.abandoned
        self._withdrawals = context.withdrawals
