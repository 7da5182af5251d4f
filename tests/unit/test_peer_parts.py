"""Each part of the peer alone: it needs only those that it is given."""

from __future__ import annotations

import gc
import sys
import typing

import msgspec
import pytest

from pccl.errors import PCCLError
from pccl.protocol import messages as m
from pccl.protocol.peer.calls import (
    CONFIRMING,
    ENTERING,
    Collective,
    Collectives,
    Votes,
    abandoned,
    refused,
    timed_out,
)
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    CloseStream,
    CommitOp,
    Effect,
    End,
    Fail,
    Fault,
    Fetched,
    Follow,
    Measure,
    OpenStream,
    Reduced,
    RegisterOp,
    Send,
    StartOp,
    StartTransfer,
    Synced,
)
from pccl.protocol.peer.state import Knowledge, Outbox, PeerContext
from pccl.protocol.peer.transfers import Transfer, Transfers
from pccl.protocol.ring import RingPlace
from pccl.protocol.tuning import DIRECT_MAX, Settings
from pccl.types import Result

WORK = m.Spec("all_reduce", 0, 10, 1000)
INFOS = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}") for n in (1, 2, 3))


class PeerParts:
    """The arguments of the parts of peer 2 of three."""

    def __init__(self) -> None:
        plan = m.Plan(5, INFOS, (m.Ring((1, 2, 3), 1),), 0)
        self.knowledge = Knowledge(2, 7, True, plan, m.World(3, 3, 1, 3))
        context = PeerContext(self.knowledge)
        self.outbox, self.streams = context.outbox, context.streams
        self.abandoned, self.withdrawals = context.abandoned, context.withdrawals
        self.missed: list[tuple[int, str]] = []
        self.votes = Votes(context)
        self.collectives = Collectives(context, lambda *one: self.missed.append(one))
        self.transfers = Transfers(context)

    @property
    def done(self) -> list[Effect]:
        return self.outbox.take()


@pytest.fixture
def parts() -> PeerParts:
    return PeerParts()


def test_the_outbox_is_silent_before_the_introduction() -> None:
    outbox = Outbox()
    outbox.known = False
    outbox.send(m.TopologyVote(1))
    outbox.do(Send(m.Leave()))
    outbox.known = True
    outbox.send(m.TopologyVote(2))
    assert outbox.take() == [Send(m.Leave()), Send(m.TopologyVote(2))]
    assert outbox.take() == []


def test_streams_around_the_rings_are_of_an_epoch(parts: PeerParts) -> None:
    parts.streams.renew()
    assert parts.done == [OpenStream(1, INFOS[2], 0)] and parts.streams.ring == (1,)
    parts.streams.renew()
    assert not parts.done
    parts.knowledge.plan = msgspec.structs.replace(parts.knowledge.plan, epoch=6)
    parts.streams.renew()
    assert parts.done == [CloseStream(1), OpenStream(2, INFOS[2], 0)]
    parts.streams.end()
    assert parts.done == [CloseStream(2)] and not parts.streams.ring


def test_votes_are_answered_with_the_result(parts: PeerParts) -> None:
    parts.votes.enter(1, m.TopologyVote(1))
    parts.votes.enter(2, m.PendingVote(2, patient=True))
    parts.votes.hurry(2)
    sent = [m.TopologyVote(1), m.PendingVote(2, patient=True), m.Hurry(2)]
    assert parts.done == [Send(one) for one in sent]
    parts.votes.topology(m.TopologyResult(1, 4))
    parts.votes.pending(m.PendingResult(2, True, 9))
    assert parts.done == [Answer(1, 3), Answer(2, True)]
    assert parts.knowledge.done == m.Done(topology=4, pending=9, were_pending=True)
    parts.votes.topology(m.TopologyResult(1, 4))
    assert not parts.done and not len(parts.votes)


