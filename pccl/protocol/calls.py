"""What a peer knows of its calls that last longer than one answer of the master."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from pccl.protocol import messages as m
from pccl.protocol.orders import Fail

ENTERING = "while peers were still entering it"
CONFIRMING = "when its result was here, but not yet on all peers"


class State(Enum):
    """Of a collective; see above."""

    VOTING = auto()
    RUNNING = auto()
    COMPLETE = auto()
    ABORTING = auto()


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
    whole: bool = False  # we hold, or held, the whole result
    tx_bytes: int = 0
    rx_bytes: int = 0

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


@dataclass(slots=True)
class Syncing:
    """The synchronisation we stand in: its ops, its streams, the plan that counts."""

    call: int
    serve_op: int
    offer: m.Offer
    plan: m.SyncPlan | None = None
    group: m.Plan | None = None  # the group as it was when the plan was made: slots count in it
    fetch_op: int = 0
    fetched: bool = False  # it has all that it was to fetch
    streams: dict[int, int] = field(default_factory=dict)  # peer -> stream
    ops: set[int] = field(default_factory=set)  # not settled yet
    ending: set[int] = field(default_factory=set)  # told to commit or abort
    outcome: m.SyncResult | Fail | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0

    @property
    def phase(self) -> str:
        """How far it has come, in words."""
        if self.plan is None:
            return ENTERING
        if self.plan.fetch and not self.fetched:
            return "while this peer fetched the content that it lacks"
        return "while peers fetched the content that they lack"
