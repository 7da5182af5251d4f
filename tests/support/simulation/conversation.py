"""The legal messages between a peer and the master, as the peer sees them: five tables.

The simulation checks every message of every run against them (`Conversation`), and a test demands
that every line of them occurs. docs/internals/protocol.md draws them.

`>` is said by the peer, `<` by the master. A table says, for each state, what may be said there and
which state follows; "over" ends it. What is not in the table must not be said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from pccl.protocol import messages as m

Table: TypeAlias = dict[str, dict[str, str]]
OVER = "over"

MEMBERSHIP: Table = {
    "new": {"> Hello": "asking"},
    "asking": {
        "< Welcome": "pending",
        "< Refused": OVER,
        "> Hello": "asking",  # again, as the connection broke before it was answered
        "> Leave": OVER,
    },
    "pending": {
        "< Plan": "pending",
        "< WorldSizes": "pending",
        "< Admitted": "accepted",
        "> Inquire": "pending",
        "< Waiting": "pending",
        "> Hello": "asking",  # again, on another connection: it has nothing to come back to
        "> Leave": OVER,
        "< Kicked": OVER,
    },
    "accepted": {
        **{f"> {kind.__name__}": "accepted" for kind in m.PeerNotice.__subclasses__()},
        **{f"< {kind.__name__}": "accepted" for kind in m.MasterNotice.__subclasses__()},
        "> Resume": "returning",
        "> Leave": OVER,
        "< Kicked": OVER,
    },
    "returning": {
        "< Plan": "returning",
        "< WorldSizes": "returning",
        "< Admitted": "returning",
        "> Resume": "returning",
        "< Resumed": "accepted",
        "> Leave": OVER,
        "< Refused": OVER,
    },
}

ROUND: Table = {
    "outside": {"> Vote": "waiting"},
    "waiting": {
        "> Vote": "waiting",  # anew, after Resumed
        "> Hurry": "waiting",  # of are_peers_pending alone
        "> Withdraw": "waiting",
        "< Result": OVER,
        "< CallError": OVER,
        "< Failed": OVER,
    },
}

COLLECTIVE: Table = {
    "outside": {"> StartVote": "voting"},
    "voting": {
        "> StartVote": "voting",  # anew, after Resumed
        "> Withdraw": "voting",
        "< Started": "running",
        "< Started, result": "reduced",
        "< Started, final": OVER,
        "< Missed": OVER,
        "< Failed": OVER,
        "< CallError": OVER,
    },
    "reduced": {
        "> FinishVote yes": "complete",
        "> FinishVote no": "aborting",  # its caller has left
    },
    "running": {
        "> Progress": "running",
        "> FinishVote yes": "complete",
        "< Interrupt": "stopping",
        "> FinishVote no": "aborting",
        "> Resume yes": "complete",  # Resume carries the vote
        "> Resume no": "aborting",
    },
    "stopping": {
        "> FinishVote no": "aborting",
        "> Resume no": "aborting",
        "> FinishVote yes": "complete",  # it held the result before it heard
        "> Resume yes": "complete",
    },
    "complete": {
        "> Withdraw": "complete",
        "< Interrupt": "complete",  # they crossed
        "< Finished yes": OVER,
        "< Finished no": OVER,
    },
    "aborting": {
        "> Withdraw": "aborting",
        "< Interrupt": "aborting",  # they crossed
        "< Finished no": OVER,
    },
}

SYNCHRONIZATION: Table = {
    "outside": {"> SyncVote": "voting"},
    "voting": {
        "> SyncVote": "voting",  # anew, after Resumed
        "> Withdraw": "voting",
        "< SyncPlan": "moving",
        "< SyncResult": OVER,
        "< CallError": OVER,
        "< Failed": OVER,
    },
    "moving": {
        "< SyncPlan": "moving",
        "> Progress": "moving",
        "> FetchedVote": "moving",
        "> Withdraw": "moving",
        "> SyncVote": "voting",
        "< SyncResult": OVER,
        "< CallError": OVER,
        "< Failed": OVER,
    },
}

OPTIMIZATION: Table = {
    "outside": {"> OptimizeVote": "voting"},
    "voting": {
        "> OptimizeVote": "voting",  # anew, after Resumed
        "> Withdraw": "voting",
        "< Probe": "measuring",
        "< OptimizeResult": OVER,
        "< CallError": OVER,
        "< Failed": OVER,
    },
    "measuring": {
        "< Probe": "measuring",
        "> Measured": "measuring",
        "> Withdraw": "measuring",
        "> OptimizeVote": "voting",
        "< OptimizeResult": OVER,
        "< CallError": OVER,
        "< Failed": OVER,
    },
}

TABLES = {
    "membership": MEMBERSHIP,
    "round": ROUND,
    "collective": COLLECTIVE,
    "synchronization": SYNCHRONIZATION,
    "optimization": OPTIMIZATION,
}
Line: TypeAlias = tuple[str, str, str]  # table, state, what is said


def lines() -> set[Line]:
    """All that the tables allow."""
    return {
        (name, state, said)
        for name, table in TABLES.items()
        for state, allowed in table.items()
        for said in allowed
    }


@dataclass
class Talk:
    """One call of a peer."""

    table: str
    state: str
    place: tuple[int, ...] = ()


def _is_of(talk: Talk, failure: m.Failure) -> bool:
    """Whether a failure is that of this call."""
    tables = {m.Called.SYNC: "synchronization", m.Called.OPTIMIZE: "optimization"}
    if failure.called in tables:
        return talk.table == tables[m.Called(failure.called)] and talk.state != OVER
    if failure.called != m.Called.COLLECTIVE:
        return (talk.table, talk.state, talk.place) == ("round", "waiting", (failure.called,))
    return _waits_to_start(talk, (failure.tag, *failure.pair))


def _waits_to_start(talk: Talk, place: tuple[int, ...]) -> bool:
    return (talk.table, talk.state, talk.place) == ("collective", "voting", place)


@dataclass
class Conversation:
    """Follows one peer's messages, of both directions, in the order in which it sees them."""

    used: set[Line] = field(default_factory=set)
    membership: Talk = field(default_factory=lambda: Talk("membership", "new"))
    calls: dict[int, Talk] = field(default_factory=dict)
    by_seq: dict[int, Talk] = field(default_factory=dict)
    returned: bool = False  # to a master that was restarted

    def said(self, message: m.PeerMessage) -> None:
        """The peer says something."""
        name = type(message).__name__
        match message:
            case m.TopologyVote(call) | m.PendingVote(call):
                called = m.Called.PENDING
                if isinstance(message, m.TopologyVote):
                    called = m.Called.FINISH if message.finish else m.Called.TOPOLOGY
                self._go(self.calls.setdefault(call, Talk("round", "outside", (called,))), "> Vote")
            case m.StartVote(call, tag):
                place = (tag, *message.pair)  # a send has tags of its own
                talk = self.calls.setdefault(call, Talk("collective", "outside", place))
                self._go(talk, "> StartVote")
            case m.SyncVote(call):
                talk = self.calls.setdefault(call, Talk("synchronization", "outside"))
                self._go(talk, "> SyncVote")
            case m.OptimizeVote(call):
                talk = self.calls.setdefault(call, Talk("optimization", "outside"))
                self._go(talk, "> OptimizeVote")
            case m.Withdraw(call) | m.Hurry(call):
                self._go(self.calls[call], f"> {name}")
            case m.FinishVote(seq, ok):
                self._go(self.by_seq[seq], f"> {name} {'yes' if ok else 'no'}")
            case m.FetchedVote(seq) | m.Measured(seq) | m.Progress(seq):
                self._go(self.by_seq[seq], f"> {name}")
            case m.Resume():
                self._go(self.membership, "> Resume")
                self.returned = True
                for one in message.open:
                    talk = self.by_seq[one.seq]
                    if one.vote is not None and talk.state in ("running", "stopping"):
                        self._go(talk, f"> Resume {'yes' if one.vote else 'no'}")
            case _:
                self._go(self.membership, f"> {name}")

    def heard(self, message: m.MasterMessage) -> None:
        """The peer receives a message. Messages after the end of its membership do not count."""
        if self.membership.state == OVER:
            return
        name = type(message).__name__
        match message:
            case m.TopologyResult(call) | m.PendingResult(call):
                self._go(self.calls[call], "< Result")
            case m.Started(call, seq, _, data, final):
                self.by_seq[seq] = self.calls[call]
                kind = "" if data is None else ", final" if final else ", result"
                self._go(self.calls[call], f"< Started{kind}")
            case m.Interrupt(seq):
                self._go(self.by_seq[seq], "< Interrupt")
            case m.Finished(seq) if seq not in self.by_seq:
                assert self.returned, "the end of what has not begun"  # else the start was lost
            case m.Finished(seq, ok):
                self._go(self.by_seq[seq], f"< {name} {'yes' if ok else 'no'}")
            case m.Missed(small):  # the call that it is about has lost its number with the master
                for talk in self.calls.values():
                    if _waits_to_start(talk, (small.tag,)):
                        self._go(talk, "< Missed")
            case m.Failed(failure) if self.membership.state == "returning":
                for talk in self.calls.values():
                    if _is_of(talk, failure):
                        self._go(talk, "< Failed")
            case m.SyncPlan(call, seq):
                self.by_seq[seq] = self.calls[call]
                self._go(self.calls[call], "< SyncPlan")
            case m.Probe(call, seq):
                self.by_seq[seq] = self.calls[call]
                self._go(self.calls[call], "< Probe")
            case m.SyncResult(call) | m.OptimizeResult(call) | m.CallError(call):
                self._go(self.calls[call], f"< {name}")
            case _:
                self._go(self.membership, f"< {name}")

    def _go(self, talk: Talk, said: str) -> None:
        allowed = TABLES[talk.table].get(talk.state, {})
        assert said in allowed, f"{said} in a {talk.table} that is {talk.state}"
        self.used.add((talk.table, talk.state, said))
        talk.state = allowed[said]