def test_a_caller_in_a_hurry_keeps_its_grace_and_a_vote_is_repeated_with_it(
    parts: PeerParts,
) -> None:
    parts.votes.enter(4, m.PendingVote(4, True, True, 2, 500))
    parts.votes.hurry(4)
    parts.done.clear()
    parts.votes.resume(m.Done(), m.Done())
    assert parts.done == [Send(m.PendingVote(4, True, False, 2, 500))]


def test_a_caller_that_goes_leaves_a_ghost(parts: PeerParts) -> None:
    parts.votes.enter(1, m.TopologyVote(1))
    parts.votes.release(1, timed_out(1, "late"))
    _, fail = parts.done
    assert isinstance(fail, Fail) and fail.fault is Fault.TIMEOUT
    assert fail.result is Result.TIMEOUT
    assert 1 in parts.abandoned and parts.abandoned.late(1)
    parts.votes.topology(m.TopologyResult(1, 1))
    assert not parts.done and 1 not in parts.abandoned


def test_a_collective_is_answered_when_its_outcome_is_known_and_the_engine_settled(
    parts: PeerParts,
) -> None:
    one = Collective(1, 4, WORK)
    parts.collectives.enter(one, sent=False)
    opened = OpenStream(1, INFOS[2], 0)  # while others enter
    assert parts.done == [opened, RegisterOp(1, 7, 4, 0), Send(m.StartVote(1, 4, WORK))]
    parts.collectives.start(m.Started(1, 9, 5, nonce=3))
    (started,) = parts.done
    assert isinstance(started, StartOp)
    assert (started.op, started.seq, started.nonce) == (1, 9, 3)
    parts.collectives.complete(one, settled=False, tx=10, rx=20)
    parts.collectives.finish(m.Finished(9, True))
    assert parts.done == [Send(m.FinishVote(9, True)), CommitOp(1)]
    parts.collectives.settle(one, 11, 22)
    assert parts.done == [Answer(1, Reduced(3, 11, 22))] and not len(parts.collectives.by_call)


def test_a_collective_that_breaks_is_voted_on_and_restored(parts: PeerParts) -> None:
    one = Collective(1, 4, WORK)
    parts.collectives.enter(one, sent=True)
    parts.collectives.start(m.Started(1, 9, 5))
    assert len(parts.done) == 3
    parts.collectives.fail(one, "a stream was lost", m.Cause.OTHER)
    assert parts.done == [AbortOp(1), Send(m.FinishVote(9, False, "a stream was lost"))]
    parts.collectives.settle(one, 0, 0)
    parts.collectives.finish(m.Finished(9, False, "why"))
    (fail,) = parts.done
    assert isinstance(fail, Fail) and fail.fault is Fault.PEER_LOST and fail.again


SEND = m.Spec("send", 0, 10, 1000)


def test_only_a_call_that_another_peer_made_fail_may_succeed_when_it_is_repeated() -> None:
    lost, no = (
        refused(1, m.CallError(1, result.value, "why"))
        for result in (Result.RANK_CONNECTION_LOST, Result.INVALID_ARGUMENT)
    )
    assert lost.again and not (no.again or timed_out(1, "why").again or abandoned(1).again)


def test_a_send_has_a_stream_at_its_sender_alone(parts: PeerParts) -> None:
    parts.collectives.enter(Collective(1, 4, SEND, pair=(2, 3)), sent=True)
    parts.collectives.enter(Collective(2, 4, SEND, pair=(1, 2)), sent=True)
    assert len(parts.done) == 2
    parts.collectives.start(m.Started(1, 9, 0))
    opened, started = parts.done
    assert isinstance(opened, OpenStream) and opened.to.peer == 3 and isinstance(started, StartOp)
    assert started.rings == (RingPlace(opened.stream, members=2, position=0),)
    parts.collectives.start(m.Started(2, 10, 0))
    (started,) = parts.done
    assert isinstance(started, StartOp)
    assert started.rings == (RingPlace(0, members=2, position=1),)


