"""Rules of synchronizations that random runs rarely reach: starting, and refusing one peer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation.manual import ManualRun, member, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.inputs import Disconnected, Resume, Tick
from pccl.protocol.peer import Peer
from pccl.protocol.peer.effects import Answer, Fail, Fault, Send
from pccl.runtime.inline_collectives import combine
from pccl.types import Result


def manifest(
    revision: int, content: bytes = b"a", strategy: int = 0, min_peers: int = 0
) -> m.Manifest:
    entries = (m.Entry("x", 10, 4, False, content),)
    return m.Manifest(revision, strategy, entries, min_peers=min_peers)


class Sync(ManualRun):
    """Peers that synchronize, each with an offer of its own."""

    def __init__(self, peers: int = 2) -> None:
        super().__init__(peers)
        self.call = 10

    def sync(self, *manifests: m.Manifest) -> list[m.MasterMessage]:
        """The last message to each peer."""
        self.call += 1
        conns = [peer.conn for peer in self.master.peers.values()]
        for conn, one in zip(conns, manifests, strict=True):
            self.say(conn, m.SyncVote(self.call, one))
        return [self.last(conn) for conn in conns]

    def result(self, revision: int, round_: int, short: int = 0) -> m.SyncResult:
        return m.SyncResult(self.call, revision, round_, 0, short=short)

    def admit(self, conn: bytes) -> None:
        accepted = [peer.conn for peer in self.master.peers.values()]
        self.join(conn)
        for other in accepted:
            self.say(other, m.TopologyVote(1))


def test_the_shared_state_does_not_begin_with_fewer_peers_than_one_wants() -> None:
    run = Sync()
    told = run.sync(manifest(7), manifest(0, min_peers=3))
    assert told == [run.result(0, 1, short=3)] * 2
    run.admit(b"3")
    told = run.sync(manifest(7), manifest(0), manifest(3, min_peers=3))
    assert told == [run.result(7, 2)] * 3, "the first one, still, and the highest revision"
    run.say(b"3", m.Leave())
    told = run.sync(manifest(8), manifest(8, min_peers=3))
    assert told == [run.result(8, 3)] * 2, "a run that has begun goes on with any number"


def test_only_a_newcomer_with_another_layout_is_dropped() -> None:
    """The bytes of the others would fit into its memory, and mean something else there."""
    run = Sync()
    run.sync(manifest(0), manifest(0))
    run.admit(b"3")
    other = m.Manifest(0, 0, (m.Entry("x", 10, 4, False, b"a", "2x2/1,2"),))
    run.sync(manifest(1), manifest(1), other)
    assert [isinstance(told, m.Kicked) for told in run.told[b"3"]].count(True) == 1
    assert run.last(b"1") == run.result(1, 2)


def test_a_restarted_master_knows_that_nothing_has_begun() -> None:
    run = Sync(0)
    run.master = Master(1, combine, secret=b"")
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    for number, done in ((1, m.Done(sync=4, short=3)), (2, m.Done(sync=3, short=3))):
        back = resume(number, known=known, done=done)
        run.perform(run.master.feed(Resume(b"%d" % number, back, "10.0.0.1")))
    run.perform(run.master.feed(Tick(0.0)))
    run.perform(run.master.feed(Tick(60.0)))
    told = next(t for t in run.told[b"2"] if isinstance(t, m.Resumed))
    assert (told.done.sync, told.done.short) == (4, 3)
    assert run.sync(manifest(7, min_peers=2), manifest(7)) == [run.result(7, 5)] * 2


def test_a_refused_peer_holds_nothing() -> None:
    run = Sync(3)
    run.sync(manifest(5), manifest(5), manifest(5))
    told = run.sync(manifest(6), manifest(6), manifest(9, b"x"))
    assert told == [run.result(6, 2)] * 3, "the third one concludes that it was refused"
    assert run.master.run.history.of(0).holders == {1, 2}
    assert any("was synchronized without peer 3" in note for note in run.notes)
    run.say(b"1", m.Leave())
    told = run.sync(manifest(6), manifest(7, b"x"))
    assert told[0] == run.result(6, 3), "it cannot take the run over"


def test_an_unchanged_revision_is_legal_once_after_a_join() -> None:
    run = Sync()
    run.sync(manifest(5), manifest(5))
    run.admit(b"3")
    run.say(b"3", m.Leave())
    assert run.sync(manifest(5), manifest(5)) == [run.result(5, 2)] * 2
    told = run.sync(manifest(5), manifest(5))
    assert all(isinstance(error, m.CallError) for error in told)


def lost(run: Sync) -> None:
    run.say(b"3", m.Leave())


def given_up(run: Sync) -> None:
    seq = run.start()
    run.say(b"1", m.Withdraw(2, seq))
    run.everyone(m.FinishVote(seq, False))


def not_completed(run: Sync) -> None:
    seq = run.start()
    run.everyone(m.FinishVote(seq, False, "a stream broke"))


def with_ranks_of_before(run: Sync) -> None:
    run.everyone(m.StartVote(2, 0, m.Spec("broadcast", 0, 10, 5, root=1, members=9)))


@pytest.mark.parametrize("what", [lost, given_up, not_completed, with_ranks_of_before])
def test_an_unchanged_revision_is_legal_once_after_a_loss(what: Callable[[Sync], None]) -> None:
    """A program may catch a loss, and go back to the top of its loop, where it synchronizes."""
    run = Sync(3)
    run.sync(*[manifest(5)] * 3)
    what(run)
    here = len(run.master.peers)
    assert run.sync(*[manifest(5)] * here) == [run.result(5, 2)] * here
    assert all(isinstance(error, m.CallError) for error in run.sync(*[manifest(5)] * here))
    assert run.sync(*[manifest(6)] * here) == [run.result(6, 3)] * here


def test_a_collective_that_commits_makes_no_unchanged_revision_legal() -> None:
    run = Sync()
    run.sync(manifest(5), manifest(5))
    run.everyone(m.FinishVote(run.start(), True))
    assert all(isinstance(error, m.CallError) for error in run.sync(manifest(5), manifest(5)))


def test_a_peer_that_went_back_receives_from_the_others() -> None:
    """An exception may take a caller away from a collective that commits."""
    run = Sync(3)
    run.sync(*[manifest(5)] * 3)
    run.say(b"3", m.Leave())
    told = run.sync(manifest(5), manifest(6, b"b"))
    assert isinstance(told[0], m.SyncPlan) and told[0].holders == (2,)
    assert not told[0].diverged


def test_an_emptied_group_repeats_no_number() -> None:
    """So no peer of before, which may come back to the next master, takes its result as its own."""
    run = Sync(1)
    assert run.sync(manifest(5)) == [run.result(5, 1)]
    run.say(b"1", m.Leave())
    assert not len(run.master.run.groups)
    run.join(b"2")
    assert run.sync(manifest(3)) == [run.result(3, 2)]


def test_a_caller_that_left_before_the_result_does_not_hold_it() -> None:
    """Else it could never begin anew when those who do are gone."""
    for holds in (True, False):
        run = Sync(3)
        run.sync(manifest(8), manifest(8), manifest(8))
        for conn in (b"1", b"2"):
            run.perform(run.master.feed(Disconnected((conn,), "its connection broke")))
        run.say(b"3", m.SyncVote(20, manifest(0), holds))
        told = run.last(b"3")
        if holds:
            assert isinstance(told, m.CallError) and "at 8 already" in told.why
        else:
            assert told == m.SyncResult(20, 0, 2, 0)


def test_a_caller_that_left_before_the_result_receives_it() -> None:
    run = Sync(2)
    run.sync(manifest(8), manifest(8))
    run.say(b"1", m.SyncVote(20, manifest(8)))
    run.say(b"2", m.SyncVote(20, manifest(0, b"b"), holds=False))
    plan = run.last(b"2")
    assert isinstance(plan, m.SyncPlan) and plan.holders == (1,), "at the revision of the others"


def state(revision: int, digests: str = "aaaaa", strict: bool = False) -> m.Manifest:
    """Five entries; each letter is a content."""
    entries = tuple(
        m.Entry(f"t{i}", 10, 4, False, digest.encode()) for i, digest in enumerate(digests)
    )
    return m.Manifest(revision, 0, entries, strict)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("digests", "more"), [("abbba", ""), ("abbbb", ", ...")])
def test_diverged_content_is_reported_or_an_error_for_all(
    strict: bool, digests: str, more: str
) -> None:
    run = Sync(3)
    assert run.sync(state(5, strict=strict), state(5), state(5)) == [run.result(5, 1)] * 3
    plan = run.sync(state(6, strict=strict), state(6), state(6, digests))[2]
    assert isinstance(plan, m.SyncPlan) and plan.diverged and not plan.in_place
    found = tuple(m.Difference(entry, 16, 1, 0, 0) for entry in plan.fetch)
    run.say(b"3", m.FetchedVote(plan.seq, True, "", found))
    told, count = run.last(b"2"), digests.count("b")
    assert run.master.status().counts.parity_failures == 1
    assert any("at revision 6 other content was held by peer 3" in note for note in run.notes)
    if strict:
        assert isinstance(told, m.CallError) and told.cause == m.Cause.DIVERGENCE
        assert told.result == Result.INVALID_ARGUMENT.value
        assert told.why == (
            "at revision 6 content has diverged: peer 3 (10.0.0.1:1) in "
            f"{count} entries ('t1', 't2', 't3'{more}); peer 1 has asked for an error then"
        )
    else:
        assert isinstance(told, m.SyncResult) and told.revision == 6
        assert told.divergence == (m.Divergence(3, count, found),)


def test_a_peer_that_receives_anyway_has_not_diverged() -> None:
    run = Sync(3)
    run.sync(manifest(5, strategy=2), manifest(5, strategy=2), manifest(5, strategy=1))
    told = run.sync(manifest(6, strategy=2), manifest(6, strategy=2), manifest(6, b"b", 1))
    assert isinstance(told[2], m.SyncPlan) and not told[2].diverged


def test_a_restarted_master_knows_that_the_state_has_begun() -> None:
    """Also if the first synchronization had too few peers."""
    run = Sync(2)
    run.sync(manifest(7, min_peers=3), manifest(7))
    run.sync(manifest(7), manifest(7))
    run.join(b"3")
    run.everyone(m.TopologyVote(30))
    (admitted,) = [told for told in run.told[b"3"] if isinstance(told, m.Admitted)]
    assert (admitted.done.sync, admitted.done.short) == (2, 0)


# ---- what a peer concludes ----


def test_a_peer_without_its_caller_reports_no_content() -> None:
    for leaves in (True, False):
        machine = standing(manifest(0))
        if leaves:
            machine.cancel(2)
        machine.received(m.SyncResult(2, 0, 5, 0))
        machine.engine_settled(3, 0, 0)
        said = [e.message for e in machine.sync(9, 10, manifest(0)) if isinstance(e, Send)]
        assert [one.holds for one in said if isinstance(one, m.SyncVote)] == [not leaves]


def standing(one: m.Manifest) -> Peer:
    """A peer that stands in a synchronization, call 2."""
    machine = member(sync=4)
    machine.sync(2, 3, one)
    return machine


def ends(machine: Peer, message: m.MasterMessage) -> Answer | Fail:
    actions = machine.received(message) + machine.engine_settled(3, 0, 0)
    (end,) = (a for a in actions if isinstance(a, Answer | Fail))
    return end


def missed(machine: Peer, done: m.Done) -> Answer | Fail:
    """The end, by way of a master that was restarted."""
    machine.disconnected("a restart")
    machine.reconnected()
    return ends(machine, m.Resumed(done))


def test_a_peer_concludes_that_it_was_refused_also_from_a_restarted_master() -> None:
    for end in (
        ends(standing(manifest(9)), m.SyncResult(2, 6, 5, 0)),
        missed(standing(manifest(9)), m.Done(sync=5, revision=6)),
    ):
        assert isinstance(end, Fail)
        assert (end.result, end.fault) == (Result.INVALID_ARGUMENT, Fault.OTHER)
        assert "this peer offers revision 9, and the others of its group are at 6" in end.why


def test_a_peer_concludes_that_nothing_began_also_from_a_restarted_master() -> None:
    for end in (
        ends(standing(manifest(9)), m.SyncResult(2, 0, 5, 0, short=3)),
        missed(standing(manifest(9)), m.Done(sync=5, short=3)),
    ):
        assert isinstance(end, Fail)
        assert (end.result, end.fault) == (Result.TOO_FEW_PEERS, Fault.TOO_FEW_PEERS)
        assert "begin with 3 peers, and its group has 2" in end.why


def test_a_receiver_is_never_refused() -> None:
    end = ends(standing(manifest(9, strategy=1)), m.SyncResult(2, 6, 5, 0))
    assert isinstance(end, Answer)


def test_a_refused_peer_reports_its_content() -> None:
    machine = standing(manifest(9))
    ends(machine, m.SyncResult(2, 6, 5, 0))
    machine.disconnected("a restart")
    (again,) = machine.reconnected()
    assert isinstance(again, Send) and isinstance(again.message, m.Resume)
    assert (again.message.done.sync, again.message.done.holds) == (5, False)


# ---- torn ----


def test_an_entry_that_may_be_torn_is_fetched_again() -> None:
    """The content elected next may be that of a receiver before its first transfer began."""
    run = Sync(3)
    told = run.sync(manifest(6, b"b"), manifest(6, b"a"), manifest(0, b"a"))
    assert [isinstance(plan, m.SyncPlan) and plan.in_place for plan in told] == [False, False, True]
    run.say(b"1", m.Leave())
    plan = run.last(b"3")
    assert isinstance(plan, m.SyncPlan) and plan.in_place
    assert (plan.holders, plan.digests) == ((2,), (b"a",))


def test_a_torn_peer_offers_nothing_when_the_holders_are_gone() -> None:
    run = Sync(3)
    run.sync(manifest(6, b"b"), manifest(0, b"a"), manifest(0, b"a"))
    run.say(b"1", m.Leave())
    error = run.last(b"2")
    assert isinstance(error, m.CallError) and "no peer is left that offers a whole" in error.why
    assert Result(error.result) is Result.NO_SHARED_STATE_AVAILABLE


def receiving(revision: int) -> Peer:
    """A peer that has begun to receive in place."""
    machine = standing(manifest(revision, b"mine"))
    machine.received(m.SyncPlan(2, 9, (), (1,), (0,), (b"theirs",), in_place=True))
    machine.fetch(4, 9)
    return machine


def test_a_restarted_master_learns_of_torn_content() -> None:
    machine = receiving(5)
    machine.disconnected("a restart")
    machine.reconnected()
    sent = [a.message for a in machine.received(m.Resumed(m.Done(sync=4))) if isinstance(a, Send)]
    (vote,) = (message for message in sent if isinstance(message, m.SyncVote))
    assert vote.manifest.torn and [entry.digest for entry in vote.manifest.entries] == [b""]


def test_a_receiver_in_place_is_not_refused_for_a_lower_revision() -> None:
    machine = receiving(5)
    machine.received(m.SyncPlan(2, 10, (), (1,), (0,), (b"older",), in_place=True))
    machine.engine_settled(4, 0, 0)
    assert isinstance(ends(machine, m.SyncResult(2, 4, 5, 10)), Answer)


def test_a_torn_peer_cannot_be_send_only() -> None:
    """Its content may be anything, and it receives nothing, so its revision does not count."""
    run = Sync(3)
    torn = m.Manifest(5, 2, (m.Entry("x", 10, 4, False, b"a"),), torn=True)
    told = run.sync(manifest(5, strategy=2), manifest(4, strategy=1), torn)
    assert isinstance(told[2], m.Kicked) and "its shared state is torn" in told[2].why
    assert told[0] == run.result(5, 1)
