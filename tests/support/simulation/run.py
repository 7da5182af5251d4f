"""Whole runs of the real master and the real clients of its peers, from one seed, without I/O.

Messages travel in queues, one for each direction of each connection, in order; connections are not
ordered against each other. The lane engines are simulated (engine.py), and so are clocks and
sockets (system.py). Each step draws one thing that can happen now.

A peer's program is one or more generators, its threads, which yield the call that they wait for.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.effects import (
    CALLED,
    Adopt,
    Dial,
    Drop,
    Effect,
    Forget,
    Note,
    Refusal,
    Remember,
    Send,
    plain,
)
from pccl.protocol.master.history import FINISHED, GIVEN_UP
from pccl.protocol.master.inputs import Dialled, Disconnected, Hello, Received, Resume, Tick
from pccl.protocol.master.status import CALLS_MAX, Phase
from pccl.protocol.master.voting import ODD, are_held
from pccl.protocol.peer.effects import Answer, Fail, Fault
from pccl.protocol.rounds import PENDING, Grace, OpenRounds, RoundId
from pccl.runtime.client.connection import DealerEvent
from simulation.engine import Key, Meetings, Op, Stream
from simulation.master import Watched
from simulation.peer import IDLE_S, Program, SimPeer, Tag, Thread, brief
from simulation.system import RELAY_PORT
from simulation.unexpected import Eager

# a peer in one of these can enter no other call; repeated here, to check the protocol's rules
EXCLUSIVE = {"update_topology", "finish", "optimize_topology", "sync_shared_state"}
RUN_WIDE = {"update_topology", "finish", "are_peers_pending", "optimize_topology"}
INVERTED = bytes(byte ^ 255 for byte in range(256))
FREEZE_STEPS_MAX = 5000  # after which a frozen peer goes on
REPEATED_MAX = 10  # times that a peer says the same over one connection
IDLE_MAX = 3  # times that all clocks go on while nothing happens
_ODD_ONE = re.compile(r"peer (\d+) \([^)]*\) is the odd one out")


class SimulatedRun:
    """One simulated run.

    Args:
        seed: of all that is drawn; the same seed gives the same run.
        journaled: whether the master keeps a journal.
        straggler_s: the master's limit for peers that keep others waiting.

    Attributes:
        graces: what a vote of are_peers_pending draws its grace from.
    """

    def __init__(self, seed: int, journaled: bool = True, straggler_s: float | None = None) -> None:
        self.random = random.Random(seed)
        self.run = seed + 1
        self.journaled, self.straggler_s = journaled, straggler_s
        self.combined: set[bytes] = set()  # results of small collectives
        self.small_max = self.random.choice([0, 1, 128])
        # peers dropped because of their links: the group's size then, and whether it synchronized
        self.blamed: dict[int, tuple[int, bool]] = {}
        self.odd: set[int] = set()  # peers dropped as the odd one out
        self.splits = 0  # disputes without a majority
        # calls that failed for that, by peer and call; and the peers that were told, by failure
        self.condemned: dict[tuple[int, int], list[tuple[object, ...]]] = {}
        self.heard: dict[tuple[object, ...], list[SimPeer]] = {}
        self.master = self._new_master(self.run)
        self.peers: list[SimPeer] = []
        self.meetings = Meetings(self)
        self.eager = Eager(self)
        self.unready: dict[Key, set[Stream]] = {}  # streams that a collective still lacks
        self.starters: dict[Key, set[int]] = {}  # the peers whose engines started it
        self.completed: dict[Key, set[int]] = {}  # the peers that hold the whole result
        self.cut_to: dict[Key, set[int]] = {}  # the only peers that can still complete it
        self.told: dict[object, tuple[object, list[SimPeer]]] = {}  # values and told peers
        self.journal: set[int] = set()  # accepted peers, as the master's journal has them
        self.refused: dict[int, Refusal] = {}  # in the journal: dropped peers, and why
        self.next_peer = 1
        self.was_finished = False  # also under an earlier master
        self.finished = False  # whether all have said that the run is over, as the master knows
        self.incarnation = 0
        self.now_s = 0.0
        self.dials: list[int] = []  # of peers that the master dials just now
        self.broken: deque[bytes] = deque()  # connections whose end the master does not know yet
        self.dropped: set[bytes] = set()  # connections that the master listens to no more
        self._repeats: Counter[tuple[bytes, bytes]] = Counter()  # messages of connections
        self.history: dict[int, int] = {}  # of a group: how often its last holder has gone
        self.notes: list[str] = []
        self.steps = 0
        self.trace: list[str] | None = None  # set it to a list to have everything written down
        # steps after which a caller gives up; 0: never
        self.graces: list[Grace | None] = [None]
        self.patience = self.random.choice([[0], [0], [0] * 9 + [5, 20, 60]])
        self.tick_s = self.random.choice([0.01, 0.01, 0.1, 1.0])
        self.failure_rate = self.random.choice([0.0, 0.0, 0.02, 0.1])
        self.loss_rate = self.random.choice([0.0, 0.0, 0.01, 0.05])  # of streams, at any time
        self.losses = 0
        self._idle = 0  # how often all clocks have gone on since something happened

    def _new_master(self, number: int, journal: Journal | None = None) -> Master:
        secret = self.random.randbytes(32)
        # when it recovers: a master that has no journal with peers takes whoever comes
        self.expects_known_peers = journal is not None and bool(journal.accepted)
        master = Watched(number, self.combine, self.straggler_s, journal, secret=secret)
        master.blamed = self.blamed.__setitem__
        master.bereft = self._begin_history
        master.odd, master.parted = self.odd.add, self._note_split
        master.run.collectives.small_max = self.small_max
        return master

    def _note_split(self, votes: list[tuple[int, int, RoundId]], why: str) -> None:
        self.splits += 1
        for number, call, round_ in votes:
            what = CALLED[round_.kind], round_.tag or 0, round_.pair or ()
            self.condemned.setdefault((number, call), []).append((plain(why), *what))

    def check_condemned(self, peer: SimPeer, call: int, end: Answer | Fail) -> None:
        """A call that was refused has failed for that, also if its master could not say so; unless
        nobody is left who has heard of it. The next master may refuse it again, or tell first of
        an earlier refusal of the same call of others.
        """
        verdicts = self.condemned.pop((peer.machine.number, call), [])
        if verdicts and peer.machine.over is None and call not in peer.given_up:
            heard = [p for verdict in verdicts for p in self.heard.get(verdict, ())]
            others = [p for p in heard if p is not peer and p.present]
            known = any(not self.given_up_by_master(other) for other in others)
            told = end.why.replace(" (you, ", " (") if isinstance(end, Fail) else ""
            same = any(told == why or (told, *what) in self.heard for why, *what in verdicts)
            assert same or not known, f"peer {peer.name} in {call}: {end}"

    def _begin_history(self, of: int | None) -> None:
        """The last holder of a group's shared state is gone: revisions begin anew."""
        for group in list(self.history) if of is None else [of]:
            self.history[group] = self.history.get(group, 0) + 1

    def combine(self, work: m.Spec, parts: Sequence[m.Data]) -> bytes:
        """The master's arithmetic. Peers that stand in different steps must not meet."""
        assert len(set(parts)) == 1, f"contributions of different steps were reduced: {parts}"
        assert len(parts[0]) == work.count
        result = bytes(parts[0]).translate(INVERTED)
        self.combined.add(result)
        return result

    def say(self, text: str, *details: object) -> None:
        """One line of the trace."""
        if self.trace is not None:
            told = " ".join(d if isinstance(d, str) else brief(d) for d in (text, *details))
            self.trace.append(f"{self.steps:5}  {told}")

    # ---- what befalls it ----

    def add(
        self,
        *programs: Program,
        group: int = 0,
        team: tuple[int, int] = (0, 0),
        nat: tuple[bool, bool] = (False, False),
        protocol: int = m.PROTOCOL_VERSION,
    ) -> SimPeer:
        """One more peer joins and runs its programs, a thread each, once it is accepted."""
        name = len(self.peers) + 1
        relay = RELAY_PORT if nat[1] else 0
        place = ("", 1000 + name, "", f"m{name}", b"", "", "", *team, False, nat[0], relay)
        peer = SimPeer(name, b"c%d" % name, self, m.Hello(protocol, "1", group, *place), programs)
        self.peers.append(peer)

        def whole() -> Thread:
            end = yield from peer.join()
            if isinstance(end, Answer):
                for program in peer.programs:
                    peer.start_thread(program(peer))

        peer.start_thread(whole())
        return peer

    def kill(self, peer: SimPeer) -> None:
        """kill -9: some of what it sent last is lost, then its connection breaks."""
        self.say(f"peer {peer.name} is killed")
        peer.alive = False
        for _ in range(self.random.randint(0, len(peer.up))):
            peer.up.pop()
        self.eager.lose(peer.engine)
        for op in peer.engine.ops.values():
            self.cut(op.seq)
        if peer.connection == "up":
            self.broken.append(peer.conn)

    def freeze(self, peer: SimPeer) -> None:
        """SIGSTOP: it neither reads nor says anything, but what it has sent still arrives."""
        self.say(f"peer {peer.name} freezes")
        peer.frozen = True

    def thaw(self, peer: SimPeer) -> None:
        """SIGCONT."""
        self.say(f"peer {peer.name} thaws")
        peer.frozen = False
        self._idle = 0  # its time stood still

    def sever(self, peer: SimPeer) -> None:
        """Its heartbeats end, for it is frozen or its cable is cut: the master drops it."""
        if peer.connection == "up" and peer.conn not in self.broken:
            self.say(f"peer {peer.name} is cut off")
            peer.severed = True
            self.broken.append(peer.conn)

    def restart_master(self) -> None:
        """kill -9 of the master: what is under way is lost, on each connection from some point."""
        self.say("the master is killed, and comes back")
        self.incarnation += 1
        self.broken.clear()
        if not self.journal:  # no peer is left to come back
            self.history = {group: count + 1 for group, count in self.history.items()}
        if not self.journaled:
            self.refused.clear()
            self.finished = False  # until a peer comes back that knows it
        accepted = frozenset(self.journal)
        journal = Journal(
            self.run, self.incarnation, self.next_peer, accepted, refused=dict(self.refused)
        )
        self.master = self._new_master(
            self.random.getrandbits(40), journal if self.journaled else None
        )
        for peer in self.peers:
            peer.up.clear()
            if peer.alive:
                if peer.connection == "up":
                    for _ in range(self.random.randint(0, len(peer.down))):
                        peer.down.pop()
                    peer.connection = "breaking"

    def doze(self) -> None:
        """SIGSTOP of the master, for so long that connections break."""
        self.say("the master dozes, and wakes")
        if self.master.recovering and self.random.random() < 0.5:
            for peer in self.peers:
                self.sever(peer)
        else:
            self._begin_anew()

    def outage(self) -> None:
        """The master's network is away, for so long that all connections break."""
        self.say("the master loses its network")
        for peer in self.peers:
            self.sever(peer)

    def _begin_anew(self) -> None:
        """Does as the server after a pause of its process."""
        old = self.master
        journal, actions = old.reborn()
        self.master = self._new_master(old.run.number, journal)
        self.perform(actions)
        for peer in self.peers:
            if old.has_heard(peer.conn):
                self.dropped.add(peer.conn)
                peer.up.clear()
                if peer.alive and peer.connection == "up":
                    for _ in range(self.random.randint(0, len(peer.down))):
                        peer.down.pop()
                    peer.connection = "breaking"

    def impatience(self) -> None:
        """So much time passes that who keeps others waiting is dropped, if there is a limit."""
        self.say("time passes")
        for later_s in (0.0, 1.0 + (self.straggler_s or 0.0)):
            self.now_s += later_s
            self.perform(self.master.feed(Tick(self.now_s)))

    def cut(self, seq: Key | None) -> None:
        """Data of a collective stops to flow; who had enough already can still complete it."""
        if seq is not None and seq not in self.cut_to:
            names = sorted(self.starters.get(seq, ()))
            self.cut_to[seq] = {n for n in names if self.random.random() < 0.3}

    def lives(self, number: int) -> bool:
        return any(peer.alive and peer.machine.number == number for peer in self.peers)

    def bearer(self, number: int, run: int) -> SimPeer | None:
        """The peer of a run with a number.

        If one died before it was accepted, a restarted master may give its number to another.
        """
        found = [peer for peer in self.peers if peer.machine.number == number]

        def likely(peer: SimPeer) -> tuple[bool, ...]:  # a restarted master may reuse a number
            return peer.alive, peer.machine.knowledge.run == run, self.master.knows(peer.conn)

        return max(found, key=likely, default=None)

    def blocked(self, peer: SimPeer, number: int) -> bool:
        """Whether a peer can open no stream to another one."""
        other = self.bearer(number, peer.machine.knowledge.run)
        return (
            other is not None
            and other is not peer
            and (
                peer.caged
                or other.walled
                or not other.alive
                or other.name in peer.cut_from
                or self.are_severed(peer, other)
            )
        )

    def are_severed(self, sender: SimPeer, receiver: SimPeer) -> bool:
        """Whether neither can connect to the other, or the one who must cannot connect at all."""
        relayed = any(peer.relay for peer in self.peers)
        return receiver.outgoing and (receiver.caged or (sender.outgoing and not relayed))

    def serving(self, number: int, seq: Key | None) -> Op | None:
        """The op by which a peer serves a plan."""
        living = (p for p in self.peers if p.alive and p.machine.number == number)
        return next((op for peer in living if (op := peer.engine.serves(seq))), None)

    def deafened(self, number: int, seq: Key | None) -> bool:
        """Whether a peer waits for what a holder has sent, and a stream has lost."""
        return any(
            op.kind == "serve" and op.seq == seq and number in op.deaf and not op.ending
            for peer in self.peers
            if peer.alive
            for op in peer.engine.ops.values()
        )

    # ---- what must be true ----

    def agree(self, what: object, value: object, peer: SimPeer) -> None:
        """All who hear of `what` and are still in the run have heard the same."""
        if self.given_up_by_master(peer):
            return  # what it hears late may be of before a history that has begun anew
        known, peers = self.told.get(what, (value, []))
        survivors = [
            other for other in peers if other.present and not self.given_up_by_master(other)
        ]
        assert known == value or not survivors, (
            f"two outcomes of {what}: {known} for {[p.name for p in survivors]} "
            f"and {value} for {peer.name}"
        )
        self.told[what] = value, [*survivors, peer]

    def given_up_by_master(self, peer: SimPeer) -> bool:
        """Whether the run goes on without a peer that does not know it yet."""
        if self.master.recovering:
            return self.expects_known_peers and peer.machine.number not in self.journal
        return not self.master.knows(peer.conn)

    def note_heard(self, of: m.CallError | m.Failure, peer: SimPeer) -> None:
        self.heard.setdefault((of.why, of.called, of.tag, of.pair), []).append(peer)

    def check_told(self, peer: SimPeer, message: m.MasterMessage) -> None:
        """No two peers of a run are told different outcomes of one round."""
        run, group = peer.machine.knowledge.run, peer.group
        match message:
            case m.CallError(seq=seq) if seq:
                self.note_heard(message, peer)
            case m.Failed(failure):
                self.note_heard(failure, peer)
            case m.Finished(seq, ok):
                self.agree(("collective", run, seq), ok, peer)
                assert not ok or peer.name in self.completed.get((run, seq), ()), (
                    f"{seq} committed, but peer {peer.name} lacks the result"
                )
            case m.Started(call, seq, epoch):
                # one whose membership has ended takes no more plans
                known = peer.machine.over is not None or peer.machine.knowledge.plan.epoch == epoch
                assert known, "a start in another epoch than the plan's"
                if call in peer.calls_open:  # else its caller has gone
                    one = peer.calls_open[call]
                    self.agree(("start", run, seq), (group, epoch, *one.place, one.spec), peer)
                self.eager.epochs[run, seq] = epoch
                if message.data is None:
                    self.check_nonce(message.nonce, ("call", run, seq), peer)
            case m.SyncPlan(_, seq):
                self.check_nonce(message.nonce, ("call", run, seq), peer)
            case m.Probe(_, seq):
                self.check_nonce(message.nonce, ("call", run, seq), peer)
            case m.Plan(epoch, peers, rings):  # before Admitted a peer does not know the run
                self.agree(("plan", message.nonce), (group, peers, rings), peer)
                self.check_nonce(message.nonce, ("epoch", epoch, peers), peer)
            case m.PendingResult(_, pending, count):
                self.agree(("are_peers_pending", run, count), pending, peer)
            case m.OptimizeResult(_, count):
                epoch, rings = peer.machine.knowledge.plan.epoch, peer.machine.knowledge.plan.rings
                self.agree(("optimize_topology", run, group, count), (epoch, rings), peer)
            case m.SyncResult(_, revision, count, plan, _, short):
                self.agree(("sync_shared_state", run, group, count), (revision, plan, short), peer)

    def check_nonce(self, nonce: int, of: object, peer: SimPeer) -> None:
        """One nonce for one thing, the same for all; no thing has that of another."""
        self.agree(("nonce", nonce), of, peer)
        self.agree(("nonce of", of), nonce, peer)

    def check_over(self, peer: SimPeer, why: str) -> None:
        """A peer is out of the run for a legal reason, and a dropped peer gets the reason."""
        number = peer.machine.number  # 0: it has none yet
        here = number and peer.machine.knowledge.run == self.master.run.number
        told = self.refused.get(number) if here else None
        plain_why = why.replace(" (you, ", " (")
        assert peer.left or told is None or told.why in plain_why, f"peer {peer.name}: {why}"
        assert (
            peer.left
            or (peer.severed and GIVEN_UP.why in why)
            or (self.incarnation and GIVEN_UP.why in why)
            or (("could not reach" in why or "failed transfers" in why) and self.may_go(peer))
            # it had hardly said hello
            or ((self.incarnation or peer.severed) and not peer.machine.number)
            or (self.incarnation and not self.journaled and "started another run" in why)
            or (self.incarnation and self.overrun and "this is another one" in why)
            or (self.straggler_s is not None and "others waited for it" in why)
            or ("of its team, is gone" in why and self.lost_its_team(peer))
            or (self.graces != [None] and "it was late" in why)
            or ((self.was_finished or self.master.run.history.finished) and FINISHED.why in why)
            or (self.incarnation and peer.given_up and "out of step" in why)
            or (ODD in why and peer.machine.number in self.odd)
            or (peer.client.hello.protocol != m.PROTOCOL_VERSION and "speaks protocol" in why)
        ), f"peer {peer.name} is out of the run: {why}"

    def check_verdict(self, end: Fail, over: Fail) -> None:
        """The error of a call of the odd one out.

        A call may have failed before, because another peer was dropped as that.
        """
        of_one = set(_ODD_ONE.findall(over.why)) & set(_ODD_ONE.findall(end.why))
        if of_one and "of its team" not in end.why:
            assert end.fault is Fault.MISMATCH and over.fault is Fault.KICKED, end

    def lost_its_team(self, peer: SimPeer) -> bool:
        """Whether one of a peer's team is out of the run, or has been."""
        others = [p for p in self.peers if p.team == peer.team and p is not peer]
        gone = any(not self.master.knows(p.conn) or p.connections > 1 for p in others)
        return bool(peer.team) and gone

    def check_teams(self) -> None:
        """No team is in the run in part, and all groups have the teams in one order."""
        teams: dict[int, list[m.PeerInfo]] = {}
        orders: dict[int, list[int]] = {}
        for number in self.master.run.membership.accepted():
            info = self.master.run.membership.info(number)
            if info.team:
                teams.setdefault(info.team, []).append(info)
                orders.setdefault(info.group, []).append(info.team)
        for team, infos in teams.items():
            assert len(infos) == infos[0].team_size, f"only {infos} of team {team} are in the run"
        every = list(teams)
        for group, order in orders.items():
            mine = [team for team in every if team in order]
            assert [*dict.fromkeys(order)] == mine, f"group {group} has its teams in another order"

    @property
    def overrun(self) -> bool:
        """Whether as many strangers or peers may name another run: a newcomer that came before the
        peers to a restarted master without a journal has begun one, until the next restart."""
        return self.incarnation > 1 and not self.journaled

    def may_go(self, peer: SimPeer) -> bool:
        """Whether a peer may be the one that goes because peers cannot reach each other.

        Of two who must meet nobody can know whose fault it is, unless the master can tell by its
        dial. Three can: who reaches nobody, or whom nobody reaches, finds no other neighbor.
        """
        group = [p for p in self.peers if p.group == peer.group and p is not peer]
        if peer.walled or peer.caged or any(self.blocked(p, peer.machine.number) for p in group):
            return True
        if any(self.blocked(peer, p.machine.number) for p in group if not p.walled and p.alive):
            return True
        faulty = [p for p in group if p.walled or p.caged or not p.alive]
        undecided = any(p.dialled is None for p in (peer, *faulty))
        misled = any(p.walled and p.dialled == "" for p in faulty)
        if peer.machine.number not in self.blamed:
            return False  # it goes with another one of its team
        size, synchronized = self.blamed[peer.machine.number]
        return bool(faulty) and (undecided or misled) and (size < 3 or synchronized)

    def check_content(self, peer: SimPeer) -> None:
        """All peers at one revision hold the same content."""
        if self.master.knows(peer.conn):  # else the run may have gone on without it
            self.agree(self._revision(peer), peer.content[1], peer)

    def disown(self, peer: SimPeer) -> None:
        """A program changes the content of the revision at which its peer is, against the rules.

        If it is the only holder, this becomes the revision's content.
        """
        if (what := self._revision(peer)) in self.told:
            content, peers = self.told[what]
            self.told[what] = content, [other for other in peers if other is not peer]

    def _revision(self, peer: SimPeer) -> object:
        """Names the revision of the shared state at which a peer is."""
        history = self.history.setdefault(peer.group, 0)
        return "content", self.master.run.number, peer.group, history, peer.content[0]

    def check_waiting(self) -> None:
        """When nothing is under way, a waiting peer must wait for a peer that may still come."""
        present = [p for p in self.peers if p.present]
        awake = [p for p in present if not p.frozen]
        waiting = {p.name: {w[:2] for w in p.waits() if not w[2]} for p in awake}
        # with strangers among the members, or frozen ones, somebody may always still come
        closed = len(present) == len(awake) == sum(p.accepted for p in self.master.peers.values())
        for peer in awake:
            for what, _, started in peer.waits():
                assert not (closed and started), f"peer {peer.name} waits for ever in {what}"
            for what, tag in waiting[peer.name]:
                scope = [p for p in awake if what in RUN_WIDE or p.group == peer.group]
                missing = [p for p in scope if (what, tag) not in waiting[p.name]]
                assert missing or not closed, f"all stand in {what} (tag {tag}): nothing happens"
                pair = {} if isinstance(tag, int) else {*tag[:2]}
                if pair:
                    scope = [p for p in scope if p.machine.number in pair]
                    stand = [p for p in scope if (what, tag) in waiting[p.name]]
                    assert len(stand) < 2, f"both stand in {what} {tag}: nothing happens"
                for other in scope:
                    for their in waiting[other.name] - waiting[peer.name]:
                        if other is not peer and (what, tag) not in waiting[other.name]:
                            self._check_pair(peer, (what, tag), other, their)
        if not self.master.recovering:
            self.check_veterans(awake)
            self.check_status(awake)
            self.check_graces()

    def check_veterans(self, awake: list[SimPeer]) -> None:
        """The master, restarted or not, knows who has completed anything."""
        for peer in awake:
            record = self.master.peers.get(peer.machine.number)
            if record is not None and record.conn == peer.conn and not peer.given_up:
                assert record.veteran == peer.machine.knowledge.veteran, f"peer {peer.name}"

    def check_graces(self) -> None:
        """No peer waits longer than its grace, not even for a frozen one."""
        round_ = self.master.run.voting.open.get(PENDING)
        votes = round_.votes if round_ is not None else {}
        for group in {self.master.peers[number].info.group for number in votes}:
            members = self.master.run.membership.accepted(group)
            graces = [votes[n].grace for n in members if n in votes and votes[n].grace]
            enough = max((g.enough for g in graces if g), default=1)
            missing = [n for n in members if n not in votes]
            assert not missing or len(graces) < enough, f"{missing} are late, and still waited for"

    def check_status(self, awake: list[SimPeer]) -> None:
        """The status is true: the calls that peers are in, and the missing peers."""
        status = self.master.status()
        shown = {one.peer: one for one in status.peers}
        for peer in awake:
            if self.master.knows(peer.conn) and shown[peer.machine.number].accepted:
                calls = {call.call.partition("(")[0] for call in shown[peer.machine.number].calls}
                calls = {"send" if call == "recv" else call for call in calls}
                if any(call.startswith("collective ") for call in calls):
                    continue  # from before a restart: the master does not know what it was
                stands_in = {what for what, _, _ in peer.waits()}
                running = {one.work.what for one in peer.machine.collectives.started.values()}
                alike = {"all_to_all", "all_reduce"}  # a round is shown as the first of its votes
                stands_in |= alike if stands_in & alike else set()
                # an exception may have taken the caller out of one that others have not finished
                assert calls <= stands_in | running and len(calls) >= min(1, len(stands_in)), (
                    f"peer {peer.name} stands in {stands_in}, and is shown in {calls}"
                )
        for wait in status.waits:
            if wait.phase is Phase.ENTERING and wait.call.startswith(("send(", "recv(")):
                assert wait.entered == wait.missing_count == 1, wait
            elif wait.phase is Phase.ENTERING:
                members = [
                    one.peer
                    for one in status.peers
                    if one.accepted and wait.group in (None, one.group)
                ]
                # in a collective, peers may have made other calls with the same tag
                _, *tag = wait.call.rpartition(" with tag ")
                missing = [
                    number
                    for number in members
                    if not any(
                        call.call.endswith("".join(tag))
                        and not call.call.startswith(("send(", "recv("))
                        for call in shown[number].calls
                    )
                    and len(shown[number].calls) < CALLS_MAX  # or there may be more
                ]
                assert {*missing} <= {*wait.missing}, f"{missing} are missing in {wait}"
                assert wait.entered + wait.missing_count == len(members), wait
                assert all(f"peer {number} " in wait.why for number in wait.missing), wait

    def _check_pair(
        self, peer: SimPeer, mine: tuple[str, Tag], other: SimPeer, their: tuple[str, Tag]
    ) -> None:
        """Two peers do not stand where they wait for each other for ever."""
        if isinstance(their[1], tuple) and peer.machine.number not in their[1][:2]:
            return  # it waits for somebody else
        if peer.group == other.group or {mine[0], their[0]} <= RUN_WIDE:
            exclusive = EXCLUSIVE & {mine[0], their[0]}
            stuck = mine in peer.stuck_in and their in other.stuck_in
            assert (not exclusive and not stuck) or self._may_be_decided(), (
                f"peer {peer.name} in {mine} and peer {other.name} in {their} can never meet, "
                "and nobody tells them"
            )

    def _may_be_decided(self) -> bool:
        """Whether a member can still make calls, as far as the master knows, and decide the
        dispute."""
        voting = self.master.run.voting
        return bool({*self.master.run.membership.accepted()} - are_held(voting.open, voting.absent))

    def check_empty(self) -> None:
        """After all peers have ended, no state is left, at peers or master."""
        for peer in self.peers:
            if peer.alive:
                peer.check_empty()
        while self.broken:
            self._bury()
        self.perform(self.master.feed(Tick(self.now_s)))
        left = {name: size for name, size in remembered(self.master).items() if size}
        assert not left, f"all have left, but the master still has {left}"

    @property
    def frozen(self) -> list[SimPeer]:
        return [peer for peer in self.peers if peer.alive and peer.frozen]

    # ---- the clockwork ----

    def _by_conn(self, conn: bytes) -> SimPeer:
        return self.peers[int(conn[1:].partition(b".")[0]) - 1]

    def perform(self, actions: Iterable[Effect]) -> None:
        """Performs effects, as the server does."""
        for action in actions:
            match action:
                case Send(conn, message):
                    peer = self._by_conn(conn)
                    if peer.conn == conn and peer.connection != "down":  # else it is one of before
                        peer.down.append(m.encode(message))
                    if isinstance(message, m.Started) and message.data is None:
                        key = peer.machine.knowledge.run, message.seq
                        self.eager.calls[key][peer.machine.number] = message.call
                case Drop(conn):
                    self.dropped.add(conn)
                case Remember(info):
                    known = info.peer < self.next_peer  # it may come back
                    assert known or not self.finished, f"{info} joins a run that is finished"
                    self.journal.add(info.peer)
                    self.next_peer = max(self.next_peer, info.peer + 1)
                case Forget(number, why):
                    self.journal.discard(number)
                    if why is not None:
                        self.refused[number] = why
                    self.finished |= why is FINISHED
                    self.was_finished |= why is FINISHED
                case Adopt(_, incarnation):
                    self.incarnation = max(self.incarnation, incarnation)
                case Dial(info):
                    self.dials.append(info.peer)
                case Note(text):
                    self.say("master:", text)
                    self.notes.append(text)

    def _to_master(self, peer: SimPeer) -> None:
        data = peer.up.popleft()
        message = m.decode_from_peer(data)
        self.say(f"peer {peer.name} -> master:", message)
        self._repeats[peer.conn, data] += not isinstance(message, m.Inquire)
        assert self._repeats[peer.conn, data] <= REPEATED_MAX, f"it says this forever: {message}"
        if peer.conn in self.dropped:
            return
        if isinstance(message, m.Hello):
            self.perform(self.master.feed(Hello(peer.conn, message, "10.0.0.1")))
        elif isinstance(message, m.Resume):
            if self.master.deserted(message):
                self._begin_anew()
            self.perform(self.master.feed(Resume(peer.conn, message, "10.0.0.1")))
        else:
            self.perform(self.master.feed(Received(peer.conn, message)))
        if self.graces != [None]:
            self._look_at_the_clock()

    def _bury(self) -> None:
        peer = self._by_conn(self.broken.popleft())
        while peer.up:
            self._to_master(peer)
        self.say(f"the master sees that the connection of peer {peer.name} is gone")
        if peer.alive:
            peer.connection = "breaking" if peer.machine.over is None else "down"
        self.perform(self.master.feed(Disconnected((peer.conn,), "its connection broke")))

    def break_connection(self, peer: SimPeer) -> None:
        self.say(f"peer {peer.name} sees that its connection is gone")
        peer.connection = "down"
        peer.up.clear()
        peer.dealer.happens(DealerEvent.BROKEN)
        peer.work()
        for call in peer.given_up & peer.calls_open.keys():
            peer.check_ends(call, True)

    def new_connection(self, peer: SimPeer) -> None:
        while peer.dealer.broken:  # it tries again, some time later
            peer.pass_time()
        peer.connection = "up"
        peer.connections += 1
        peer.conn = b"c%d.%d" % (peer.name, peer.connections)
        peer.dealer.happens(DealerEvent.UP)
        peer.work()

    def _look_at_the_clock(self) -> None:
        """Ticks, as the server does after each message. Dropped peers must have been late."""
        round_ = self.master.run.voting.open.get(PENDING)
        members = {n: p.info.group for n, p in self.master.peers.items() if p.accepted}
        teams = {n: p.info.team for n, p in self.master.peers.items()}
        votes = dict(round_.votes) if round_ is not None else {}
        self.perform(self.master.feed(Tick(self.now_s)))
        gone = members.keys() - self.master.peers.keys() if self.straggler_s is None else ()
        for number in gone:
            graces = [
                v.grace for n, v in votes.items() if v.grace and members[n] == members[number]
            ]
            if teams[number] and {n for n in gone if teams[n] == teams[number]} - {number}:
                continue  # one of its team was late
            if number in self.odd:
                continue  # it was the odd one out when the late peer was gone
            assert number not in votes and graces, f"peer {number} was not late"
            assert len(graces) >= max(grace.enough for grace in graces), number

    def _tick(self) -> None:
        self.now_s += self.tick_s
        self._look_at_the_clock()

    def _answer_dial(self) -> None:
        number = self.dials.pop(self.random.randrange(len(self.dials)))
        peer = self.bearer(number, self.master.run.number)
        why = "refused" if peer is None or not peer.alive else peer.dialled
        self.say(f"the master's dial of peer {number}:", {"": "reached"}.get(str(why), str(why)))
        self.perform(self.master.feed(Dialled(number, why)))

    def _choices(self) -> list[tuple[Callable[..., None], Any]]:
        choices: list[tuple[Callable[..., None], Any]] = []
        for peer in self.peers:
            if peer.up and peer.connection == "up":
                choices.append((self._to_master, peer))
            if not peer.alive or peer.frozen:
                continue
            if peer.waiter.pending:
                choices.append((SimPeer.work, peer))
            elif self.random.random() < 0.05 and peer.due_s < IDLE_S:
                choices.append((SimPeer.pass_time, peer))
            if peer.down:
                choices.append((SimPeer.deliver, peer))
            elif peer.connection == "breaking":
                choices.append((self.break_connection, peer))
            elif peer.connection == "down" and peer.machine.over is None:
                choices.append((self.new_connection, peer))
            if peer.engine.ops or peer.engine.streams:
                choices += peer.engine.choices()
        if self.broken:
            choices.append((SimulatedRun._bury, self))
        if self.dials:
            choices.append((SimulatedRun._answer_dial, self))
        if self.master.recovering or self.master.patience_s is not None:
            choices.append((SimulatedRun._tick, self))
        return choices

    def step(self) -> bool:
        """Threads go on as far as they can, then one thing happens; False when nothing can."""
        self.steps += 1
        moved = False
        for peer in self.peers:
            if peer.alive and not peer.frozen:
                moved = peer.run_threads() or moved
        choices = self._choices()
        if choices:
            what, subject = self.random.choice(choices)
            what(subject)
            if isinstance(subject, SimPeer):
                subject.wake()
            self.check_teams()
        if moved or choices or any(p.hurry() for p in self.peers if p.present):
            self._idle = 0
            return True
        self._idle += 1
        if self._idle > IDLE_MAX:
            return False
        for peer in self.peers:
            if peer.alive and not peer.frozen:
                peer.pass_time(IDLE_S)
        return True

    def unblock(self) -> bool:
        """Thaws a peer, or ends half a team; False if there is none."""
        for peer in self.frozen:
            self.thaw(peer)
            return True
        registered = {p.conn: p for p in self.master.peers.values() if not p.accepted}
        teams = self.master.run.membership.teams
        halves = [
            p
            for p in self.peers
            if p.alive and p.conn in registered and not teams.is_whole(registered[p.conn].info)
        ]
        if halves:  # the rest of its team will never come, so its user ends it
            self.kill(self.random.choice(halves))
        return bool(halves)

    def finish(self, steps_max: int = 50_000) -> None:
        """Runs until nothing can happen any more: then all programs of living peers have ended."""
        while self.steps < steps_max:
            if not self.step():
                self.check_waiting()
                if not self.unblock():
                    break
            elif self.steps % FREEZE_STEPS_MAX == 0 and self.frozen:
                self.unblock()  # who waits for its data reminds it of that, and never comes to rest
        else:
            raise AssertionError("the run does not come to rest")
        assert not (waiting := [p.name for p in self.peers if p.alive and p.threads]), waiting


def remembered(master: Master) -> dict[str, int]:
    """How much a master has in each of its tables, but for those who may come back, and counts."""
    more = {"catalogue": master.run.clients.catalogue}
    return {"groups.groups": len(master.run.groups)} | {
        f"{part}.{name.lstrip('_')}": len(table)
        for part, owner in (vars(master.run) | more).items()
        if hasattr(owner, "__dict__") and part != "tally"
        for name, table in vars(owner).items()
        if isinstance(table, dict | list | set | OpenRounds) and name != "_lost"
    }


__all__ = ["Program", "SimPeer", "SimulatedRun", "Thread", "remembered"]