def test_the_loss_of_a_sends_stream_concerns_that_send_alone(parts: PeerParts) -> None:
    for call, pair in ((1, (2, 3)), (2, ())):
        one = Collective(call, call, SEND if pair else WORK, pair=pair)
        parts.collectives.enter(one, sent=True)
        parts.collectives.start(m.Started(call, call, 5))
        parts.collectives.complete(one, False, 9, 9)
    stream = next(each.stream for each in parts.done if isinstance(each, OpenStream))
    parts.collectives.stream_lost(stream, "reset", up=True)
    assert [one for one in parts.done if isinstance(one, Send)] == [Send(m.Stalled(5, 1, "reset"))]


@pytest.mark.parametrize("pair", [(), (2, 3)])
def test_all_members_know_earlier_failures_after_a_collective_but_not_a_send(
    parts: PeerParts, pair: tuple[int, ...]
) -> None:
    why = "it was like this"
    earlier = m.Failure(8, m.Called.COLLECTIVE, 1, (), Result.INVALID_ARGUMENT.value, why, 0)
    parts.knowledge.fails(earlier)
    one = Collective(1, 4, SEND if pair else WORK, pair=pair)
    parts.collectives.enter(one, sent=True)
    parts.collectives.start(m.Started(1, 9, 5))
    parts.collectives.complete(one, True, 9, 9)
    assert one.phase == CONFIRMING
    parts.collectives.finish(m.Finished(9, True))
    assert list(parts.knowledge.failures) == ([earlier] if pair else [])


SMALL = m.Spec("all_reduce", 0, 0, 4)


def small(parts: PeerParts, call: int) -> Collective:
    """A collective whose data has gone with its vote."""
    one = Collective(call, call, SMALL, data=b"1234")
    parts.collectives.enter(one, sent=True)
    return one


def test_a_small_result_is_kept_until_all_others_have_it(parts: PeerParts) -> None:
    for call in (1, 2, 3):
        small(parts, call)
    for call, stable in ((1, 0), (2, 0), (3, 1)):
        started = m.Started(call, call, 5, b"abcd", final=True, stable=stable)
        parts.collectives.start(started)
    _, _, kept = parts.collectives.report()
    assert [each.seq for each in kept] == [2, 3]


def test_a_small_result_that_was_missed_is_that_of_its_tag(parts: PeerParts) -> None:
    one, other = small(parts, 1), small(parts, 2)
    parts.collectives.missed(m.Small(9, 2, (1, 2, 3), b"abcd"))
    assert (one.outcome, other.outcome, other.seq) == (None, True, 9)
    assert [each for each in parts.done if isinstance(each, Answer)] == [
        Answer(2, Reduced(3, 4, 4))
    ]


def test_a_caller_that_has_left_has_no_result_to_vote_for(parts: PeerParts) -> None:
    one = small(parts, 1)
    parts.collectives.release(one, timed_out(1, "late"))
    assert len(parts.done) == 1
    parts.collectives.start(m.Started(1, 9, 5, b"abcd"))
    assert parts.done == [Send(m.FinishVote(9, False, "late"))]


def test_a_transfer_serves_fetches_and_ends(parts: PeerParts) -> None:
    vote = m.SyncVote(1, m.Manifest(0, 0, ()), holds=False)
    parts.transfers.enter(Transfer(1, 2, vote))
    assert parts.done == [
        RegisterOp(2, 7, 0, 0),
        OpenStream(1, INFOS[2], 0),  # for the collectives that follow
        Send(msgspec.structs.replace(vote, holds=False)),
    ]
    parts.transfers.planned(m.SyncPlan(1, 9, (3,), (1,), (0,), (b"digest",), nonce=4))
    plan = m.SyncPlan(1, 9, (3,), (1,), (0,), (b"digest",), nonce=4)
    assert parts.done == [
        OpenStream(2, INFOS[2], 0),
        StartTransfer(2, 9, 4, (End(2, 2),)),  # peer 3 is the third of the group
        Follow(1, plan),
    ]
    parts.transfers.fetch(8, seq=5)  # by a plan that is no longer in force
    assert not parts.done
    parts.transfers.fetch(8, 9)
    assert parts.done == [
        RegisterOp(8, 7, 0, 8),
        OpenStream(3, INFOS[0], 0),
        StartTransfer(8, 9, 4, (End(3, 1),)),
    ]
    parts.transfers.complete(8, False, 100)
    parts.transfers.fetched(9, True, "", ())
    assert parts.done == [Fetched(1, 9, True, ""), Send(m.FetchedVote(9, True))]
    parts.transfers.synced(m.SyncResult(1, 3, 1, 9))
    assert parts.done == [CommitOp(2), CommitOp(8), CloseStream(2), CloseStream(3)]
    parts.transfers.settle(2, 50, 0)
    parts.transfers.settle(8, 0, 100)
    assert parts.done == [Answer(1, Synced(3, 50, 100))] and parts.transfers.current is None


