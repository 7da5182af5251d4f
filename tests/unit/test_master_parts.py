"""Each part of the master alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.collectives import Accusations, Collectives, CollectiveTable, Running
from pccl.protocol.master.effects import WHY_MAX, Dial, Effect, Note, Outbox, Send, plain
from pccl.protocol.master.history import REFUSED_MAX, WHOLE_RUN, History, Numbers, keep_latest
from pccl.protocol.master.membership import NAMES_MAX, Membership, PeerRecord
from pccl.protocol.master.synchronizations import Synchronizations
from pccl.protocol.master.topology import Optimizations, RunContext
from pccl.protocol.master.voting import Voting
from pccl.protocol.rounds import (
    HELD_MAX,
    OPEN_MAX,
    OPTIMIZE,
    PENDING,
    TOPOLOGY,
    Kind,
    OpenRounds,
    Round,
    RoundId,
    Vote,
)
from pccl.types import Result

WORK = m.Spec("all_reduce", 0, 10, 1000)
START = RoundId(Kind.START, 0, 7)


def info(group: int = 0) -> m.PeerInfo:
    return m.PeerInfo(0, group, "10.0.0.1", 1, "", "machine")


def registered(*groups: int) -> Membership:
    """Pending peers, one of each of these groups."""
    membership = Membership()
    for group in groups:
        conn = b"%d" % membership.next_number
        membership.register(PeerRecord(conn, info(group)), b"bits")
    return membership


def accepted(*groups: int) -> Membership:
    """Accepted peers, one of each of these groups."""
    membership = registered(*groups)
    for number in membership.pending:
        membership.accept(number, 0)
    return membership


class AcceptedPeers(RunContext):
    """Some accepted peers of group 0.

    Attributes:
        running: the running collectives.
        gone: peers that were dropped, and why. They stay members.
    """

    def __init__(self, peers: int) -> None:
        membership = accepted(*[0] * peers)
        super().__init__(membership, Numbers(b"secret"), History(), self.remove_all)
        self.gone: dict[int, str] = {}
        self.running = CollectiveTable()
        self.groups.renew(0)
        self.said()

    def remove_all(
        self, whys: Mapping[int, str], result: Result | None, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        self.gone |= whys

    def collectives(self) -> Collectives:
        return Collectives(self, self.running, lambda work, parts: b"".join(parts))

    def voting(self, committed: list[Round]) -> Voting:
        return Voting(self, self.running, committed.append)

    def said(self) -> dict[int, list[m.MasterMessage]]:
        """Takes the messages that were sent, by receiver."""
        found: dict[int, list[m.MasterMessage]] = {}
        for effect in self.outbox.take():
            if isinstance(effect, Send):
                found.setdefault(int(effect.conn), []).append(effect.message)
        return found


def test_the_outbox_keeps_effects_in_order_until_they_are_taken() -> None:
    outbox = Outbox(accepted(0).peers, Numbers(b"secret").take_seq)
    outbox.note("first\n" + "x" * 2 * WHY_MAX)
    outbox.send(1, m.Missed(m.Small(1, 2, (1,), b"")))
    outbox.fail(1, 5, Result.INVALID_USAGE, "why")
    note, missed, failure = outbox.take()
    assert isinstance(note, Note) and len(note.text) < WHY_MAX + 10 and "\n" not in note.text
    assert note == Note(note.text, warns=False) == Note(note.text)
    assert plain("x" * WHY_MAX) == "x" * WHY_MAX
    assert missed == Send(b"1", m.Missed(m.Small(1, 2, (1,), b"")))
    assert failure == Send(b"1", m.CallError(5, Result.INVALID_USAGE.value, "why"))
    assert outbox.take() == []
    failed = outbox.failure(RoundId(Kind.START, 0, 0), Result.TIMEOUT, "why")
    assert (failed.called, failed.tag, failed.pair) == (m.Called.COLLECTIVE, 0, ())


def test_membership_counts_accepted_peers() -> None:
    membership = registered(0, 7, 0)
    assert membership.pending == [1, 2, 3] and membership.any_pending
    assert membership.size() == 0 and membership.arithmetic == b"bits"
    membership.accept(2, 9)
    membership.accept(3, 9)
    assert membership.accepted() == [2, 3]
    assert membership.accepted(7) == [2] and membership.size(0) == 1
    assert [(list(n), w) for n, w in membership.worlds()] == [
        ([2], m.World(2, 1, 2, 1)),
        ([3], m.World(2, 1, 2, 1)),
    ]
    assert membership.at(b"2") == 2
    assert membership.remove(2).info.group == 7
    assert membership.at(b"2") is None and membership.size(7) == 0
    assert membership.names([1, 3]) == "peer 1 (10.0.0.1:1), peer 3 (10.0.0.1:1)"


@pytest.mark.parametrize("more", [0, NAMES_MAX + 3])
def test_of_many_peers_the_first_ones_are_named(more: int) -> None:
    names = accepted(*[0] * (NAMES_MAX + more)).names([*range(1, NAMES_MAX + more + 1)])
    listed = [f"peer {n} (10.0.0.1:1)" for n in range(1, NAMES_MAX + 1)]
    assert names == ", ".join([*listed, *[f"{more} more"] * bool(more)])


def test_membership_knows_the_peers_of_the_last_cutoff() -> None:
    membership = accepted(0, 0)
    membership.lose([1])
    membership.remove(1)
    assert not membership.deserted_by(1)  # the other one is still there
    membership.lose([2])
    membership.remove(2)
    assert membership.deserted_by(1) and membership.deserted_by(2)
    assert {info.peer for info in membership.last_seen} == {1, 2}
    membership.go_on()
    assert not membership.deserted_by(1)


def test_numbers_never_repeat() -> None:
    numbers = Numbers(b"secret", 3)
    seq, epoch = numbers.take_seq(), numbers.take_epoch()
    assert numbers.incarnation == 3
    assert numbers.take_seq() == seq + 1 and numbers.take_epoch() == epoch + 1
    assert numbers.is_unknown(seq + 2) and not numbers.is_unknown(seq + 1)
    numbers.begin(4)
    assert numbers.is_old(seq + 1) and not numbers.is_old(numbers.take_seq())
    assert numbers.take_epoch() > epoch + 1


def test_the_latest_reasons_for_dropping_peers_are_kept_and_that_the_run_is_finished() -> None:
    refused = {WHOLE_RUN: "finished"}
    for number in range(1, REFUSED_MAX + 11):
        refused[number] = "late"
        keep_latest(refused)
    assert refused.keys() == {WHOLE_RUN, *range(12, REFUSED_MAX + 11)}
    assert WHOLE_RUN not in registered(0).peers, "it is no peer's number"


def test_a_history_ends_with_its_last_holder() -> None:
    history = History()
    state = history.count_sync(0)
    state.revision, state.holders = 5, {1, 2}
    assert history.done(0) == m.Done(sync=1, revision=5)
    assert not history.lose(0, {1})
    assert history.lose(0, {2})
    assert history.of(0).revision is None
    assert history.count_sync(1).syncs == 2  # those of all groups are counted together
    history.forget(0)
    assert history.done(0) == m.Done()


def test_the_table_counts_the_collectives_of_each_peer() -> None:
    table = CollectiveTable()
    one, other = Running(1, 0, {1, 2}), Running(2, 5, {3})
    table.add(one)
    table.add(other)
    assert table.running(1) == table.running(3) == 1 and len(table) == 2
    assert list(table.waits()) == []
    one.votes[1] = True
    assert list(table.waits()) == [(1, {2}, "collective 1")]
    assert table.lose(0, [1]) == [one]
    assert one.members == {2} and not one.votes
    table.remove(one)
    assert table.running(2) == 0 and list(table) == [other]


def test_a_peer_may_have_so_many_calls_and_so_much_data_open() -> None:
    rounds = OpenRounds()
    rounds.vote(1, 0, START, Vote(1, WORK, held=HELD_MAX - 10))
    assert rounds.too_much(1, Vote(2, WORK, held=10), OPEN_MAX - 2) == ""
    assert rounds.too_much(2, Vote(1, WORK), OPEN_MAX - 1) == ""
    for running in (OPEN_MAX - 1, OPEN_MAX):
        assert rounds.too_much(1, Vote(2, WORK), running) == f"{OPEN_MAX} calls wait already"
    assert "more than 128 MiB of" in rounds.too_much(1, Vote(2, WORK, held=11), 0)
    rounds.take_back(1, rounds.vote(1, 0, PENDING, Vote(2, False, held=10)))
    assert rounds.held(1) == HELD_MAX - 10 and rounds.of(1).keys() == {START}


def test_a_caller_is_in_a_hurry_in_one_call_alone() -> None:
    rounds = OpenRounds()
    waiting = rounds.vote(1, 0, PENDING, Vote(1000, True))
    for other in (999, 1001):
        assert rounds.hurry(1, other) is None and waiting.is_patient
    assert rounds.hurry(2, 1000) is None
    assert rounds.hurry(1, int("1000")) is waiting and not waiting.is_patient


def test_rounds_are_in_the_way_of_those_whom_they_need() -> None:
    sync, other_sync = RoundId(Kind.SYNC, 0), RoundId(Kind.SYNC, 1)
    for mine, group, theirs, expected in (
        (TOPOLOGY, 1, OPTIMIZE, True),  # both are of the whole run
        (TOPOLOGY, 0, sync, True),
        (sync, 0, TOPOLOGY, True),
        (TOPOLOGY, 1, other_sync, False),  # it needs no peer of group 0
        (sync, 1, TOPOLOGY, False),
        (START, 0, PENDING, False),  # from different threads
    ):
        rounds = OpenRounds()
        rounds.vote(3, 0, RoundId(Kind.START, 0, 99), Vote(1, WORK))
        found = rounds.vote(2, group, theirs, Vote(1, None))
        entered = rounds.vote(1, 0, mine, Vote(1, None))
        blocking = [one for one in rounds.in_the_way(1, entered) if one.id.kind is not Kind.START]
        assert blocking == [found] * expected, (mine, theirs)


def test_a_vote_that_is_taken_back_leaves_nothing() -> None:
    rounds = OpenRounds()
    pair = RoundId(Kind.PAIR, 0, 7, (1, 2))
    for _ in range(2):
        sent = rounds.vote(1, 0, pair, Vote(1, WORK))
        assert rounds.any_pair and sent in rounds
        rounds.take_back(1, sent)
        assert not rounds.any_pair and not len(rounds)
        rounds.close(rounds.vote(1, 0, pair, Vote(1, WORK)))
        assert not rounds.any_pair and not len(rounds)


def test_voting_commits_when_all_have_voted() -> None:
    table, committed = AcceptedPeers(2), list[Round]()
    voting = table.voting(committed)
    voting.enter(1, START, Vote(10, WORK))
    assert not committed and voting.absent(next(iter(voting.open))) == [2]
    voting.enter(2, START, Vote(20, WORK))
    assert [round_.votes.keys() for round_ in committed] == [{1, 2}]
    assert not len(voting.open) and not table.said()


def test_voting_rejects_a_vote_for_a_failed_round() -> None:
    table, committed = AcceptedPeers(5), list[Round]()
    voting = table.voting(committed)
    for number in (1, 2, 3, 4):  # no two agree, so the fifth makes no majority
        assert not table.said()
        voting.enter(number, START, Vote(10 * number, m.Spec("all_reduce", 0, 10, number)))
    told = {n: [type(one) for one in told] for n, told in table.said().items()}
    assert told == {n: [m.CallError] for n in (1, 2, 3, 4)}
    voting.enter(5, START, Vote(50, WORK))
    assert [type(one) for one in table.said()[5]] == [m.CallError]
    voting.enter(5, START, Vote(51, WORK))  # which it is told once
    assert not table.said() and len(voting.open) == 1
    voting.reject_later(2, {PENDING: None})  # type: ignore[arg-type]
    voting.forget(2)
    voting.enter(2, PENDING, Vote(22, False))
    assert not table.said()


def test_voting_drops_a_peer_that_enters_twice() -> None:
    table = AcceptedPeers(2)
    voting = table.voting([])
    voting.enter(1, START, Vote(10, WORK))
    voting.enter(1, START, Vote(11, WORK))
    assert list(table.gone) == [1] and "twice" in table.gone[1]


def test_a_collective_has_one_outcome() -> None:
    table = AcceptedPeers(2)
    collectives = table.collectives()
    collectives.start(Round(START, {1: Vote(10, WORK), 2: Vote(20, WORK)}))
    started = table.said()
    seq = started[1][0].seq  # type: ignore[union-attr]
    collectives.finish(1, m.FinishVote(seq, True))
    assert not table.said()
    collectives.finish(2, m.FinishVote(seq, True))
    assert table.said() == {1: [m.Finished(seq, True)], 2: [m.Finished(seq, True)]}
    assert not len(table.running)
    collectives.finish(2, m.FinishVote(seq, True))
    assert list(table.gone) == [2]


def test_a_small_collective_is_final_at_once() -> None:
    table = AcceptedPeers(2)
    collectives = table.collectives()
    votes: dict[int, Vote] = {1: Vote(10, WORK, b"a"), 2: Vote(20, WORK, b"b")}
    collectives.start(Round(START, votes))
    (started,) = table.said()[2]
    assert isinstance(started, m.Started)
    assert started.final and started.data == b"ab" and not len(table.running)


@pytest.mark.parametrize("ok", [True, False])
def test_a_synchronization_ends_when_all_have_fetched(ok: bool) -> None:
    table = AcceptedPeers(2)
    syncs = Synchronizations(table)
    manifests = [m.Manifest(0, 0, (m.Entry("x", 10, 4, False, digest),)) for digest in (b"1", b"2")]
    round_ = Round(RoundId(Kind.SYNC, 0), {n + 1: Vote(n, o) for n, o in enumerate(manifests)})
    syncs.begin(round_)
    assert 0 in syncs.current
    plan = table.said()[2][0]
    assert isinstance(plan, m.SyncPlan) and plan.holders == (1,)
    syncs.fetched(2, m.FetchedVote(plan.seq, ok, "why"))
    assert (0 in syncs.current) is not ok
    assert [type(one) for one in table.said()[1]] == [m.SyncResult if ok else m.SyncPlan]
    assert syncs.withdraw(1, m.Withdraw(0)) is not ok


def test_an_accusation_is_checked_by_a_dial_before_anybody_goes() -> None:
    table = AcceptedPeers(3)
    collectives = table.collectives()
    accusations = Accusations(table, table.running, collectives, ())
    epoch = table.groups[0].epoch
    accusations.unreached(1, m.Unreached(2, epoch, "timed out"))
    dials = [effect for effect in table.outbox.take() if isinstance(effect, Dial)]
    assert [dial.info.peer for dial in dials] == [2] and not table.gone
    assert table.groups[0].epoch > epoch, "the rings go around what is blocked"
    table.membership.remove(2)  # a lost peer is not judged
    accusations.dialled(2, "refused")
    accusations.unreached(1, m.Unreached(2, epoch, "timed out"))
    assert not table.gone


@pytest.mark.parametrize("rate", [0, 10**6])
def test_an_optimization_measures_links_and_installs_rings(rate: int) -> None:
    table = AcceptedPeers(2)
    table.groups[0].blame.accuse(1, 2, table.groups[0].epoch, "timed out")
    optimizations = Optimizations(table)
    optimizations.begin(Round(RoundId(Kind.OPTIMIZE, None), {1: Vote(10, None), 2: Vote(20, None)}))
    probes = {number: told[0] for number, told in table.said().items()}
    assert {n: p.peers for n, p in probes.items() if isinstance(p, m.Probe)} == {1: (2,), 2: (1,)}
    seq = table.numbers.next_seq - 1
    optimizations.measured(1, m.Measured(seq, rate, 10))
    assert optimizations.has(1) and not table.said()
    optimizations.measured(2, m.Measured(seq, rate, 10))
    assert table.said() == {1: [m.OptimizeResult(10, 1)], 2: [m.OptimizeResult(20, 1)]}
    assert not optimizations.has(1) and table.history.optimized == 1
    assert table.groups[0].rates == {(1, 2): rate, (2, 1): rate}
    assert not table.groups[0].blame.blocked if rate else table.groups[0].blame.blocked
    optimizations.measured(1, m.Measured(seq + 1, 10**6, 10))
    assert list(table.gone) == [1]


def test_an_optimization_whose_peers_are_all_lost_is_over() -> None:
    table = AcceptedPeers(2)
    optimizations = Optimizations(table)
    optimizations.begin(Round(RoundId(Kind.OPTIMIZE, None), {1: Vote(10, None), 2: Vote(20, None)}))
    optimizations.lose({1, 2})
    assert optimizations.current is None


def test_effects_are_values() -> None:
    effect: Effect = Note("text")
    assert effect == Note("text")
    with pytest.raises(AttributeError):
        effect.text = "other"  # type: ignore[misc]
