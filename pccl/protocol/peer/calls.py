"""What a peer knows of a collective, and the states that it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail

ENTERING = "while peers were still entering it"
CONFIRMING = "when its result was here, but not yet on all peers"

# Messages are in order: a peer that has heard of the start of a collective has heard of the outcome
# of all that ended before. So others lack at most as many outcomes as were under way at once.
OUTCOMES_KEPT = 1024


class State(Enum):
    """Of a collective; the value says what is so there."""

    VOTING = "registered with the engine, start vote sent"
    RUNNING = "the master said Started; the engine works"
    COMPLETE = "this peer holds the whole result, and has voted so"
    ABORTING = "this peer cannot or must not complete: what it has overwritten is restored"


class Event(Enum):
    """What moves a collective; the value says it in words."""

    STARTED = "Started"
    RESULT = "Started, with a result that is not final"
    HELD = "the engine holds the whole result"
    BROKEN = "the engine cannot complete it"
    STOPPED = "Interrupt, or the caller's time is up"
    FAILED = "Finished(no), CallError, or the end of the run"
    LEFT = "its caller has gone"


# Whatever is not in the table changes nothing: it has crossed something that came before it.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.VOTING: {
        Event.STARTED: State.RUNNING,
        Event.RESULT: State.COMPLETE,
        Event.BROKEN: State.ABORTING,  # an impossible chunk came early: Started will get a no
        Event.FAILED: State.ABORTING,
        Event.LEFT: State.ABORTING,  # Started will get a no
    },
    State.RUNNING: {
        Event.HELD: State.COMPLETE,
        Event.BROKEN: State.ABORTING,
        Event.STOPPED: State.ABORTING,
        Event.FAILED: State.ABORTING,
    },
    State.COMPLETE: {
        Event.FAILED: State.ABORTING,
        Event.LEFT: State.ABORTING,
    },
    State.ABORTING: {},
}


@dataclass(slots=True)
class Collective:
    """A collective in which we have voted."""

    call: int
    tag: int
    work: m.Work
    data: bytes | None = None  # our contribution where it travels with the vote, then the result
    stuck: bool = False
    state: State = State.VOTING
    seq: int = 0
    members: tuple[int, ...] = ()
    settled: bool = False
    outcome: Fail | bool | None = None
    impatient: bool = False  # the caller waits no longer
    parting: Fail | None = None  # what a caller is told that does not wait for the outcome
    told: bool = False  # whether it has been
    cause: m.Cause = m.Cause.OTHER  # why we could not complete it
    whole: bool = False  # we hold, or held, the whole result
    broken: str = ""  # why it could not even start here
    stalled: bool = False  # the master knows that others may lack what we had to pass on
    tx_bytes: int = 0
    rx_bytes: int = 0

    def move(self, event: Event) -> bool:
        """Goes on by the table; whether the event means anything in this state."""
        after = TRANSITIONS[self.state].get(event)
        self.state = after or self.state
        return after is not None

    @property
    def passes_on(self) -> bool:
        """Whether we hold the result, and others may lack what goes through us."""
        return self.state is State.COMPLETE and self.outcome is None and self.data is None

    def vote(self, heard: int) -> m.StartVote:
        """Our vote to start it."""
        return m.StartVote(self.call, self.tag, self.work, self.data, heard, self.stuck)

    @property
    def title(self) -> str:
        """What was called."""
        return f"{self.work} with tag {self.tag}"

    @property
    def open(self) -> m.Open:
        """What a master has to know of it that does not know its outcome."""
        votes = {State.RUNNING: None, State.COMPLETE: True, State.ABORTING: False}
        return m.Open(self.seq, self.members, votes[self.state], self.tag)

    @property
    def unstarted(self) -> bool:
        """Whether it waits for its start round."""
        return self.seq == 0 and self.outcome is None

    @property
    def phase(self) -> str:
        """How far it has come, in words."""
        if self.seq == 0:
            return ENTERING
        return CONFIRMING if self.whole else "while its data went around the ring"