def test_a_fetch_continues_under_another_plan(parts: PeerParts) -> None:
    parts.transfers.enter(Transfer(1, 2, m.SyncVote(1, m.Manifest(0, 0, ()))))
    parts.transfers.planned(m.SyncPlan(1, 9, (), (1, 3), (0,), (b"digest",)))
    parts.transfers.fetch(8, 9)
    assert len(parts.done) == 8
    second = m.SyncPlan(1, 10, (), (3,), (0,), (b"digest",))
    parts.transfers.planned(second)
    assert parts.done == [
        OpenStream(4, INFOS[2], 0),
        StartTransfer(8, 10, 0, (End(4, 1),)),
        CloseStream(2),
        CloseStream(3),
        Follow(1, second, resumed=True),
    ]
    third = m.SyncPlan(1, 11, (), (3,), (0,), (b"other",))
    parts.transfers.planned(third)
    assert parts.done == [AbortOp(8), CloseStream(4), Follow(1, third)]


def test_a_probe_is_a_transfer_that_is_measured(parts: PeerParts) -> None:
    parts.transfers.enter(Transfer(1, 2, m.OptimizeVote(1)))
    parts.transfers.probed(m.Probe(1, 9, (1,), 4))
    parts.transfers.fetch(8, 9)
    assert parts.done[2:] == [
        OpenStream(1, INFOS[0], 0),
        StartTransfer(2, 9, 4, (End(1, 0),)),
        Measure(1, 9, (1,)),
        RegisterOp(8, 7, 0, 8),
        StartTransfer(8, 9, 4, (End(1, 1),)),
    ]
    parts.transfers.fail(2, "a stream was lost", 0)  # for which nobody waits
    parts.transfers.measured(9, 1000, 5)
    assert parts.done == [AbortOp(8), Send(m.Measured(9, 1000, 5))]
    parts.transfers.optimized(m.OptimizeResult(1, 1))
    assert parts.done == [AbortOp(2), CloseStream(1)]
    parts.transfers.settle(2, 0, 0)
    parts.transfers.settle(8, 0, 0)
    assert parts.done[-1] == Answer(1, None)


def synchronizing(parts: PeerParts, *plan: int) -> Transfer:
    """A peer that synchronizes: it fetches entry 0 from these holders, and serves peer 3."""
    one = Transfer(1, 2, m.SyncVote(1, m.Manifest(0, 0, ())))
    parts.transfers.enter(one)
    parts.transfers.planned(m.SyncPlan(1, 9, (3,), plan, (0,), (b"digest",), nonce=4))
    parts.transfers.fetch(8, 9)
    parts.done.clear()
    return one


