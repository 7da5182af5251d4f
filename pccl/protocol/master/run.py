"""A run: its parts, and the steps that involve several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from pccl.protocol import messages as m
from pccl.protocol.master.clients import Clients
from pccl.protocol.master.collectives import Accusations, Collectives, CollectiveTable, Combine
from pccl.protocol.master.effects import Drop, Forget, Refusal, Remember, plain
from pccl.protocol.master.history import (
    FINISHED,
    WHOLE_RUN,
    History,
    Journal,
    Numbers,
    keep_latest,
)
from pccl.protocol.master.membership import Membership, PeerRecord
from pccl.protocol.master.synchronizations import Synchronizations
from pccl.protocol.master.tally import Loss
from pccl.protocol.master.topology import Optimizations, RunContext
from pccl.protocol.master.voting import Voting
from pccl.protocol.rounds import Kind, Round
from pccl.types import Result

LATENESS_WEIGHT = 0.1  # the weight of the latest call in a peer's moving average


class Run:
    """Admits and removes peers, and tells all parts."""

    def __init__(
        self, number: int, combine: Combine, journal: Journal | None, secret: bytes
    ) -> None:
        known = journal or Journal(number, 0, 1, frozenset())
        self.number = known.run
        # why the latest peers were dropped. They may not have received the reason.
        self.refused = dict(known.refused)
        self.membership = Membership(known.next_peer)
        self.numbers = Numbers(secret, known.incarnation)
        self.history = History()
        self.history.finished = WHOLE_RUN in self.refused
        context = RunContext(self.membership, self.numbers, self.history, self.remove_all)
        self.outbox, self.groups, self.tally = context.outbox, context.groups, context.tally
        self.dismissals = context.dismissals
        self.table = CollectiveTable()
        self.collectives = Collectives(context, self.table, combine)
        self.synchronizations = Synchronizations(context)
        self.optimizations = Optimizations(context)
        self.accusations = Accusations(
            context, self.table, self.collectives, self.synchronizations.current
        )
        self.clients = Clients(self.numbers, context.rendezvous, self.outbox)
        self.voting = Voting(context, self.table, self._commit)
        self._commits = {
            Kind.TOPOLOGY: self._commit_topology,
            Kind.FINISH: self._commit_topology,
            Kind.PENDING: self._commit_pending,
            Kind.START: self.collectives.start,
            Kind.PAIR: self.collectives.pair,
            Kind.SYNC: self.synchronizations.begin,
            Kind.OPTIMIZE: self.optimizations.begin,
        }

    # ---- peers that join ----

    def register(self, peer: PeerRecord, arithmetic: bytes, warning: str) -> None:
        """Registers a newcomer, pending until it is admitted; the first one is admitted at once."""
        self.membership.register(peer, arithmetic)
        info = peer.info
        self.outbox.send(info.peer, m.Welcome(info.peer, plain(warning)))
        self.outbox.note(f"{info} of group {info.group} registered")
        if not self.membership.size():
            self.admit()
        else:
            self.voting.newcomer()

    def admit(self) -> None:
        """Accepts all pending peers, except those with an incomplete team."""
        fresh = self.membership.admissible
        if not fresh:
            return
        self.membership.go_on()
        heard = self.numbers.next_seq - 1
        self.tally.counts.joined += len(fresh)
        for number in fresh:
            self.membership.accept(number, heard)
        for group in dict.fromkeys(map(self.membership.group_of, fresh)):
            self.groups.renew(group)
        self.publish_world()
        for number in fresh:
            info = self.membership.info(number)
            self.outbox.do(Remember(info))
            done = self.history.done(info.group)
            self.outbox.send(number, m.Admitted(self.number, done, heard))
        has_begun = any(peer.veteran for peer in self.membership.peers.values())
        self.outbox.note(f"joined: {self.membership.names(fresh)}; {self._size} now", has_begun)

    @property
    def _size(self) -> str:
        size = self.membership.size()
        return f"{size} peer{'s' * (size != 1)}"

    def publish_world(self) -> None:
        for numbers, world in self.membership.worlds():
            message = m.WorldSizes(world)
            for number in numbers:
                self.outbox.send(number, message)

    # ---- peers that leave ----

    def remove_all(
        self,
        whys: Mapping[int, str],
        kick: Result | None = None,
        cause: m.Cause = m.Cause.OTHER,
        how: Loss = Loss.DISMISSED,
    ) -> None:
        """Removes peers, each for a reason, and their teams.

        If `kick` is given, they receive this result and the reason. Peers that have already gone
        with their team are ignored.
        """
        lost: dict[int, dict[int, str]] = {}  # by group and number: their names and reasons
        gone: dict[int, list[m.Gone]] = {}  # by group: the losses to report to the others
        whys = {number: why for number, why in whys.items() if number in self.membership.peers}
        kicks = dict.fromkeys(whys, kick)
        partners = self.membership.partners(whys)
        kicks |= dict.fromkeys(partners, Result.RANK_CONNECTION_FAILED)
        others = {
            n: f"{one}, of its team, is gone: {whys[one.peer]}" for n, one in partners.items()
        }
        for number, why in [*whys.items(), *others.items()]:
            why, refusal = plain(why), None
            if (result := kicks[number]) is not None:
                refusal = Refusal(why, result, cause if number in whys else m.Cause.OTHER)
                self.outbox.send(number, m.Kicked(result.value, why, refusal.cause))
            peer = self.membership.remove(number)
            self.voting.forget(number)
            self.outbox.do(Drop(peer.conn, why))
            title, group = f"{peer.info}: {why}", peer.info.group
            left = how is Loss.LEFT or self.history.finished
            if peer.accepted:
                self.tally.counts.lost[how] += 1
                self._note_loss(number, refusal)
                lost.setdefault(group, {})[number] = title
                short = why[: m.GONE_CHARS_MAX]
                gone.setdefault(group, []).append(m.Gone(number, short, left))
            fate = "" if left or not peer.accepted else "lost: "
            self.outbox.note(f"{fate}{title}; {self._size} now", warns=bool(fate))
        if lost:
            self._go_on_without(lost, gone)

    def _note_loss(self, number: int, refusal: Refusal | None) -> None:
        """Notes that an accepted peer is gone. It gets `refusal` if it tries to come back."""
        self.outbox.do(Forget(number, refusal))
        if refusal is not None:
            self.refused[number] = refusal
            keep_latest(self.refused)

    def _go_on_without(
        self, lost: Mapping[int, dict[int, str]], gone: Mapping[int, list[m.Gone]]
    ) -> None:
        self.publish_world()
        numbers = {number for titles in lost.values() for number in titles}
        self.voting.take_back(numbers)
        for group, titles in lost.items():
            self._leave_group(group, titles, gone[group])
        self.optimizations.lose(numbers)
        self.voting.go_on_without(lost)
        if not self.membership.size():
            self.admit()

    def _leave_group(self, group: int, lost: dict[int, str], gone: list[m.Gone]) -> None:
        blame = self.groups[group].blame
        for number in lost:
            blame.forget(number)
        self.note_loss_of_state(group, lost.keys())
        self.history.of(group).repeatable = True
        self.groups.renew(group, gone)
        self.collectives.lose(group, lost)
        self.synchronizations.lose(group, lost)
        if not self.membership.size(group):
            self.groups.pop(group, None)
            self.history.forget(group)
            self.tally.courses.pop(group, None)

    def note_loss_of_state(self, group: int, numbers: Set[int]) -> None:
        """Notes that peers do not hold their group's shared state, which may start over then."""
        if self.history.lose(group, numbers):
            self.outbox.note(f"the last holder of group {group}'s shared state is gone")

    # ---- complete rounds ----

    def _commit(self, round_: Round) -> None:
        if round_.id.group is None:
            self.membership.go_on()
        self._note_lateness(round_)
        self._commits[round_.id.kind](round_)

    def _note_lateness(self, round_: Round) -> None:
        """Notes for `status` how long the first voter waited for each of the others."""
        self.tally.committed(round_)
        peers, votes = self.membership.peers, round_.votes
        first_s = next(iter(votes.values())).since_s
        for number, vote in votes.items():
            peer, late_s = peers[number], vote.since_s - first_s
            peer.late_s += LATENESS_WEIGHT * (late_s - peer.late_s)
            peer.late_total_s += late_s

    def _commit_topology(self, round_: Round) -> None:
        self.history.topology = count = self.history.topology + 1
        if round_.id.kind is Kind.TOPOLOGY:
            self.admit()
        self.outbox.answer(round_, lambda call: m.TopologyResult(call, count))
        if round_.id.kind is Kind.FINISH:
            self.finish()

    def finish(self) -> None:
        """Finishes the run: neither this master nor a later one admits peers."""
        if not self.history.finished:
            self.outbox.note("the run is finished")
        self.history.finished = True
        self._note_loss(WHOLE_RUN, FINISHED)
        why, result, cause = FINISHED
        self.remove_all(dict.fromkeys(self.membership.pending, why), result, cause)

    def _commit_pending(self, round_: Round) -> None:
        self.history.pending = count = self.history.pending + 1
        self.history.were_pending = pending = self.membership.any_pending
        self.outbox.answer(round_, lambda call: m.PendingResult(call, pending, count))

    # ---- patience ----

    def withdraw(self, number: int, withdraw: m.Withdraw) -> None:
        """Withdraws a peer's call. Does nothing if its answer is already on the way."""
        if not (
            self.collectives.withdraw(number, withdraw)
            or self.synchronizations.withdraw(number, withdraw)
            or self.optimizations.withdraw(number, withdraw)
        ):
            self.voting.withdraw(number, withdraw.call)

    def waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        yield from self.voting.waits()
        yield from self.table.waits()
