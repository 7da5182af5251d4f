"""The master's state machine: the members of a run, and their agreements. No I/O.

Theory of operation
-------------------

The caller feeds events (inputs.py) and performs the returned effects in order. Most events name a
connection. A connection belongs to one peer forever: a peer that connects again is a new peer,
except after a restart of the master.

A peer is *pending* from its Hello until the accepted peers admit it. Then it is *accepted* until it
leaves, is dropped or lost. Accepted peers vote in rounds (voting.py). Three kinds of agreement last
longer than one vote:

- A *running collective* (collectives.py) begins when its start round commits and ends with one
  outcome for all. It commits if and only if every surviving member holds the whole result. When a
  member is lost or votes that it cannot complete, the group's *epoch* ends, and every running
  collective of the group is interrupted: members that have not voted yet stop and vote whether they
  hold the result. So a collective still commits if all survivors have completed it.
- A *synchronization* (synchronizations.py) begins when its round commits and the election has
  decided which peer receives what. It ends when all receivers have verified what they fetched. When
  a member is lost, or a fetch fails, the election is repeated over the manifests of the survivors.
- An *optimization* (topology.py) begins when its round commits. Peers measure the links between
  them, slot by slot; then the master chooses new rings. A peer that is lost meanwhile is no longer
  measured.

A restarted master knows only its journal: the accepted peers. It waits until they have come back
and sent their knowledge, or until a time limit. Then it continues from the conclusions of
restart.py. It keeps other messages that arrive meanwhile for later. A master without a journal
does the same for the run that most of the returning peers name.

`Master` checks whether an event is legal now, and hands each message to its part. `Run` makes the
parts, and has the steps that involve several parts, such as admitting and removing peers.
docs/internals/architecture.md lists the parts.

Invariants
----------

Each seq has one outcome. Sequence numbers, peer numbers and epochs never repeat. Revisions never go
back while a holder lives. An illegal message ends only its sender's membership.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master import inputs
from pccl.protocol.master.collectives import Combine, are_rows, fits, is_pair
from pccl.protocol.master.effects import Adopt, Drop, Effect, Forget, Refusal, Remember, Send, plain
from pccl.protocol.master.history import FINISHED, GIVEN_UP, OTHER_RUN, OUTNUMBERED, Journal
from pccl.protocol.master.membership import (
    Deadlines,
    PeerRecord,
    newcomer,
    refusal,
    without_whole_team,
)
from pccl.protocol.master.restart import Postponed, Recovery, outdated, plausible, restore
from pccl.protocol.master.run import Run
from pccl.protocol.master.status import Status, explain, snapshot
from pccl.protocol.master.tally import Loss
from pccl.protocol.master.voting import Stragglers, held
from pccl.protocol.rounds import FINISH, OPTIMIZE, PENDING, TOPOLOGY, Grace, Kind, RoundId, Vote
from pccl.types import Result
from pccl.version import __version__


class Master:
    def __init__(
        self,
        run: int,  # the run's number, which distinguishes its bulk data from that of other runs
        combine: Combine,  # reduces contributions of the work's size, in their order
        # peers that keep others waiting for this long are dropped (`tick`)
        straggler_s: float | None = None,
        journal: Journal | None = None,  # the journal of the previous master, if there was one
        *,
        secret: bytes,  # random bytes, unique to this master, from which nonces are made
    ) -> None:
        self.run = Run(run, combine, journal, secret)  # the state of the run
        self._members, self._outbox = self.run.membership, self.run.outbox
        # all registered peers, by number
        self.peers: Mapping[int, PeerRecord] = self._members.peers
        self._stragglers = Stragglers(straggler_s)
        self._deadlines = Deadlines(self._members)
        self._recovery: Recovery | None = None
        if journal is not None and (journal.accepted or not journal.complete):
            self._recovery = Recovery(journal)
        self._by_type: dict[type, Callable[[int, Any], None]] = {
            m.TopologyVote: self._vote_topology,
            m.PendingVote: self._vote_pending,
            m.OptimizeVote: self._vote_optimize,
            m.StartVote: self._vote_start,
            m.SyncVote: self._vote_sync,
            m.Hurry: lambda number, hurry: self.run.voting.hurry(number, hurry.call),
            m.FinishVote: self.run.collectives.finish,
            m.Progress: self._progress,
            m.FetchedVote: self.run.synchronizations.fetched,
            m.Measured: self.run.optimizations.measured,
            m.Unreached: self.run.accusations.unreached,
            m.RendezvousRequest: self.run.clients.rendezvous.request,
            m.Stalled: self._stalled,
            m.Withdraw: self.run.withdraw,
        }
        self._handlers: dict[type, Callable[[Any], None]] = {
            inputs.Hello: self._hello,
            inputs.Examine: self._examine,
            inputs.Resume: self._resume,
            inputs.Received: self._received,
            inputs.Rejected: self._rejected,
            inputs.Disconnected: self._disconnected,
            inputs.Dialled: lambda event: self.run.accusations.dialled(event.peer, event.why),
            inputs.Tick: self._tick,
            inputs.Farewell: self._farewell,
        }

    @classmethod
    def began(cls, began: inputs.Began, combine: Combine, secret: bytes) -> Self:
        master = cls(began.run, combine, began.straggler_s, began.journal, secret=secret)
        if began.small_max is not None:
            master.run.collectives.small_max = began.small_max
        return master

    def feed(self, event: inputs.Event) -> list[Effect]:
        """Handles an event. Returns the effects, to be performed in order."""
        self._handlers[type(event)](event)
        return self._outbox.take()

    @property
    def now_s(self) -> float:
        """The time, set by the caller. Only `status` uses it: no decision depends on it."""
        return self.run.tally.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.run.tally.now_s = now_s

    def status(self) -> Status:
        awaited = None if self._recovery is None else sorted(self._recovery.missing)
        return snapshot(self.run, self.now_s, awaited)

    # ---- events ----

    def _hello(self, event: inputs.Hello) -> None:
        conn, hello, host = event.conn, event.message, event.host
        if self._postponed(event) or self._known(conn, "it said hello twice"):
            return
        info, why = newcomer(hello, host), self.objection(hello, host)
        group = [peer.info for peer in self.peers.values() if peer.info.group == info.group]
        if hello.client:
            group = [one.info for one in self.run.clients.all.values()]
        unreached = event.unreached
        warning = reach.warning(info, unreached) if unreached else ""
        if why:
            self._refuse(conn, why, Result.INVALID_USAGE)
        elif self.run.history.finished and not hello.client:
            self._refuse(conn, *FINISHED)
        elif unreached and reach.matters(info, host, group):
            self._refuse(conn, reach.refusal(info, unreached), Result.RANK_CONNECTION_FAILED)
        elif hello.client:
            self.run.clients.register(conn, info, warning)
        else:
            peer = PeerRecord(conn, info, seen=host, dial=hello.dial)
            peer.since_s = peer.spoke_s = self.now_s
            self.run.register(peer, hello.arithmetic, warning)

    def objection(self, hello: m.Hello, host: str) -> str:
        """Why a `hello` is refused, whatever the result of its dial; empty if it is not."""
        info = newcomer(hello, host)
        if hello.client:
            return refusal(hello, info, None)
        why = refusal(hello, info, self._members.arithmetic)
        return why or self._members.teams.objection(info)

    def _examine(self, event: inputs.Examine) -> None:
        if not self._known(event.conn, "it asked to be examined"):
            report = m.Report(
                m.PROTOCOL_VERSION,
                __version__,
                event.host,
                plain(event.unreached or ""),
                event.unix_s,
                self._members.arithmetic or b"",
                self._members.size(),
                dialled=event.unreached is not None,
            )
            self._outbox.do(Send(event.conn, report), Drop(event.conn, "it has been examined"))

    def _received(self, event: inputs.Received) -> None:
        conn, message = event.conn, event.message
        if self.run.clients.has(conn):
            self.run.clients.received(conn, message)
            return
        if self._recovery is not None:
            left = isinstance(message, m.Leave)
            why = "it sent a message before the master had answered its first one"
            self._postponed(event if left else inputs.Rejected(conn, why))
            return
        number = self._members.at(conn)
        if number is None:
            self._outbox.do(Drop(conn, "its first message was not a hello"))
            return
        peer = self.peers[number]
        peer.spoke_s = self.now_s
        accepted = peer.accepted
        if accepted:
            self._members.go_on()
        kind = type(message)
        handler = self._by_type.get(kind)
        if kind is m.Leave:
            self.run.remove_all({number: "it left"}, how=Loss.LEFT)
        elif isinstance(message, m.Inquire):
            if why := explain(self.run, number, message.call, message.seq):
                self._outbox.send(number, m.Waiting(message.call, plain(why)))
        elif not accepted:
            why = "it voted while it was pending"
            self.run.dismissals.dismiss(number, why, Result.INVALID_USAGE)
        elif handler is None:
            self.run.dismissals.out_of_turn(number, message)
        else:
            handler(number, message)

    def _disconnected(self, event: inputs.Disconnected) -> None:
        """Handles the loss of several connections, and tells the other peers once."""
        conns, why = event.conns, event.why
        self.run.clients.lose(conns, why)
        if self._recovery is not None:
            self._recovery.gone(conns)
            self._recovery.backlog.append(event)
            return
        found = map(self._members.at, conns)
        numbers = [number for number in found if number is not None]
        self._members.lose(numbers)
        self.run.remove_all(dict.fromkeys(numbers, why), how=Loss.DISCONNECTED)
        self._members.forget_lost_groups()

    def _farewell(self, _: inputs.Farewell) -> None:
        """Tells the peers that the master ends for good, so that they do not wait for it."""
        # peers raise MasterLostError for this result
        kicked = m.Kicked(Result.MASTER_CONNECTION_FAILED.value, "the master was stopped")
        conns = [peer.conn for peer in self.peers.values()]
        conns += [client.conn for client in self.run.clients.all.values()]
        self._outbox.do(*(Send(conn, kicked) for conn in conns))

    def _rejected(self, event: inputs.Rejected) -> None:
        if not self._postponed(event) and not self._known(event.conn, event.why):
            self._outbox.do(Drop(event.conn, event.why))

    def _tick(self, event: inputs.Tick) -> None:
        """Ends a recovery, or drops stragglers and late peers."""
        if self._recovery is not None:
            if self._recovery.over(event.now_s):
                self._go_on(self._recovery)
            return
        late = dict(self._stragglers.late(event.now_s, self.run.waits()))
        for number in sorted(late.keys() & self.peers.keys()):
            why = f"others waited for it in {late[number]} for {self._stragglers.limit_s:g} s"
            self.run.dismissals.dismiss(number, why, Result.RANK_CONNECTION_FAILED)
        whys = self._deadlines.late(event.now_s, self.run.voting.open.get(PENDING))
        if whys:
            self.run.dismissals.dismiss_all(whys, Result.RANK_CONNECTION_FAILED)

    @property
    def patience_s(self) -> float | None:
        """Seconds after the last `tick` until another one will drop peers that are late."""
        return self._deadlines.left_s

    @property
    def watches_time(self) -> bool:
        """True if `tick` must be called after each message."""
        return self._recovery is not None or self.run.voting.open.get(PENDING) is not None

    def _postponed(self, event: Postponed) -> bool:
        """Keeps a message that arrives during a recovery for later, within limits."""
        if self._recovery is None:
            return False
        if not self._recovery.postpone(event):
            why = "it sent too many messages while the master waited for its earlier peers"
            self._outbox.do(Drop(event.conn, why))
            self._recovery.backlog.append(inputs.Rejected(event.conn, why))
        return True

    def _known(self, conn: bytes, why: str) -> bool:
        """Drops the peer of a connection for its message; False if the connection is unknown."""
        if self.run.clients.has(conn):
            self.run.clients.drop(conn, why)
            return True
        number = self._members.at(conn)
        if number is not None:
            self.run.dismissals.dismiss(number, why, Result.INTERNAL_ERROR)
        return number is not None

    def knows(self, conn: bytes) -> bool:
        return self._members.at(conn) is not None

    # ---- after a restart ----

    @property
    def recovering(self) -> bool:
        """True while the master awaits peers after a restart; `tick` must be called regularly."""
        return self._recovery is not None

    def deserted(self, resume: m.Resume) -> bool:
        """True if the run has lost all its peers, and the returning peer was among the last ones.

        Then the run cannot have continued without this peer: the master was cut off, not the peers.
        """
        known = self._recovery is None and resume.run == self.run.number
        return known and self._members.deserted_by(resume.info.peer)

    def misses(self, resume: m.Resume) -> bool:
        """True if the peer returns before the loss of its old connection was noticed."""
        peer = self.peers.get(resume.info.peer)
        return peer is not None and peer.accepted and resume.run == self.run.number

    def back_on(self, resume: m.Resume) -> bytes | None:
        """During a recovery, the connection on which this peer has already come back, if any."""
        return None if self._recovery is None else self._recovery.conn_of(resume)

    def reborn(self) -> tuple[Journal | None, list[Effect]]:
        """The journal for a new master after the loss of all connections, and the effects to
        perform first.

        The journal is None if no run is known.
        """
        infos, run = self._members.last_seen, self.run.number
        incarnation, next_peer = self.run.numbers.incarnation + 1, self._members.next_number
        if self._recovery is not None:  # its peers have not come back yet
            journal = self._recovery.again(incarnation, next_peer)
            return journal, [] if journal is None else [Adopt(run, incarnation)]
        accepted = frozenset(info.peer for info in infos)
        remember = [Remember(info) for info in infos]
        refused = dict(self.run.refused)
        journal = Journal(run, incarnation, next_peer, accepted, refused=refused)
        return journal, [Adopt(run, incarnation), *remember]

    def has_heard(self, conn: bytes) -> bool:
        """True if a new master would lack messages of this connection."""
        known = self.knows(conn) or self.run.clients.has(conn)
        return known or (self._recovery is not None and self._recovery.has_heard(conn))

    def _resume(self, event: inputs.Resume) -> None:
        conn, resume = event.conn, event.message
        if self._known(conn, "it came back twice"):
            return
        info = msgspec.structs.replace(resume.info, host=resume.info.host or event.host)
        resume = msgspec.structs.replace(resume, info=info)
        why = refusal(resume, info, self._members.arithmetic)
        if not plausible(resume):
            why = "it comes back with impossible numbers"
        refused = Refusal(why) if why else None
        fresh = not self.peers and self._members.next_number == 1
        if refused is None and self._recovery is None and fresh:
            self._recovery = Recovery(None)
            self._outbox.note(
                "a run comes back that this master does not know: its peers will tell"
            )
        recovery = self._recovery
        if refused is None and recovery is not None:
            refused = recovery.refusal(conn, resume)
        elif refused is None:
            known = self.run.refused.get(info.peer, GIVEN_UP)
            refused = known if resume.run == self.run.number else OTHER_RUN
        if refused is not None or recovery is None:
            self._refuse(conn, *(refused or OTHER_RUN))
            return
        recovery.add(inputs.Resume(conn, resume, event.host))
        self._outbox.note(f"{info} is back")
        if recovery.certain:
            self._go_on(recovery)

    def _refuse(
        self, conn: bytes, why: str, result: Result, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        why = plain(why)
        self._outbox.do(Send(conn, m.Refused(result.value, why, cause)), Drop(conn, why))

    def _go_on(self, recovery: Recovery) -> None:
        """Ends the recovery, and continues from the reports of the returned peers."""
        self._recovery, back = None, recovery.back
        for one in recovery.outnumbered:
            self._outbox.note(f"{one.message.info} comes back, but to another run than most peers")
            self._refuse(one.conn, *OUTNUMBERED)
        for number in sorted(recovery.missing):
            self._outbox.do(Forget(number))
            self._outbox.note(f"peer {number} did not come back")
        for number in outdated({number: one.message for number, one in back.items()}):
            self._refuse(back.pop(number).conn, *GIVEN_UP)
        for number in without_whole_team(
            {number: one.message.info for number, one in back.items()}
        ):
            self._outbox.do(Forget(number))
            self._refuse(back.pop(number).conn, *GIVEN_UP)
        if back:
            assert recovery.run is not None
            self.run.number = recovery.run  # without returned peers, it is a new run
            restore(self.run, back, self.now_s)
        else:
            self._outbox.note("no peer came back, so all shared state is lost")
        for event in recovery.backlog:
            self._handlers[type(event)](event)
        if not self._members.size():
            self.run.admit()

    # ---- votes ----

    def _enter(
        self, number: int, round_id: RoundId, call: int, payload: object = None, **fields: Any
    ) -> None:
        vote = Vote(call, payload, since_s=self.now_s, **fields)
        self.run.voting.enter(number, round_id, vote)

    def _vote_topology(self, number: int, vote: m.TopologyVote) -> None:
        self._enter(number, FINISH if vote.finish else TOPOLOGY, vote.call)

    def _vote_pending(self, number: int, vote: m.PendingVote) -> None:
        grace = Grace(vote.enough, vote.grace_ms / 1000) if vote.enough else None
        self._enter(number, PENDING, vote.call, vote.patient, stuck=vote.stuck, grace=grace)

    def _vote_optimize(self, number: int, vote: m.OptimizeVote) -> None:
        if self.run.optimizations.has(number):
            self.run.dismissals.out_of_turn(number, vote)
        else:
            self._enter(number, OPTIMIZE, vote.call)

    def _vote_start(self, number: int, vote: m.StartVote) -> None:
        rows = (vote.gives, vote.takes) if vote.gives or vote.takes else None
        if (
            (vote.data is not None and not fits(vote.work, vote.data))
            or (rows is not None and not are_rows(vote.work, rows))
            or not is_pair(number, vote)
        ):
            self.run.dismissals.out_of_turn(number, vote)
            return
        peer = self.peers[number]
        peer.heard = max(peer.heard, vote.heard)
        round_id = RoundId(Kind.START, peer.info.group, vote.tag)
        if vote.pair:
            pair = vote.pair[0], vote.pair[1]
            round_id = RoundId(Kind.PAIR, peer.info.group, vote.tag, pair)
        # positional, because this is most of a master's work
        its = vote.data, vote.stuck, rows, held(vote.work, rows, vote.data), self.now_s
        self.run.voting.enter(number, round_id, Vote(vote.call, vote.work, *its))

    def _vote_sync(self, number: int, vote: m.SyncVote) -> None:
        if self.run.synchronizations.of(number) is not None:
            self.run.dismissals.out_of_turn(number, vote)
            return
        group = self._members.group_of(number)
        if not vote.holds:
            self.run.note_loss_of_state(group, {number})
        round_id = RoundId(Kind.SYNC, group)
        self._enter(number, round_id, vote.call, vote.manifest, held=held(vote.manifest))

    def _stalled(self, number: int, stalled: m.Stalled) -> None:
        if not self.run.collectives.stalled(number, stalled):
            self.run.synchronizations.stalled(number, stalled)

    def _progress(self, number: int, progress: m.Progress) -> None:
        """Notes progress for `status`; ignores reports on ops that have ended."""
        running, sync = self.run.table.get(progress.seq), self.run.synchronizations.of(number)
        if running is not None and number in running.members:
            running.progress[number] = min(progress.done, 1000)
        elif sync is not None and sync.seq == progress.seq and number in sync.fetching:
            sync.progress[number] = min(progress.done, 1000)
        elif self.run.numbers.is_unknown(progress.seq):
            self.run.dismissals.out_of_turn(number, progress)