def test_a_fetch_reports_its_progress_until_it_has_all(parts: PeerParts) -> None:
    one = Transfer(1, 2, m.SyncVote(1, m.Manifest(0, 0, ())))
    parts.transfers.enter(one)
    assert not one.planned and one.phase == ENTERING
    parts.transfers.planned(m.SyncPlan(1, 9, (3,), (1,), (0,), (b"digest",), nonce=4))
    parts.transfers.fetch(8, 9)
    parts.done.clear()
    parts.transfers.progress(2, 100)  # what it serves
    parts.transfers.progress(9, 100)
    assert not parts.done
    parts.transfers.progress(8, 100)
    assert parts.done == [Send(m.Progress(9, 100))]
    assert one.phase == "while this peer fetched the content that it lacks"
    parts.transfers.complete(8, False, 100)
    assert parts.done == [Fetched(1, 9, True, "")]
    assert one.phase == "while peers fetched the content that they lack"
    parts.transfers.progress(8, 100)
    assert not parts.done
    again = m.SyncPlan(1, 10, (), (1,), (0,), (b"digest",), nonce=4)
    parts.transfers.planned(again)
    assert parts.done[-2:] == [Follow(1, again, True), Fetched(1, 10, True, "")]


def test_a_fetch_without_streams_may_go_on_and_a_failed_one_may_not(parts: PeerParts) -> None:
    one = synchronizing(parts, 1)
    parts.transfers.fail(8, "no stream is left", starved=5)  # of an earlier plan
    assert not parts.done
    parts.transfers.fail(8, "no stream is left", starved=9)
    assert parts.done == [Fetched(1, 9, False, "no stream is left")] and one.fetch_op == 8
    parts.transfers.fail(8, "no memory", starved=0)
    assert parts.done == [AbortOp(8), Fetched(1, 9, False, "no memory")]
    parts.transfers.fetch(10, 9)
    parts.transfers.fail(10, "no memory", starved=0)
    assert not one.fetched and parts.transfers.fetching == 0


def test_a_peer_that_cannot_serve_says_so_under_each_plan(parts: PeerParts) -> None:
    synchronizing(parts, 1)
    parts.transfers.fail(2, "no stream is left", starved=5)
    assert not parts.done, "there has been another plan since"
    parts.transfers.fail(2, "no stream is left", starved=9)
    assert parts.done == [Send(m.Stalled(5, 9, "no stream is left"))]
    parts.transfers.planned(m.SyncPlan(1, 10, (3,), (), (), ()))
    assert not [one for one in parts.done if isinstance(one, Send)]
    parts.transfers.fail(2, "no memory", starved=0)
    assert parts.done == [Send(m.Stalled(5, 10, "no memory"))]
    parts.transfers.planned(m.SyncPlan(1, 11, (3,), (), (), ()))
    assert Send(m.Stalled(5, 11, "no memory")) in parts.done


def test_a_synchronization_that_was_abandoned_ends_no_other(parts: PeerParts) -> None:
    parts.transfers.enter(Transfer(1, 2, m.SyncVote(1, m.Manifest(0, 0, ()))))
    one = parts.transfers.of(1)
    assert one is not None
    parts.transfers.release(one, timed_out(1, "late"))
    assert parts.abandoned.late(1)
    parts.transfers.settle(2, 0, 0)
    parts.transfers.enter(Transfer(3, 4, m.SyncVote(3, m.Manifest(0, 0, ()))))
    parts.done.clear()
    parts.transfers.synced(m.SyncResult(1, 3, 1, 9))
    assert not parts.done and parts.transfers.of(3) is not None and 1 not in parts.abandoned
    other = parts.transfers.of(3)
    assert other is not None
    parts.transfers.release(other, Fail(3, Result.INTERNAL_ERROR, "gone"))
    assert 3 in parts.abandoned and not parts.abandoned.late(3)


@pytest.mark.parametrize("planned", [False, True])
def test_a_synchronization_continues_with_a_restarted_master(
    parts: PeerParts, planned: bool
) -> None:
    vote = m.SyncVote(1, m.Manifest(0, 0, ()), holds=False)
    if planned:
        synchronizing(parts, 1)
    else:
        parts.transfers.enter(Transfer(1, 2, vote))
        parts.done.clear()
    parts.transfers.resume(m.Done(sync=4), m.Done(sync=4))
    voided = m.SyncPlan(1, 0, (), (), (), ())
    again = [AbortOp(8), CloseStream(2), CloseStream(3), Follow(1, voided)] if planned else []
    assert parts.done == [*again, Send(vote)]


