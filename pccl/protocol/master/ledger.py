"""What the master knows: peers, groups, agreements that last longer than one vote. No I/O.

The actions that it returns, the records that it keeps, and what all its parts do with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.master.blame import Blame, Verdict
from pccl.protocol.master.effects import Effect, Note, Send
from pccl.protocol.master.election import Transfer
from pccl.protocol.master.nonces import Nonces
from pccl.protocol.master.recovery import EPOCH_SHIFT, INCARNATION_SHIFT, Recovery
from pccl.protocol.master.stragglers import Stragglers
from pccl.protocol.rounds import OpenRounds, Round, RoundId, Vote
from pccl.protocol.topology import Link
from pccl.types import Result

NAMES_MAX = 8  # peers listed by name in such a text
BACKLOG_MAX = 4  # messages of one connection kept during a recovery; two are all a peer has to say
PART_BYTES = 256  # that one tensor in a vote takes in memory, or so, without its texts
WHY_MAX = 2000  # characters of a text that quotes peers; a message holds 4096


Combine: TypeAlias = Callable[[m.Work, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class Journal:
    """What a restarted master remembers: of the run, how often it was started, who was accepted.

    It may be incomplete, if it could not be written in the end: those who come back know more.
    """

    run: int
    incarnation: int
    next_peer: int
    accepted: frozenset[int]
    complete: bool = True


def held(payload: m.Work | m.Offer) -> int:
    """Bytes, or so, that a vote takes in memory: many times what small parts take in a message."""
    parts = payload.parts if isinstance(payload, m.Work) else payload.entries
    texts = sum(len(part.name) + len(part.layout) for part in parts)
    width = 1 if all(part.name.isascii() and part.layout.isascii() for part in parts) else 4
    return PART_BYTES * len(parts) + width * texts


def plain(text: str) -> str:
    """A text that may quote peers, fit for a log, a terminal and a message."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WHY_MAX else text[:WHY_MAX] + " ..."


class Backlog:
    """What was said while a master recovered, to be heard afterwards; within limits."""

    def __init__(self) -> None:
        self.events: list[Callable[[], list[Effect]]] = []
        self._said: Counter[bytes] = Counter()

    def add(self, conn: bytes, event: Callable[[], list[Effect]]) -> bool:
        """Something that a connection has said. False, once, when that is too much."""
        self._said[conn] += 1
        if self._said[conn] <= BACKLOG_MAX:
            self.events.append(event)
        return self._said[conn] != BACKLOG_MAX + 1


@dataclass(slots=True)
class Peer:
    """One registered peer."""

    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    running: int = 0  # collectives it has started and whose outcome is not known
    heard: int = 0  # the greatest seq that it has certainly heard of
    proven: bool = False  # a collective with it has gone around the rings
    seen: str = ""  # the host that the master sees it at
    dial: str = ""  # the password by which it may be dialled


@dataclass(slots=True)
class Running:
    """A collective between its start and its outcome, and who says what of its end."""

    seq: int
    group: int
    members: set[int]
    title: str
    votes: dict[int, bool] = field(default_factory=dict)
    around: tuple[int, tuple[m.Ring, ...]] | None = None  # the epoch and rings that it goes around
    why: str = ""
    cause: m.Cause = m.Cause.OTHER


@dataclass(frozen=True, slots=True)
class Doom:
    """What a peer is told, once, that comes to one of these rounds after their end.

    `seq` is that of a collective that began without this peer's knowledge.
    """

    rounds: frozenset[RoundId]
    result: Result
    why: str
    cause: m.Cause
    seq: int = 0


