"""The master's state machine: who is in the run, and what all have agreed on. No I/O.

Theory of operation ------------------- The caller feeds three kinds of events, `hello`, `received`
and `disconnected`, each naming a connection, and performs the actions that come back, in order. A
connection stands for one peer for ever: a peer that comes back is a new peer.

A peer is *pending* from its Hello until the accepted peers admit it, then *accepted* until it
leaves, is kicked or lost. Accepted peers vote in rounds (rounds.py). Two kinds of agreement last
longer than one vote:

- A *running collective* begins when its start round commits and ends with one outcome for all. It
  commits if and only if every surviving member holds the whole result. When a member is lost or
  votes that it cannot complete, the group's *epoch* ends: every running collective of the group is
  interrupted, that is, members that have not voted yet stop and say whether they hold the result.
  So a collective that all survivors completed still commits.
- A *synchronisation* begins when its round commits and the election (election.py) has found who
  receives what. It ends when all receivers have verified what they fetched. When a member is lost,
  or a fetch fails, the election is repeated over the offers of the survivors: nothing has been
  overwritten yet, so these still hold.

A master that is restarted has an empty state but for its journal: who was accepted. It waits until
these have come back and have said what they know (`resume`), or until its patience ends, and goes
on from what recovery.py makes of it. Whatever else arrives meanwhile is kept for later. A master
without a journal does the same for the run of the first peer that comes back to it.

Invariants: one outcome for each seq; sequence numbers, peer numbers and epochs never repeat;
revisions never go back while a holder lives; a message that is impossible in a peer's state drops
that peer and nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.election import Decision, Rejection, Transfer, elect
from pccl.protocol.recovery import (
    INCARNATION_SHIFT,
    Before,
    Unresolved,
    outdated,
    plausible,
    reconstruct,
)
from pccl.protocol.ring import plan_rings
from pccl.protocol.rounds import Kind, OpenRounds, Round, RoundId, Vote
from pccl.types import Result

# What a withdrawn call fails with: nothing happened, and it can be made again.
WITHDRAWN = {
    Kind.TOPOLOGY: Result.UPDATE_TOPOLOGY_FAILED,
    Kind.PENDING: Result.RANK_CONNECTION_LOST,
    Kind.SYNC: Result.RANK_CONNECTION_LOST,
    Kind.START: Result.RANK_CONNECTION_LOST,
}
RECOVERY_S = (
    5.0  # a restarted master waits so long for peers of before; they try several times a second
)
UNJOURNALED_RECOVERY_S = 1.0  # without a journal nobody knows the other groups: they may be slower
GIVEN_UP = "it was given up as lost, or did not come back in time: connect again"
SYNC_ATTEMPTS_MAX = 3  # failed fetches in one synchronisation that a peer may have a part in
OPEN_MAX = 4096  # rounds and collectives in which one peer stands at the same time
BACKLOG_MAX = 4  # messages of one connection kept during a recovery; two are all a peer has to say
WHY_MAX = 2000  # characters of a text that quotes peers; a message holds 4096
NAMES_MAX = 8  # peers listed by name in such a text
HOST = re.compile(r"[A-Za-z0-9._:%-]{1,200}")  # a name or an address: it becomes an endpoint
IPC_MAX = 100  # characters of a socket's path


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection."""

    conn: bytes
    message: m.MasterMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a connection: nothing that still comes from it counts. `why` is for the log."""

    conn: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator wants to read in the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to the journal that this peer is accepted, before anything that follows is sent."""

    info: m.PeerInfo


@dataclass(frozen=True, slots=True)
class Forget:
    """Write to the journal that a peer is gone."""

    number: int


Action = Send | Drop | Note | Remember | Forget


@dataclass(frozen=True, slots=True)
class Journal:
    """What a restarted master remembers: of the run, how often it was started, who was accepted."""

    run: int
    incarnation: int
    next_peer: int
    accepted: frozenset[int]