@pytest.mark.parametrize("plan", [0, 9, 12])
def test_a_result_that_was_missed_may_be_of_a_later_plan(parts: PeerParts, plan: int) -> None:
    """0: this peer has no plan, and the last one was 12."""
    if plan:
        synchronizing(parts, 1)
        parts.transfers.complete(8, True, 100)
        parts.done.clear()
    else:
        parts.transfers.enter(Transfer(1, 2, m.SyncVote(1, m.Manifest(0, 0, ()))))
    parts.transfers.resume(m.Done(sync=4), m.Done(sync=5, revision=3, plan=plan or 12))
    followed = [one.plan.seq for one in parts.done if isinstance(one, Follow)]
    assert followed == ([12] if plan == 12 else [])
    assert parts.knowledge.done.sync == 5
    parts.transfers.settle(2, 0, 0)
    assert isinstance(parts.done[-1], Answer) and parts.transfers.current is None


@pytest.mark.parametrize("probed", [False, True])
def test_an_optimization_continues_with_a_restarted_master(parts: PeerParts, probed: bool) -> None:
    vote = m.OptimizeVote(1)
    parts.transfers.enter(Transfer(1, 2, vote))
    if probed:
        parts.transfers.probed(m.Probe(1, 9, (1,), 4))
    parts.done.clear()
    parts.transfers.resume(m.Done(optimized=4), m.Done(optimized=4))
    assert [one for one in parts.done if isinstance(one, Measure)] == [Measure(1, 0, ())] * probed
    parts.transfers.resume(m.Done(optimized=4), m.Done(optimized=5))
    assert AbortOp(2) in parts.done and parts.knowledge.done.optimized == 5
    parts.transfers.settle(2, 0, 0)
    assert parts.done == [Answer(1, None)]


def test_every_fault_is_an_exception_of_the_api() -> None:
    assert len(Fault.__members__) == len(Fault)  # no exception has two
    assert all(issubclass(fault.value, PCCLError) for fault in Fault)


def steps_to_start(size: int, rings: int) -> int:
    """The functions that a peer of a group of that size calls for one more collective."""
    infos = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", "m") for n in range(1, size + 1))
    order = tuple(info.peer for info in infos)
    plan = m.Plan(5, infos, (m.Ring(order, 1),) * rings, 0)
    context = PeerContext(Knowledge(2, 7, True, plan, m.World(size, size, 1, size)))
    part = Collectives(context, lambda *_: None)
    calls: list[str] = []

    def count(frame: typing.Any, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    for call in (1, 2):
        calls.clear()
        part.enter(Collective(call, call, WORK), sent=False)
        gc.collect()  # or finalizers of other tests' objects would be counted
        gc.disable()
        sys.setprofile(count)
        try:
            part.start(m.Started(call, call, 5))
        finally:
            sys.setprofile(before)
            gc.enable()
    started = [effect for effect in context.outbox.take() if isinstance(effect, StartOp)]
    assert [len(one.rings) for one in started] == [rings, rings]
    assert {place.members for one in started for place in one.rings} == {size}
    return len(calls)


@pytest.mark.parametrize("rings", [1, 3])
def test_a_start_costs_a_peer_no_more_in_a_large_group(rings: int) -> None:
    assert steps_to_start(500, rings) == steps_to_start(4, rings) < 60


def test_members_are_from_the_last_plan() -> None:
    knowledge = Knowledge()
    assert knowledge.members == ()
    for infos in (INFOS, INFOS[:2], INFOS):
        knowledge.plan = m.Plan(5, infos, (), 0)
        assert knowledge.members == tuple(info.peer for info in infos)
        assert knowledge.members is knowledge.members


ROWS = m.Spec("all_to_all", 0, 10, 5, members=5)


def bench_of_five(outgoing: tuple[int, ...] = ()) -> PeerParts:
    """Peer 2 of five on five machines, in two rings."""
    parts = PeerParts()
    infos = tuple(
        m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}", outgoing=n in outgoing) for n in range(1, 6)
    )
    rings = m.Ring((1, 2, 3, 4, 5), 1), m.Ring((4, 3, 2, 1, 5), 1)
    parts.knowledge.plan = m.Plan(5, infos, rings, 0)
    return parts


