"""A peer's collective and its states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail

ENTERING = "while peers were still entering it"
MOVING = "while its data was under way"
CONFIRMING = "when its result was here, but not yet on all peers"

Rows: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # for each rank, and from each
NO_ROWS: Rows = ((), ())


class State(Enum):
    """A state of a collective; the value describes it."""

    __hash__ = object.__hash__  # each is one object; Enum hashes names, in Python

    VOTING = "registered with the engine, start vote sent"
    RUNNING = "the master said Started; the engine works"
    COMPLETE = "this peer holds the whole result, and has voted so"
    ABORTING = "this peer cannot or must not complete: what it has overwritten is restored"


class Event(Enum):
    """An event of a collective; the value describes it."""

    __hash__ = object.__hash__

    STARTED = "Started"
    RESULT = "Started, with a result that is not final"
    HELD = "the engine holds the whole result"
    BROKEN = "the engine cannot complete it"
    STOPPED = "Interrupt, or the caller's time is up"
    FAILED = "Finished(no), CallError, or the end of the run"
    LEFT = "its caller has gone"


# An event that is not in the table changes nothing: it has crossed an earlier one.
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
    data: bytes | None = None  # the contribution if it travels with the vote; later the result
    stuck: bool = False
    rows: Rows = NO_ROWS
    pair: tuple[int, ...] = ()  # of a send: who sends to whom
    state: State = State.VOTING
    seq: int = 0
    members: tuple[int, ...] = ()
    settled: bool = False
    outcome: Fail | bool | None = None
    impatient: bool = False  # the caller has withdrawn
    parting: Fail | None = None  # the answer to a caller that does not wait for the outcome
    told: bool = False  # whether that answer was given
    cause: m.Cause = m.Cause.OTHER  # why it could not complete here
    whole: bool = False  # this peer holds, or held, the whole result
    broken: str = ""  # why it could not start here
    stalled: bool = False  # the master knows that others may lack data from this peer
    stream: int = 0  # of a send: that on which it sends
    epoch: int = 0  # in which it has started, if it goes around the rings
    tx_bytes: int = 0
    rx_bytes: int = 0

    def move(self, event: Event) -> bool:
        """Changes the state as the table says. Whether the table has this event."""
        after = TRANSITIONS[self.state].get(event)
        self.state = after or self.state
        return after is not None

    @property
    def passes_on(self) -> bool:
        """Whether this peer holds the result, and others may still need data from it."""
        return self.state is State.COMPLETE and self.outcome is None and self.data is None

    def vote(self, heard: int) -> m.StartVote:
        """The vote to start it."""
        stuck, rows = self.stuck, self.rows
        data, pair = self.data, self.pair
        return m.StartVote(self.call, self.tag, self.work, data, heard, stuck, *rows, pair)

    @property
    def place(self) -> int | str:
        """What no two calls of a peer have at the same time."""
        return f"{self.tag} of {self.pair}" if self.pair else self.tag

    @property
    def title(self) -> str:
        """The call, in words."""
        return f"{self.work} with tag {self.tag}"

    @property
    def open(self) -> m.Open:
        """What a master must know of it that does not know its outcome."""
        votes = {State.RUNNING: None, State.COMPLETE: True, State.ABORTING: False}
        members = self.pair or self.members
        return m.Open(self.seq, members, votes[self.state], self.tag, bool(self.pair))

    @property
    def unstarted(self) -> bool:
        """Whether it waits for its start round."""
        return self.seq == 0 and self.outcome is None

    @property
    def phase(self) -> str:
        """Its progress, in words."""
        if self.seq == 0:
            return ENTERING
        if self.whole:
            return CONFIRMING
        return MOVING if self.pair else "while its data went around the ring"