@dataclass(slots=True)
class Sync:
    """A synchronisation between its election and its end."""

    members: dict[int, Vote[m.Offer]]
    seq: int = 0
    revision: int = 0
    fetching: set[int] = field(default_factory=set)
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    differences: dict[int, tuple[m.Difference, ...]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # of fetches, by who had a part in them
    stalls: int = 0  # how often it was planned anew because somebody could not serve
    refused: frozenset[int] = frozenset()  # who offers too high a revision: out of it all


@dataclass(slots=True)
class Optimisation:
    """Links that are measured, from the vote of all accepted peers to the choice of the rings."""

    calls: dict[int, int]  # of its members
    slots: deque[dict[int, tuple[int, ...]]]  # who is still to measure what comes from whom
    seq: int = 0
    measuring: dict[int, tuple[int, ...]] = field(default_factory=dict)  # those that do so now
    links: dict[tuple[int, int], Link] = field(default_factory=dict)  # from whom to whom
    inflow: dict[int, int] = field(default_factory=dict)  # bytes per second from all at once


@dataclass(slots=True)
class Group:
    """What the peers of one group share."""

    epoch: int = 0
    revision: int | None = None
    syncs: int = 0  # number of its last synchronisation; those of all groups are counted together
    last_plan: int = 0  # seq of the last plan of the last synchronisation
    holders: set[int] = field(default_factory=set)
    short: int = 0  # peers that the last synchronisation lacked to begin with
    grown: bool = False  # whether a peer has joined since the last synchronisation
    sync: Sync | None = None
    rings: tuple[m.Ring, ...] = ()  # as they were optimised
    planned: tuple[m.Ring, ...] = ()  # as they are, in this epoch
    small: deque[int] = field(default_factory=deque)  # seqs of results that somebody may lack
    blame: Blame = field(default_factory=Blame)


class Ledger(ABC):
    """The state of a run, and the actions that are collected while one event is handled.

    Args:
        run: the run's nonce; bulk data of another run is never mistaken for this one's.
        combine: reduces contributions of the work's size, in their order.
        straggler_s: peers that keep others waiting for so many seconds are dropped.
        journal: of the master that was here before, if there was one.
        secret: random bytes that no master has ever used, from which nonces are made.
    """

    def __init__(
        self,
        run: int,
        combine: Combine,
        straggler_s: float | None = None,
        journal: Journal | None = None,
        *,
        secret: bytes,
    ) -> None:
        self.run = run if journal is None else journal.run
        self._combine = combine
        self._nonces = Nonces(secret)
        self._stragglers = Stragglers(straggler_s)
        self.peers: dict[int, Peer] = {}  # in the order of registration: accepted ones come first
        self._accepted_in: dict[int | None, dict[int, None]] = {}  # by group; None: all, in order
        self._by_conn: dict[bytes, int] = {}
        self._groups: dict[int, Group] = {}
        self._rounds = OpenRounds()
        self._running: dict[int, Running] = {}
        self._optimisation: Optimisation | None = None
        self._doomed: dict[int, list[Doom]] = {}
        # accepted peers whose connections broke since anybody who is accepted was last heard of
        self._lost: dict[int, m.PeerInfo] = {}
        self._arithmetic = b""
        self._topology_rounds = 0
        self._pending_rounds = 0
        self._were_pending = False
        self._optimize_rounds = 0
        self._syncs = 0  # of all groups: a group that begins anew repeats no number of before
        self._next_peer = 1 if journal is None else journal.next_peer
        incarnation = 0 if journal is None else journal.incarnation
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._epoch = incarnation << EPOCH_SHIFT  # the latest one of any group
        self._recovery: Recovery | None = None
        if journal is not None and (journal.accepted or not journal.complete):
            self._recovery = Recovery(journal.run, journal.accepted, journal.complete)
        self._backlog = Backlog()
        self._out: list[Effect] = []

    @abstractmethod
    def _remove_all(self, whys: Mapping[int, str], kick: Result | None = None) -> None:
        """Peers leave the run, for a reason each; with `kick` they are told so."""

    @abstractmethod
    def _stalled_sync(self, number: int, stalled: m.Stalled) -> None:
        """A member of a synchronisation cannot serve what its plan says."""

    @abstractmethod
    def _new_epoch(self, group_number: int) -> None:
        """New streams for a group: its membership changed, or a collective failed."""

    # ---- who is there ----

    def _remove(self, number: int, why: str, kick: Result | None = None) -> None:
        self._remove_all({number: why}, kick)

    def _convict(self, group: Group, verdict: Verdict) -> None:
        """Who has to go does, and all are told why."""
        why = group.blame.sentence(verdict, lambda number: self.peers[number].info)
        self._remove(verdict.guilty, why, Result.RANK_CONNECTION_FAILED)

    def _proven(self, group: int) -> set[int]:
        return {number for number in self._accepted(group) if self.peers[number].proven}

    def _accepted(self, group: int | None = None) -> list[int]:
        return list(self._accepted_in.get(group, ()))

    def _size(self, group: int | None = None) -> int:
        return len(self._accepted_in.get(group, ()))

    def _count_in(self, number: int, group: int) -> None:
        for scope in (group, None):
            self._accepted_in.setdefault(scope, {})[number] = None

    def _count_out(self, number: int, group: int) -> None:
        for scope in (group, None):
            del self._accepted_in[scope][number]
            if not self._accepted_in[scope]:
                del self._accepted_in[scope]

    def _names(self, numbers: list[int]) -> str:
        names = [str(self.peers[number].info) for number in numbers[:NAMES_MAX]]
        if len(numbers) > NAMES_MAX:
            names.append(f"{len(numbers) - NAMES_MAX} more")
        return ", ".join(names) or "nobody"

    # ---- what is said ----

    def _send(self, number: int, message: m.MasterMessage) -> None:
        self._out.append(Send(self.peers[number].conn, message))

    def _fail(
        self,
        number: int,
        call: int,
        result: Result,
        why: str,
        cause: m.Cause = m.Cause.OTHER,
        seq: int = 0,
    ) -> None:
        self._send(number, m.CallError(call, result.value, plain(why), cause, seq))

    def _note(self, text: str) -> None:
        self._out.append(Note(plain(text)))

    def _take_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def _answer(self, round_: Round[object], make) -> None:  # type: ignore[no-untyped-def]
        for number, vote in round_.votes.items():
            self._send(number, make(vote.call))