def start(
    parts: PeerParts, call: int, work: m.Spec = ROWS, gives: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Starts a collective. Returns its direct streams; and the peers to which streams were opened,
    with the shares of these."""
    parts.collectives.enter(Collective(call, call, work, rows=(gives, gives)), sent=False)
    parts.collectives.start(m.Started(call, call, 5))
    done = parts.done
    direct = next(one.direct for one in done if isinstance(one, StartOp))
    return direct, [(one.to.peer, one.shares) for one in done if isinstance(one, OpenStream)]


def test_rows_go_directly_to_receivers_that_are_not_next_on_a_ring() -> None:
    parts = bench_of_five()
    uneven = start(parts, 1, gives=(3, 0, 0, 4, 0))
    assert uneven == ((0, 0, 0, 3, 0), [(3, 1), (1, 1), (4, 2)]), "two rings, and one receiver"
    assert start(parts, 2) == ((0, 0, 0, 3, 4), [(5, 4)])
    gather = m.Spec("gather", 0, 10, 5, root=3, members=5)
    assert start(parts, 3, gather) == ((0, 0, 0, 3, 0), [])
    scatter = m.Spec("scatter", 0, 10, 5, root=3, members=5)
    assert start(parts, 4, scatter) == ((0, 0, 0, 0, 0), [])
    assert start(parts, 5, WORK) == ((), [])
    parts.knowledge.plan = msgspec.structs.replace(parts.knowledge.plan, epoch=6)
    parts.streams.renew()
    assert {one.stream for one in parts.done if isinstance(one, CloseStream)} == {1, 2, 3, 4}


def test_rows_go_around_where_no_direct_stream_can_be_connected() -> None:
    parts = bench_of_five(outgoing=(2, 5))
    assert start(parts, 1)[0] == (0, 0, 0, 3, 0), "neither 2 nor 5 can connect to the other"
    parts.streams.unreached(4)
    parts.collectives.stream_lost(3, "timed out", up=False)
    assert not parts.done, "nobody is blamed"
    assert start(parts, 2)[0] == (0, 0, 0, 0, 0)
    parts.streams.keep({1, 2, 3, 5})
    assert start(parts, 3)[0] == (0, 0, 0, 4, 0), "the number may not come back; others do"


def test_a_lost_direct_stream_breaks_the_epoch_if_it_has_carried_rows() -> None:
    parts = bench_of_five()
    assert start(parts, 1)[0] == (0, 0, 0, 3, 4)
    one = parts.collectives.by_call.get(1)
    assert one is not None
    parts.collectives.complete(one, False, 9, 9)
    parts.done.clear()
    parts.collectives.stream_lost(4, "reset", up=True)
    assert parts.done == [Send(m.Stalled(5, 0, "reset"))]
    assert start(parts, 2) == ((0, 0, 0, 3, 5), [(5, 4)])


@pytest.mark.parametrize(
    ("members", "own", "direct"),
    [
        (2, DIRECT_MAX, False),
        (3, 3, True),
        (4, 3, False),
        (DIRECT_MAX, DIRECT_MAX, True),
        (DIRECT_MAX + 1, DIRECT_MAX + 1, False),
    ],
)
def test_rows_go_directly_in_groups_that_are_not_too_large(
    members: int, own: int, direct: bool
) -> None:
    parts = PeerParts()
    order = tuple(range(1, members + 1))
    infos = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}") for n in order)
    parts.knowledge.plan = m.Plan(5, infos, (m.Ring(order, 1),), 0)
    parts.knowledge.settings = Settings(direct_max=own)
    found, _ = start(parts, 1, m.Spec("all_to_all", 0, 10, 5, members=members))
    assert any(found) == direct
