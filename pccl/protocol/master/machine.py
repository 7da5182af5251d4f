"""The master's state machine: who is in the run, and what all have agreed on. No I/O.

Theory of operation
-------------------

The caller feeds three kinds of events, `hello`, `received`
and `disconnected`, each naming a connection, and performs the actions that come back, in order. A
connection stands for one peer for ever: a peer that comes back is a new peer.

A peer is *pending* from its Hello until the accepted peers admit it, then *accepted* until it
leaves, is kicked or lost. Accepted peers vote in rounds (rounds.py). Three kinds of agreement last
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
- An *optimisation* begins when its round commits. Peers measure the links between them, slot by
  slot; then the rings are chosen anew. Who is lost meanwhile is no longer measured.

A master that is restarted has an empty state but for its journal: who was accepted. It waits until
these have come back and have said what they know (`resume`), or until its patience ends, and goes
on from what recovery.py makes of it. Whatever else arrives meanwhile is kept for later. A master
without a journal does the same for the run of the first peer that comes back to it.

Invariants: one outcome for each seq; sequence numbers, peer numbers and epochs never repeat;
revisions never go back while a holder lives; a message that is impossible in a peer's state drops
that peer and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.collectives import Collectives, fits
from pccl.protocol.master.door import newcomer, refusal
from pccl.protocol.master.effects import Adopt, Drop, Effect, Forget, Remember, Send
from pccl.protocol.master.explain import explain
from pccl.protocol.master.ledger import (
    NAMES_MAX,
    Backlog,
    Doom,
    Group,
    Journal,
    Peer,
    Running,
    held,
    plain,
)
from pccl.protocol.master.optimisations import Optimisations
from pccl.protocol.master.recovery import (
    EPOCH_SHIFT,
    GIVEN_UP,
    INCARNATION_SHIFT,
    OTHER_RUN,
    OUTNUMBERED,
    Back,
    Before,
    Recovery,
    Unresolved,
    outdated,
    plausible,
    reconstruct,
)
from pccl.protocol.master.synchronisations import Synchronisations
from pccl.protocol.rounds import OPEN_MAX, PENDING, WITHDRAWN, Kind, Round, RoundId, Vote
from pccl.types import Result
from pccl.version import __version__

GONE = Result.MASTER_CONNECTION_FAILED  # what peers raise MasterLostError for


class Master(Collectives, Synchronisations, Optimisations):
    """The master of one run.

    Args:
        run: the run's nonce; bulk data of another run is never mistaken for this one's.
        combine: reduces contributions of the work's size, in their order.
        straggler_s: peers that keep others waiting for so many seconds are dropped (`tick`).
        journal: of the master that was here before, if there was one.
        secret: random bytes that no master has ever used, from which nonces are made.
    """

    # ---- events ----

    def hello(self, conn: bytes, hello: m.Hello, host: str, unreached: str = "") -> list[Effect]:
        """A peer's first message, from a connection whose other end is seen as `host`.

        `unreached` says why it cannot be reached where it listens, if it has been dialled in vain.
        """
        if self._postponed(conn, lambda: self.hello(conn, hello, host, unreached)):
            return self._take()
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], "it said hello twice", Result.INTERNAL_ERROR)
            return self._take()
        info, why = newcomer(hello, host), self.objection(hello, host)
        group = [peer.info for peer in self.peers.values() if peer.info.group == info.group]
        if why:
            self._refuse(conn, why, Result.INVALID_USAGE)
        elif unreached and reach.matters(info, host, group):
            self._refuse(conn, reach.refusal(info, unreached), Result.RANK_CONNECTION_FAILED)
        else:
            warning = reach.warning(info, unreached) if unreached else ""
            self._register(conn, info, hello, host, warning)
        return self._take()

    def objection(self, hello: m.Hello, host: str) -> str:
        """Why a `hello` is refused wherever its peer is reached; empty if it is not."""
        return refusal(hello, newcomer(hello, host), self._arithmetic if self.peers else None)

    def examine(self, conn: bytes, host: str, unreached: str | None, unix_s: float) -> list[Effect]:
        """Somebody asks what a `hello` would lead to; arguments as there, and the time of day.

        `unreached` is None if it was not dialled.
        """
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], "it asked to be examined", Result.INTERNAL_ERROR)
        else:
            report = m.Report(
                m.PROTOCOL_VERSION,
                __version__,
                host,
                plain(unreached or ""),
                unix_s,
                self._arithmetic if self.peers else b"",
                self._size(),
                dialled=unreached is not None,
            )
            self._out += [Send(conn, report), Drop(conn, "it has been examined")]
        return self._take()

    def received(self, conn: bytes, message: m.PeerMessage) -> list[Effect]:
        """Any later message of a peer."""
        if self._recovery is not None and not isinstance(message, m.Leave):
            return self.rejected(conn, "it spoke before it was welcome")  # nobody has been told
        if self._postponed(conn, lambda: self.received(conn, message)):
            return self._take()
        number = self._by_conn.get(conn)
        if number is None:
            self._out.append(Drop(conn, "its first message was not a hello"))
            return self._take()
        if self.peers[number].accepted:
            self._lost.clear()
        if isinstance(message, m.Leave):
            self._remove(number, "it left")
        elif isinstance(message, m.Inquire):
            if why := explain(self, number, message.call, message.seq):
                self._send(number, m.Waiting(message.call, plain(why)))
        elif not self.peers[number].accepted:
            self._remove(number, "it voted while it was pending", Result.INVALID_USAGE)
        else:
            self._vote(number, message)
        return self._take()

    def disconnected(self, conn: bytes, why: str) -> list[Effect]:
        """A connection is gone: the only evidence of a peer's death that counts."""
        return self.all_disconnected([conn], why)

    def all_disconnected(self, conns: list[bytes], why: str) -> list[Effect]:
        """Several connections are gone: the others hear of it once."""
        if self._recovery is not None:
            self._recovery.gone(conns)
            self._backlog.events.append(lambda: self.all_disconnected(conns, why))
        else:
            numbers = [self._by_conn[conn] for conn in conns if conn in self._by_conn]
            lost = [self.peers[number].info for number in numbers if self.peers[number].accepted]
            self._lost |= {info.peer: info for info in lost}
            self._remove_all(dict.fromkeys(numbers, why))
            if self._size():  # only those of its group can tell whether they have heard of a loss
                self._lost = {n: i for n, i in self._lost.items() if i.group in self._accepted_in}
        return self._take()

    def farewell(self) -> list[Effect]:
        """The master ends for good: nobody needs to wait for it."""
        for number in self.peers:
            why = "the master was stopped"
            self._send(number, m.Kicked(GONE.value, why))
        return self._take()

    def rejected(self, conn: bytes, why: str) -> list[Effect]:
        """A connection sent bytes that are no message."""
        if self._postponed(conn, lambda: self.rejected(conn, why)):
            return self._take()
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], why, Result.INTERNAL_ERROR)
        else:
            self._out.append(Drop(conn, why))
        return self._take()

    def _postponed(self, conn: bytes, event: Callable[[], list[Effect]]) -> bool:
        """Keeps what a connection says during a recovery for later, within limits."""
        if self._recovery is None:
            return False
        if not self._backlog.add(conn, event):
            why = "it said too much while the master waited for the peers of before"
            self._out.append(Drop(conn, why))
            self._backlog.events.append(lambda: self.rejected(conn, why))
        return True

    def knows(self, conn: bytes) -> bool:
        """Whether the connection is that of a peer of the run."""
        return conn in self._by_conn

    # ---- after a restart ----

    @property
    def recovering(self) -> bool:
        """Whether peers of before are still waited for; `tick` must be called now and then."""
        return self._recovery is not None

    def deserted(self, resume: m.Resume) -> bool:
        """Whether a peer comes back to a run that has lost all its peers, this one among the last.

        Then nothing has happened without it, and nobody else is there who could go on: it was the
        master that was cut off, not they.
        """
        known = self._recovery is None and resume.run == self.run
        return known and not self._size() and resume.info.peer in self._lost

    def misses(self, resume: m.Resume) -> bool:
        """Whether a peer comes back of which it is not known yet that its connection broke."""
        peer = self.peers.get(resume.info.peer)
        return peer is not None and peer.accepted and resume.run == self.run

    def reborn(self) -> tuple[Journal, list[Effect]]:
        """What a fresh master goes on from when all connections of this one are lost, and what is
        to be done first."""
        infos = [self.peers[number].info for number in self._accepted()] or [*self._lost.values()]
        incarnation = (self._next_seq >> INCARNATION_SHIFT) + 1
        accepted = frozenset(info.peer for info in infos)
        remember = [Remember(info) for info in infos]
        journal = Journal(self.run, incarnation, self._next_peer, accepted)
        return journal, [Adopt(self.run, incarnation), *remember]

    def resume(self, conn: bytes, resume: m.Resume, host: str) -> list[Effect]:
        """A peer of before is back, on a connection whose other end is seen as `host`."""
        if conn in self._by_conn:
            self._remove(self._by_conn[conn], "it came back twice", Result.INTERNAL_ERROR)
            return self._take()
        info = msgspec.structs.replace(resume.info, host=resume.info.host or host)
        resume = msgspec.structs.replace(resume, info=info)
        why = refusal(resume, info, self._arithmetic if self.peers else None)
        if not plausible(resume):
            why = "it comes back with impossible numbers"
        if not why and self._recovery is None and not self.peers and self._next_peer == 1:
            self._recovery = Recovery(None)
            self._note("a run comes back that this master does not know: its peers will tell")
        recovery = self._recovery
        if not why and recovery is not None:
            why = recovery.refusal(conn, resume)
        elif not why:
            why = GIVEN_UP if resume.run == self.run else OTHER_RUN
        if why or recovery is None:
            self._refuse(conn, why, GONE if why == OTHER_RUN else Result.RANK_CONNECTION_FAILED)
            return self._take()
        recovery.add(conn, host, resume)
        self._note(f"{info} is back")
        if recovery.certain:
            self._recover(recovery)
        return self._take()

    def _refuse(self, conn: bytes, why: str, result: Result) -> None:
        why = plain(why)
        self._out.append(Send(conn, m.Refused(result.value, why)))
        self._out.append(Drop(conn, why))

    def _recover(self, recovery: Recovery) -> None:
        """Nobody else is waited for: goes on from what those who are back have said."""
        self._recovery, back = None, recovery.back
        self.run = self.run if recovery.run is None else recovery.run
        for conn, _, resume in recovery.outnumbered:
            self._note(f"{resume.info} comes back to another run than most")
            self._refuse(conn, OUTNUMBERED, GONE)
        for number in sorted(recovery.missing):
            self._out.append(Forget(number))
            self._note(f"peer {number} did not come back")
        for number in outdated({number: one.resume for number, one in back.items()}):
            self._refuse(back.pop(number).conn, GIVEN_UP, Result.RANK_CONNECTION_FAILED)
        if back:
            self._restore(reconstruct({number: one.resume for number, one in back.items()}), back)
        else:
            self._note("nobody came back: the last holder of any shared state is gone")
        out, events = self._take(), self._backlog.events
        self._backlog = Backlog()
        for event in events:
            out += event()
        self._out = out
        if not self._accepted():
            self._admit()

    def _restore(self, before: Before, back: Mapping[int, Back]) -> None:
        self._next_peer = max(self._next_peer, before.next_peer)
        incarnation = max(self._next_seq >> INCARNATION_SHIFT, before.incarnation + 1)
        self._first_seq = self._next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self._epoch = incarnation << EPOCH_SHIFT
        self._out.append(Adopt(self.run, incarnation))
        for number, info in before.accepted.items():
            conn, host, resume = back[number]
            self.peers[number] = Peer(conn, info, accepted=True, seen=host, dial=resume.dial)
            self._by_conn[conn] = number
            self._count_in(number, info.group)
            self._out.append(Remember(info))
            self._arithmetic = resume.arithmetic
        self._topology_rounds, self._pending_rounds = before.topology, before.pendings
        self._were_pending, self._optimize_rounds = before.were_pending, before.optimized
        self._syncs = max((was.syncs for was in before.groups.values()), default=0)
        for group_number, was in before.groups.items():
            self._groups[group_number] = Group(
                was.epoch,
                was.revision,
                was.syncs,
                was.last_plan,
                was.holders,
                was.short,
                grown=True,  # as far as anybody knows
                rings=was.rings,
            )
            if not was.holders:
                self._note(f"the last holder of group {group_number}'s shared state is gone")
        self._publish_world()
        for group_number in before.groups:
            self._new_epoch(group_number)
        for number in before.accepted:
            self._send(number, m.Admitted(self.run, self._done(before.accepted[number].group)))
        for seq in sorted(before.collectives):
            self._resolve(seq, before.collectives[seq])
        for number, small in before.missed:
            self._send(number, m.Missed(small))
        for number in self.peers:
            group_number = self.peers[number].info.group
            self._send(number, m.Resumed(self._done(group_number)))

    def _resolve(self, seq: int, was: Unresolved) -> None:
        why = "the master was restarted"
        start = frozenset((RoundId(Kind.START, was.group, was.tag),))
        for number in sorted(was.unheard):  # its vote to start is void, as it is for the others
            lost = Result.RANK_CONNECTION_LOST
            self._forbid(number, Doom(start, lost, why, m.Cause.OTHER, seq))
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
            optimized=self._optimize_rounds,
            short=group.short,
        )

    # ---- membership ----

    def _register(
        self, conn: bytes, info: m.PeerInfo, hello: m.Hello, seen: str, warning: str
    ) -> None:
        number = self._next_peer
        self._next_peer += 1
        info = msgspec.structs.replace(info, peer=number)
        self.peers[number] = Peer(conn, info, seen=seen, dial=hello.dial)
        self._by_conn[conn] = number
        self._arithmetic = hello.arithmetic
        self._send(number, m.Welcome(number, plain(warning)))
        self._note(f"{info} of group {info.group} registered")
        if not self._size():
            self._admit()
        else:
            self._evaluate(self._rounds.get(PENDING))

    def _admit(self) -> None:
        """Accepts all pending peers."""
        fresh = [number for number, peer in self.peers.items() if not peer.accepted]
        if not fresh:
            return
        self._lost.clear()
        for number in fresh:
            self.peers[number].accepted = True
            self.peers[number].heard = self._next_seq - 1  # or it needs no more
            self._count_in(number, self.peers[number].info.group)
        for group in {self.peers[number].info.group: None for number in fresh}:
            self._new_epoch(group)
            self._groups[group].grown = True
        self._publish_world()
        for number in fresh:
            self._out.append(Remember(self.peers[number].info))
            group = self.peers[number].info.group
            self._send(number, m.Admitted(self.run, self._done(group)))
            self._note(f"{self.peers[number].info} accepted")

    def _remove_all(self, whys: Mapping[int, str], kick: Result | None = None) -> None:
        lost: dict[int, dict[int, str]] = {}  # what is said of them, by group and number
        for number, why in whys.items():
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
                self._out.append(Forget(number))
                lost.setdefault(peer.info.group, {})[number] = title
            self._note(f"{title}; {self._size()} peers remain")
        if lost:
            self._go_on_without(lost)

    def _go_on_without(self, lost: Mapping[int, Mapping[int, str]]) -> None:
        self._publish_world()
        for titles in lost.values():
            for number in titles:
                for round_ in list(self._rounds.of(number).values()):
                    self._rounds.take_back(number, round_)
        for group_number, titles in lost.items():
            self._leave_group(group_number, titles)
        self._optimise_without({number for titles in lost.values() for number in titles})
        for round_ in self._rounds:
            groups = lost if round_.id.group is None else {round_.id.group} & lost.keys()
            round_.lost += [title for group in groups for title in lost[group].values()]
            if round_ in self._rounds:  # or it has ended since
                self._evaluate(round_)
        if not self._size():
            self._admit()

    def _leave_group(self, group_number: int, lost: Mapping[int, str]) -> None:
        group = self._groups[group_number]
        group.holders -= lost.keys()
        for number in lost:
            group.blame.forget(number)
        if not group.holders and group.revision is not None:
            group.revision = None
            self._note(f"the last holder of group {group_number}'s shared state is gone")
        self._new_epoch(group_number)
        for running in self._of_group(group_number):
            running.members -= lost.keys()
            for number in lost:
                running.votes.pop(number, None)
        self._interrupt(self._of_group(group_number), "lost " + "; ".join(lost.values()))
        sync = group.sync
        if sync is not None and sync.members.keys() & lost.keys():
            for number in lost:
                sync.members.pop(number, None)
            self._elect(group_number, sync)
        if not self._size(group_number):
            self._groups.pop(group_number, None)

    def _new_epoch(self, group_number: int) -> None:
        """New streams for a group: its membership changed, or a collective failed."""
        group = self._groups.setdefault(group_number, Group())
        self._epoch += 1
        group.epoch = self._epoch
        peers = tuple(self.peers[number].info for number in self._accepted(group_number))
        group.planned = self._plan_rings(group_number, group)
        nonce = self._nonces.of_epoch(group.epoch)
        plan = m.Plan(group.epoch, peers, group.planned, self._topology_rounds, nonce)
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
                self._enter(number, RoundId(Kind.TOPOLOGY, None), Vote(call, None))
            case m.PendingVote(call, stuck, patient):
                self._enter(number, PENDING, Vote(call, patient, None, stuck))
            case m.Hurry(call):
                self._evaluate(self._rounds.hurry(number, call))
            case m.StartVote(call, tag, work, data, heard, stuck) if data is None or fits(
                work, data
            ):
                self.peers[number].heard = max(self.peers[number].heard, heard)
                vote: Vote[object] = Vote(call, work, data, stuck, held(work))
                self._enter(number, RoundId(Kind.START, group, tag), vote)
            case m.SyncVote(call, offer) if not self._synchronises(number):
                vote = Vote(call, offer, held=held(offer))
                self._enter(number, RoundId(Kind.SYNC, group), vote)
            case m.FinishVote():
                self._finish(number, message)
            case m.FetchedVote():
                self._fetched(number, message)
            case m.OptimizeVote(call) if not self._optimises(number):
                self._enter(number, RoundId(Kind.OPTIMIZE, None), Vote(call, None))
            case m.Measured():
                self._measured(number, message)
            case m.Unreached():
                self._unreached(number, message)
            case m.Stalled():
                self._stalled(number, message)
            case m.Withdraw(call, seq):
                self._withdraw(number, call, seq)
            case _:
                why = f"it sent a {type(message).__name__} out of turn"
                self._remove(number, why, Result.INTERNAL_ERROR)

    def _enter(self, number: int, round_id: RoundId, vote: Vote[object]) -> None:
        dooms = self._doomed.get(number, ())
        doom = next((doom for doom in dooms if round_id in doom.rounds), None)
        if doom is not None:
            self._doomed[number].remove(doom)
            self._fail(number, vote.call, doom.result, doom.why, doom.cause, doom.seq)
            return
        stands_in = self._rounds.of(number)
        if round_id in stands_in:
            why = f"it entered {stands_in[round_id].describe(number)} twice"
            self._remove(number, why, Result.INVALID_USAGE)
            return
        why = self._rounds.too_much(number, vote, self.peers[number].running)
        if why:
            self._fail(number, vote.call, Result.INVALID_USAGE, why)
            return
        group = self.peers[number].info.group
        round_ = self._rounds.vote(number, group, round_id, vote)
        if not (self._mismatch(round_) or self._conflict(number, round_)):
            self._evaluate(round_)

    def _mismatch(self, round_: Round[object]) -> bool:
        """Fails a start round whose votes ask for different work, or go by different ranks."""
        if round_.id.kind is not Kind.START:
            return False
        first, mine = next(iter(round_.votes.values())), next(reversed(round_.votes.values()))
        asked, wanted = first.payload, mine.payload
        assert isinstance(asked, m.Work) and isinstance(wanted, m.Work)
        if asked == wanted and (first.data is None) == (mine.data is None):
            return False
        if asked.sees_others_than(wanted):
            self._rounds.close(round_)
            self._fail_outdated(round_)
            return True
        if asked == wanted:
            why = "PCCL_INLINE_BYTES is not the same for all: " + self._who([round_])
        else:
            why = "the peers do not ask for the same: " + self._who([round_])
            why += asked.difference(wanted)
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
        doom = Doom(ids, result, why, m.Cause.MISMATCH)
        voters = {number for round_ in rounds for number in round_.votes}
        for round_ in rounds:
            self._rounds.close(round_)
            for number, vote in round_.votes.items():
                self._fail(number, vote.call, result, why, m.Cause.MISMATCH)
            for number in self._accepted(round_.id.group):
                if number not in voters:
                    self._forbid(number, doom)

    def _forbid(self, number: int, doom: Doom) -> None:
        """A peer is told of the end of a round when it comes to it."""
        dooms = self._doomed.setdefault(number, [])
        dooms[:] = [old for old in dooms if old.rounds != doom.rounds][-OPEN_MAX:]
        dooms.append(doom)

    def _evaluate(self, round_: Round[object] | None) -> None:
        news = len(self.peers) > self._size()
        if (
            round_ is not None
            and len(round_.votes) == self._size(round_.id.group)
            and (news or not round_.is_patient)
        ):
            self._rounds.close(round_)
            if round_.id.group is None:
                self._lost.clear()  # the run goes on without them
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
                case Kind.OPTIMIZE:
                    self._begin_optimisation(round_)

    # ---- patience ----

    def _withdraw(self, number: int, call: int, seq: int) -> None:
        """A caller waits no longer. Nothing happens if its answer is on the way already."""
        group_number = self.peers[number].info.group
        sync = self._groups[group_number].sync
        running = self._running.get(seq)
        if running is not None and number in running.members:
            why = f"{self.peers[number].info} waited no longer for {self._missing_of(running)}"
            self._interrupt([running], why, m.Cause.TIMEOUT)
        elif sync is not None and number in sync.members and sync.members[number].call == call:
            self._fail_sync(group_number, f"{self.peers[number].info} waited no longer")
        elif self._optimises(number, call):
            self._fail_optimisation(f"{self.peers[number].info} waited no longer")
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

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed: ends a recovery; drops stragglers where there is a limit for them."""
        if self._recovery is not None:
            if self._recovery.over(now_s):
                self._recover(self._recovery)
            return self._take()
        late = dict(self._stragglers.late(now_s, self._waits()))
        for number in sorted(late.keys() & self.peers.keys()):
            why = f"others waited for it in {late[number]} for {self._stragglers.limit_s:g} s"
            self._remove(number, why, Result.RANK_CONNECTION_FAILED)
        return self._take()

    def _waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        """All that somebody waits for: its name, who is missing, and what it is."""
        for round_ in self._rounds:
            yield round_.id, self._absent(round_), round_.describe(next(iter(round_.votes)))
        for running in self._running.values():
            if running.votes:
                yield running.seq, running.members - running.votes.keys(), running.title