def plain(text: str) -> str:
    """A text that may quote peers, fit for a log, a terminal and a message."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WHY_MAX else text[:WHY_MAX] + " ..."


@dataclass(slots=True)
class Recovery:
    """Between a restart and the end of waiting for the peers of before."""

    expected: set[int]
    journaled: bool
    resumes: dict[int, m.Resume] = field(default_factory=dict)
    conns: dict[int, bytes] = field(default_factory=dict)
    backlog: list[Callable[[], list[Action]]] = field(default_factory=list)
    said: dict[bytes, int] = field(default_factory=dict)  # by each connection, in the backlog
    began_s: float | None = None


@dataclass(slots=True)
class Peer:
    """One registered peer."""

    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    running: int = 0  # collectives it has started and whose outcome is not known


@dataclass(slots=True)
class Running:
    """A collective between its start and its outcome, and who says what of its end."""

    seq: int
    group: int
    members: set[int]
    title: str
    votes: dict[int, bool] = field(default_factory=dict)
    why: str = ""


@dataclass(slots=True)
class Sync:
    """A synchronisation between its election and its end."""

    members: dict[int, Vote[m.Offer]]
    seq: int = 0
    revision: int = 0
    fetching: set[int] = field(default_factory=set)
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # of fetches, by who had a part in them


@dataclass(slots=True)
class Group:
    """What the peers of one group share."""

    epoch: int = 0
    revision: int | None = None
    syncs: int = 0
    last_plan: int = 0  # seq of the last plan of the last synchronisation
    holders: set[int] = field(default_factory=set)
    sync: Sync | None = None


class Master:
    """The master of one run.

    Args:
        run: the run's nonce; bulk data of another run is never mistaken for this one's.
        straggler_s: peers that keep others waiting for so many seconds are dropped (`tick`).
        journal: of the master that was here before, if there was one.
    """

    def __init__(
        self, run: int, straggler_s: float | None = None, journal: Journal | None = None
    ) -> None:
        self.run = run if journal is None else journal.run
        self._straggler_s = straggler_s
        self._waiting_since: dict[object, float] = {}  # round or seq -> when others began to wait
        self.peers: dict[int, Peer] = {}  # in the order of registration: accepted ones come first
        self._accepted_in: dict[int | None, dict[int, None]] = {}  # by group; None: all, in order
        self._by_conn: dict[bytes, int] = {}
        self._groups: dict[int, Group] = {}
        self._rounds = OpenRounds()
        self._running: dict[int, Running] = {}
        self._doomed: dict[int, tuple[frozenset[RoundId], Result, str]] = {}
        self._arithmetic = b""
        self._topology_rounds = 0
        self._pending_rounds = 0
        self._were_pending = False
        self._epoch = 0  # the latest one of any group
        self._next_peer = 1 if journal is None else journal.next_peer
        incarnation = 0 if journal is None else journal.incarnation
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._recovery: Recovery | None = None
        if journal is not None and journal.accepted:
            self._recovery = Recovery(set(journal.accepted), journaled=True)
        self._out: list[Action] = []

    # ---- events ----

    def hello(self, conn: bytes, hello: m.Hello, host: str) -> list[Action]:
        """A peer's first message, from a connection whose other end is seen as `host`."""
        if self._postponed(conn, lambda: self.hello(conn, hello, host)):
            return self._take()
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], "it said hello twice", Result.INTERNAL_ERROR)
            return self._take()
        address = (hello.host or host, hello.port, hello.ipc, hello.machine, hello.curve)
        info = m.PeerInfo(0, hello.group, *address)
        why = self._refusal(hello.protocol, hello.version, hello.arithmetic, info)
        if why:
            self._refuse(conn, why, Result.INVALID_USAGE)
        else:
            self._register(conn, info, hello.arithmetic)
        return self._take()

    def received(self, conn: bytes, message: m.PeerMessage) -> list[Action]:
        """Any later message of a peer."""
        if self._postponed(conn, lambda: self.received(conn, message)):
            return self._take()
        number = self._by_conn.get(conn)
        if number is None:
            self._out.append(Drop(conn, "its first message was not a hello"))
            return self._take()
        if isinstance(message, m.Leave):
            self._remove(number, "it left")
        elif not self.peers[number].accepted:
            self._remove(number, "it voted while it was pending", Result.INVALID_USAGE)
        else:
            self._vote(number, message)
        return self._take()

    def disconnected(self, conn: bytes, why: str) -> list[Action]:
        """A connection is gone: the only evidence of a peer's death that counts."""
        if self._recovery is not None:
            self._recovery.backlog.append(lambda: self.disconnected(conn, why))
        elif conn in self._by_conn:
            self._remove(self._by_conn[conn], why)
        return self._take()

    def farewell(self) -> list[Action]:
        """The master ends for good: nobody needs to wait for it."""
        for number in self.peers:
            why = "the master was stopped"
            self._send(number, m.Kicked(Result.MASTER_CONNECTION_FAILED.value, why))
        return self._take()

    def rejected(self, conn: bytes, why: str) -> list[Action]:
        """A connection sent bytes that are no message."""
        if self._postponed(conn, lambda: self.rejected(conn, why)):
            return self._take()
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], why, Result.INTERNAL_ERROR)
        else:
            self._out.append(Drop(conn, why))
        return self._take()

    def _postponed(self, conn: bytes, event: Callable[[], list[Action]]) -> bool:
        """Keeps what a connection says during a recovery for later, within limits."""
        recovery = self._recovery
        if recovery is None:
            return False
        said = recovery.said[conn] = recovery.said.get(conn, 0) + 1
        if said <= BACKLOG_MAX:
            recovery.backlog.append(event)
        elif said == BACKLOG_MAX + 1:
            why = "it said too much while the master waited for the peers of before"
            self._out.append(Drop(conn, why))
            recovery.backlog.append(lambda: self.rejected(conn, why))
        return True

    def knows(self, conn: bytes) -> bool:
        """Whether the connection is that of a peer of the run."""
        return conn in self._by_conn

    # ---- after a restart ----

    @property
    def recovering(self) -> bool:
        """Whether peers of before are still waited for; `tick` must be called now and then."""
        return self._recovery is not None

    def resume(self, conn: bytes, resume: m.Resume, host: str) -> list[Action]:
        """A peer of before is back, on a connection whose other end is seen as `host`."""
        number = resume.info.peer
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], "it came back twice", Result.INTERNAL_ERROR)
            return self._take()
        info = msgspec.structs.replace(resume.info, host=resume.info.host or host)
        why = self._refusal(resume.protocol, resume.version, resume.arithmetic, info)
        if not plausible(resume):
            why = "it comes back with impossible numbers"
        if not why and self._recovery is None and not self.peers and self._next_peer == 1:
            self.run = resume.run
            self._recovery = Recovery(set(), journaled=False)
            self._note("a run comes back that this master does not know: its peers will tell")
        recovery = self._recovery
        if recovery is None and not resume.accepted and not why:
            self._register(conn, info, resume.arithmetic)  # it was pending: nothing is lost
            return self._take()
        if resume.run != self.run:
            why = why or "the master has started another run: connect again"
        elif (
            recovery is None
            or number in recovery.resumes
            or conn in recovery.conns.values()
            or (recovery.journaled and resume.known and number not in recovery.expected)
        ):
            why = why or GIVEN_UP
        if why or recovery is None:
            self._refuse(conn, why)
            return self._take()
        resume = msgspec.structs.replace(resume, info=info)
        recovery.resumes[number] = resume
        recovery.conns[number] = conn
        self._arithmetic = resume.arithmetic
        if not recovery.journaled:
            recovery.expected |= {info.peer for info in resume.known}
        self._note(f"{resume.info} is back")
        if recovery.journaled and recovery.expected <= recovery.resumes.keys():
            self._recover()
        return self._take()

    def _refuse(
        self, conn: bytes, why: str, result: Result = Result.MASTER_CONNECTION_FAILED
    ) -> None:
        why = plain(why)
        self._out.append(Send(conn, m.Refused(result.value, why)))
        self._out.append(Drop(conn, why))

    def _recover(self) -> None:
        """Nobody else is waited for: goes on from what those who are back have said."""
        recovery, self._recovery = self._recovery, None
        assert recovery is not None
        for number in sorted(recovery.expected - recovery.resumes.keys()):
            self._out.append(Forget(number))
            self._note(f"peer {number} did not come back")
        for number in sorted(outdated(recovery.resumes)):
            del recovery.resumes[number]
            self._refuse(recovery.conns[number], GIVEN_UP)
        if recovery.resumes:
            self._restore(reconstruct(recovery.resumes), recovery.conns)
        else:
            self._note("nobody came back: the last holder of any shared state is gone")
        out = self._take()
        for event in recovery.backlog:
            out += event()
        self._out = out
        if not self._accepted():
            self._admit()

    def _restore(self, before: Before, conns: dict[int, bytes]) -> None:
        for number, info in (before.accepted | before.pending).items():
            self.peers[number] = Peer(conns[number], info, number in before.accepted)
            self._by_conn[conns[number]] = number
            if number in before.accepted:
                self._count_in(number, info.group)
                self._out.append(Remember(info))
        self._next_peer = max(self._next_peer, before.next_peer)
        incarnation = max(self._next_seq >> INCARNATION_SHIFT, before.incarnation + 1)
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._topology_rounds, self._pending_rounds = before.topology, before.pendings
        self._were_pending = before.were_pending
        for group_number, was in before.groups.items():
            self._groups[group_number] = Group(
                was.epoch, was.revision, was.syncs, was.last_plan, was.holders
            )
            if not was.holders:
                self._note(f"the last holder of group {group_number}'s shared state is gone")
        self._publish_world()
        for group_number in before.groups:
            self._new_epoch(group_number)
        for number in before.accepted:
            self._send(number, m.Admitted(self._done(before.accepted[number].group)))
        for seq in sorted(before.collectives):
            self._resolve(seq, before.collectives[seq])
        self._epoch = max(self._epoch, *(group.epoch for group in self._groups.values()))
        for number in self.peers:
            group_number = self.peers[number].info.group
            self._send(number, m.Resumed(self._done(group_number)))

    def _resolve(self, seq: int, was: Unresolved) -> None:
        why = "the master was restarted"
        if was.outcome is not None:
            for number in sorted(was.open):
                self._send(number, m.Finished(seq, was.outcome, "" if was.outcome else why))
            return
        running = Running(seq, was.group, was.members, f"collective {seq}", was.votes)
        self._run(running)
        self._interrupt([running], why)

    def _done(self, group_number: int) -> m.Done:
        group = self._groups.get(group_number, Group())  # of a pending peer there may be none
        return m.Done(
            self._topology_rounds,
            self._pending_rounds,
            self._were_pending,
            group.syncs,
            group.revision or 0,
            group.last_plan,
        )

    # ---- membership ----

    def _register(self, conn: bytes, info: m.PeerInfo, arithmetic: bytes) -> None:
        number = self._next_peer
        self._next_peer += 1
        info = msgspec.structs.replace(info, peer=number)
        self.peers[number] = Peer(conn, info)
        self._by_conn[conn] = number
        self._arithmetic = arithmetic
        self._send(number, m.Welcome(number, self.run))
        self._note(f"{info} of group {info.group} registered")
        if not self._size():
            self._admit()

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

    def _refusal(self, protocol: int, version: str, arithmetic: bytes, info: m.PeerInfo) -> str:
        if protocol != m.PROTOCOL_VERSION:
            return (
                f"this peer (pccl {version}) speaks protocol version {protocol}, "
                f"the master version {m.PROTOCOL_VERSION}: install the same version of pccl"
            )
        if self.peers and arithmetic != self._arithmetic:
            return (
                "this machine's arithmetic differs from that of the peers in the run (the kernel "
                "self-test gave other bits), so results could not be bit-identical: rebuild pccl, "
                "compare `pccl doctor`"
            )
        if not HOST.fullmatch(info.host):
            return f"it asks to be reached at {info.host!r}, which is no host (PCCL_ADVERTISE)"
        if len(info.ipc) > IPC_MAX or not (info.ipc + info.machine).isprintable():
            return f"it listens at {info.ipc!r} on machine {info.machine!r}, which cannot be"
        return ""

    def _admit(self) -> None:
        """Accepts all pending peers."""
        fresh = [number for number, peer in self.peers.items() if not peer.accepted]
        if not fresh:
            return
        for number in fresh:
            self.peers[number].accepted = True
            self._count_in(number, self.peers[number].info.group)
        for group in {self.peers[number].info.group: None for number in fresh}:
            self._new_epoch(group)
        self._publish_world()
        for number in fresh:
            self._out.append(Remember(self.peers[number].info))
            self._send(number, m.Admitted(self._done(self.peers[number].info.group)))
            self._note(f"{self.peers[number].info} accepted")

    def _remove(self, number: int, why: str, kick: Result | None = None) -> None:
        """A peer leaves the run; with `kick` it is told so."""
        why = plain(why)
        if kick is not None:
            self._send(number, m.Kicked(kick.value, why))
        peer = self.peers.pop(number)
        del self._by_conn[peer.conn]
        self._doomed.pop(number, None)
        self._out.append(Drop(peer.conn, why))
        title = f"{peer.info}: {why}"
        if peer.accepted:
            self._count_out(number, peer.info.group)
        self._note(f"{title}; {self._size()} peers remain")
        if not peer.accepted:
            return
        self._out.append(Forget(number))
        self._publish_world()
        for round_ in list(self._rounds.of(number).values()):
            self._rounds.take_back(number, round_)
        self._leave_group(number, peer.info.group, title)
        for round_ in self._rounds:
            if round_.id.group in (None, peer.info.group) and round_ in self._rounds:
                round_.lost.append(title)
                self._evaluate(round_)
        if not self._size():
            self._admit()

    def _leave_group(self, number: int, group_number: int, title: str) -> None:
        group = self._groups[group_number]
        group.holders.discard(number)
        if not group.holders and group.revision is not None:
            group.revision = None
            self._note(f"the last holder of group {group_number}'s shared state is gone")
        self._new_epoch(group_number)
        for running in self._of_group(group_number):
            running.members.discard(number)
            running.votes.pop(number, None)
        self._interrupt(self._of_group(group_number), f"lost {title}")
        if group.sync is not None and group.sync.members.pop(number, None) is not None:
            self._elect(group_number, group.sync)
        if not self._size(group_number):
            self._groups.pop(group_number, None)

    def _new_epoch(self, group_number: int) -> None:
        """New streams for a group: its membership changed, or a collective failed."""
        group = self._groups.setdefault(group_number, Group())
        self._epoch += 1
        group.epoch = self._epoch
        peers = tuple(self.peers[number].info for number in self._accepted(group_number))
        plan = m.Plan(group.epoch, peers, plan_rings(peers), self._topology_rounds)
        for peer in peers:
            self._send(peer.peer, plan)

    def _publish_world(self) -> None:
        groups = [group for group in self._accepted_in if group is not None]
        largest = max(map(self._size, groups), default=0)
        for group in groups:
            world = m.World(self._size(), self._size(group), len(groups), largest)
            message = m.Membership(world)
            for number in self._accepted_in[group]:
                self._send(number, message)

    # ---- rounds ----

    def _vote(self, number: int, message: m.PeerMessage) -> None:
        group = self.peers[number].info.group
        match message:
            case m.TopologyVote(call):
                self._enter(number, RoundId(Kind.TOPOLOGY, None), call, None)
            case m.PendingVote(call):
                self._enter(number, RoundId(Kind.PENDING, None), call, None)
            case m.StartVote(call, tag, work):
                self._enter(number, RoundId(Kind.START, group, tag), call, work)
            case m.SyncVote(call, offer) if not self._synchronises(number):
                self._enter(number, RoundId(Kind.SYNC, group), call, offer)
            case m.FinishVote(seq, ok, why):
                self._finish(number, seq, ok, why)
            case m.FetchedVote(seq, ok, why):
                self._fetched(number, seq, ok, why)
            case m.Withdraw(call, seq):
                self._withdraw(number, call, seq)
            case _:
                why = f"it sent a {type(message).__name__} out of turn"
                self._remove(number, why, Result.INTERNAL_ERROR)

    def _enter(self, number: int, round_id: RoundId, call: int, payload: object) -> None:
        doom = self._doomed.get(number)
        if doom is not None and round_id in doom[0]:
            del self._doomed[number]
            self._fail(number, call, doom[1], doom[2], m.Cause.MISMATCH)
            return
        stands_in = self._rounds.of(number)
        if round_id in stands_in:
            why = f"it entered {stands_in[round_id].describe(number)} twice"
            self._remove(number, why, Result.INVALID_USAGE)
            return
        if len(stands_in) + self.peers[number].running >= OPEN_MAX:
            self._fail(number, call, Result.INVALID_USAGE, f"{OPEN_MAX} calls wait already")
            return
        group = self.peers[number].info.group
        round_ = self._rounds.vote(number, group, round_id, Vote(call, payload))
        if not (self._mismatch(round_) or self._conflict(number, round_)):
            self._evaluate(round_)

    def _mismatch(self, round_: Round[object]) -> bool:
        """Fails a start round whose votes ask for different work."""
        if round_.id.kind is not Kind.START:
            return False
        first, mine = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        if first.payload == mine.payload:
            return False
        why = "the peers do not ask for the same: " + self._who([round_])
        self._doom([round_], Result.INVALID_ARGUMENT, why)
        return True

    def _conflict(self, number: int, mine: Round[object]) -> bool:
        """Fails two rounds that wait for each other's voters, which can then never meet."""
        other = self._rounds.in_the_way(number, mine)
        if other is None:
            return False
        why = "the peers stand in calls that can never meet: " + self._who([mine, other])
        self._doom([mine, other], Result.INVALID_USAGE, why)
        return True

    def _who(self, rounds: Iterable[Round[object]]) -> str:
        """Who called what: of each round who came first, and who came last."""
        calls = []
        for round_ in rounds:
            voters = list(round_.votes)
            named = voters if len(voters) <= NAMES_MAX else [*voters[: NAMES_MAX - 1], voters[-1]]
            calls += [f"{self.peers[n].info} called {round_.describe(n)}" for n in named]
            if len(voters) > len(named):
                calls.append(f"so did {len(voters) - len(named)} more")
        return "; ".join(calls)

    def _doom(self, rounds: list[Round[object]], result: Result, why: str) -> None:
        """Ends rounds with an error: for all voters now, for other members when they come."""
        why = plain(why)
        self._note(why)
        ids = frozenset(round_.id for round_ in rounds)
        voters = {number for round_ in rounds for number in round_.votes}
        for round_ in rounds:
            self._rounds.close(round_)
            for number, vote in round_.votes.items():
                self._fail(number, vote.call, result, why, m.Cause.MISMATCH)
            for number in self._accepted(round_.id.group):
                if number not in voters:
                    self._doomed[number] = (ids, result, why)

    def _evaluate(self, round_: Round[object]) -> None:
        if len(round_.votes) == self._size(round_.id.group):
            self._rounds.close(round_)
            match round_.id.kind:
                case Kind.TOPOLOGY:
                    count = self._topology_rounds = self._topology_rounds + 1
                    self._admit()
                    self._answer(round_, lambda call: m.TopologyResult(call, count))
                case Kind.PENDING:
                    count = self._pending_rounds = self._pending_rounds + 1
                    pending = self._were_pending = len(self.peers) > self._size()
                    self._answer(round_, lambda call: m.PendingResult(call, pending, count))
                case Kind.START:
                    self._start(round_)
                case Kind.SYNC:
                    self._begin_sync(round_)

    def _answer(self, round_: Round[object], make) -> None:  # type: ignore[no-untyped-def]
        for number, vote in round_.votes.items():
            self._send(number, make(vote.call))

    # ---- patience ----

    def _withdraw(self, number: int, call: int, seq: int) -> None:
        """A caller waits no longer. Nothing happens if its answer is on the way already."""
        group_number = self.peers[number].info.group
        sync = self._groups[group_number].sync
        running = self._running.get(seq)
        if running is not None and number in running.members:
            why = f"{self.peers[number].info} waited no longer for {self._missing_of(running)}"
            self._interrupt([running], why)
        elif sync is not None and number in sync.members and sync.members[number].call == call:
            self._fail_sync(group_number, f"{self.peers[number].info} waited no longer")
        else:
            self._take_back(number, call)

    def _take_back(self, number: int, call: int) -> None:
        for round_ in list(self._rounds.of(number).values()):
            if round_.votes[number].call == call:
                why = f"waited for {self._names(self._absent(round_))}"
                self._rounds.take_back(number, round_)
                self._fail(number, call, WITHDRAWN[round_.id.kind], why, m.Cause.TIMEOUT)

    def _absent(self, round_: Round[object]) -> list[int]:
        members = self._accepted(round_.id.group)
        return [number for number in members if number not in round_.votes]

    def _missing_of(self, running: Running) -> str:
        return self._names(sorted(running.members - running.votes.keys()))

    def _names(self, numbers: list[int]) -> str:
        names = [str(self.peers[number].info) for number in numbers[:NAMES_MAX]]
        if len(numbers) > NAMES_MAX:
            names.append(f"{len(numbers) - NAMES_MAX} more")
        return ", ".join(names) or "nobody"

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: ends a recovery; drops stragglers where there is a limit for them."""
        if self._recovery is not None:
            self._tick_recovery(self._recovery, now_s)
            return self._take()
        if self._straggler_s is None:
            return []
        waited: set[object] = set()
        stragglers: dict[int, str] = {}
        for round_ in self._rounds:
            waited.add(round_.id)
            if now_s - self._waiting_since.setdefault(round_.id, now_s) > self._straggler_s:
                for number in self._absent(round_):
                    stragglers[number] = f"{round_.id.kind.value}()"
        for running in self._running.values():
            waited.add(running.seq)
            late = running.members - running.votes.keys()
            if not running.votes:
                self._waiting_since[running.seq] = now_s  # nobody waits for anybody yet
            elif now_s - self._waiting_since.setdefault(running.seq, now_s) > self._straggler_s:
                for number in late:
                    stragglers[number] = running.title
        for gone in self._waiting_since.keys() - waited:
            del self._waiting_since[gone]
        for number in sorted(stragglers):
            if number in self.peers:
                why = f"others waited for it in {stragglers[number]} for {self._straggler_s:g} s"
                self._remove(number, why, Result.RANK_CONNECTION_FAILED)
        return self._take()

    def _tick_recovery(self, recovery: Recovery, now_s: float) -> None:
        if recovery.began_s is None:
            recovery.began_s = now_s
        waited_s = now_s - recovery.began_s
        complete = recovery.expected <= recovery.resumes.keys()
        if waited_s > RECOVERY_S or (complete and waited_s > UNJOURNALED_RECOVERY_S):
            self._recover()

    # ---- collectives ----

    def _start(self, round_: Round[object]) -> None:
        group_number = round_.id.group
        assert group_number is not None
        if (
            len(round_.votes) == 1
        ):  # peers that know they are alone do not vote: it has just happened
            lost = "; ".join(round_.lost) or "the others left before it voted"
            why = f"this peer is alone in its group: {lost}"
            for number, vote in round_.votes.items():
                self._fail(number, vote.call, Result.RANK_CONNECTION_LOST, why)
            return
        seq, epoch = self._take_seq(), self._groups[group_number].epoch
        title = round_.describe(next(iter(round_.votes)))
        self._run(Running(seq, group_number, set(round_.votes), title))
        self._answer(round_, lambda call: m.Started(call, seq, epoch))

    def _run(self, running: Running) -> None:
        self._running[running.seq] = running
        for number in running.members:
            self.peers[number].running += 1

    def _of_group(self, group_number: int) -> list[Running]:
        return [running for running in self._running.values() if running.group == group_number]

    def _finish(self, number: int, seq: int, ok: bool, why: str) -> None:
        running = self._running.get(seq)
        if running is None and seq < self._first_seq:
            return  # of the time before a restart, and resolved since
        if running is None or number not in running.members or number in running.votes:
            self._remove(number, f"it voted on collective {seq} out of turn", Result.INTERNAL_ERROR)
            return
        running.votes[number] = ok
        if ok or running.why:
            self._settle(running)
        else:
            self._new_epoch(running.group)
            why = f"{self.peers[number].info} could not complete: {why}"
            self._interrupt(self._of_group(running.group), why)

    def _interrupt(self, collectives: list[Running], why: str) -> None:
        """Whoever has not voted on these must do so now."""
        why = plain(why)
        for running in collectives:
            if not running.why:
                running.why = why
                for number in running.members - running.votes.keys():
                    self._send(number, m.Interrupt(running.seq, why))
            self._settle(running)

    def _settle(self, running: Running) -> None:
        """The one outcome, once all surviving members have voted."""
        if len(running.votes) == len(running.members):  # only members vote
            del self._running[running.seq]
            ok = all(running.votes.values())
            finished = m.Finished(running.seq, ok, "" if ok else running.why)
            for number in sorted(running.members):
                self.peers[number].running -= 1
                self._send(number, finished)

    # ---- shared state ----

    def _begin_sync(self, round_: Round[object]) -> None:
        group_number = round_.id.group
        assert group_number is not None
        members = {n: round_.votes[n] for n in self._accepted(group_number)}
        sync = Sync(members)  # type: ignore[arg-type]
        self._groups[group_number].sync = sync
        self._elect(group_number, sync)

    def _elect(self, group_number: int, sync: Sync) -> None:
        """Decides who sends what to whom among the members that are left, and tells them."""
        group = self._groups[group_number]
        if not sync.members:
            group.sync = None
            return
        offers = {number: vote.payload for number, vote in sync.members.items()}
        joined = frozenset(sync.members.keys() - group.holders)
        try:
            decision = elect(offers, group.revision, joined, sync.failures)
        except Rejection as error:
            group.sync = None
            for number, vote in sync.members.items():
                self._fail(number, vote.call, Result.INVALID_ARGUMENT, str(error))
            return
        if decision.kicks:
            for number in decision.kicks:
                del sync.members[number]
            for number, why in decision.kicks.items():
                self._remove(number, why, Result.INVALID_ARGUMENT)
            self._elect(group_number, sync)  # among those whose shared state is the same
            return
        sync.revision = decision.revision
        sync.transfers, sync.fetching = decision.transfers, set(decision.transfers)
        if sync.fetching or sync.seq:  # a plan that was sent before must be replaced in any case
            sync.seq = self._take_seq()
            self._send_plans(sync, decision)
        if not sync.fetching:
            self._end_sync(group, sync)

    def _send_plans(self, sync: Sync, decision: Decision) -> None:
        for number, vote in sync.members.items():
            own = decision.transfers.get(number)
            serve = tuple(p for p, t in decision.transfers.items() if number in t.holders)
            plan = m.SyncPlan(
                vote.call,
                sync.seq,
                serve,
                own.holders if own else (),
                own.entries if own else (),
                own.digests if own else (),
            )
            self._send(number, plan)

    def _fetched(self, number: int, seq: int, ok: bool, why: str) -> None:
        group_number = self.peers[number].info.group
        group = self._groups[group_number]
        sync = group.sync
        if sync is None or sync.seq != seq or number not in sync.fetching:
            if seq >= self._next_seq:
                self._remove(
                    number, f"it voted on transfer {seq} out of turn", Result.INTERNAL_ERROR
                )
            return  # a transfer that a newer plan made void, while the vote was on its way
        if ok:
            sync.fetching.discard(number)
            if not sync.fetching:
                self._end_sync(group, sync)
            return
        self._note(f"{self.peers[number].info} could not fetch the shared state: {why}")
        suspects = (number, *sync.transfers[number].holders)
        for suspect in suspects:
            sync.failures[suspect] = sync.failures.get(suspect, 0) + 1
        guilty = [s for s in suspects if sync.failures[s] >= SYNC_ATTEMPTS_MAX]
        if guilty:  # of two that only accuse each other, the one that came last
            why = f"it took part in {SYNC_ATTEMPTS_MAX} failed transfers of shared state: {why}"
            self._remove(max(guilty), why, Result.RANK_CONNECTION_FAILED)
        else:
            self._elect(group_number, sync)

    def _synchronises(self, number: int) -> bool:
        sync = self._groups[self.peers[number].info.group].sync
        return sync is not None and number in sync.members

    def _fail_sync(self, group_number: int, why: str) -> None:
        """Gives a synchronisation up for all; nobody's memory has changed."""
        sync = self._groups[group_number].sync
        assert sync is not None
        self._groups[group_number].sync = None
        for number, vote in sync.members.items():
            self._fail(number, vote.call, WITHDRAWN[Kind.SYNC], why, m.Cause.TIMEOUT)

    def _end_sync(self, group: Group, sync: Sync) -> None:
        group.sync = None
        group.revision = sync.revision
        group.syncs += 1
        group.last_plan = sync.seq
        group.holders = set(sync.members)
        for number, vote in sync.members.items():
            self._send(number, m.SyncResult(vote.call, sync.revision, group.syncs, sync.seq))

    # ---- helpers ----

    def _send(self, number: int, message: m.MasterMessage) -> None:
        self._out.append(Send(self.peers[number].conn, message))

    def _fail(
        self,
        number: int,
        call: int,
        result: Result,
        why: str,
        cause: m.Cause = m.Cause.OTHER,
    ) -> None:
        self._send(number, m.CallError(call, result.value, plain(why), cause))

    def _note(self, text: str) -> None:
        self._out.append(Note(plain(text)))

    def _take_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out
