"""Rules of a peer's state machine that random runs rarely reach, one at a time."""

from __future__ import annotations

import pytest
from simulation.manual import WORK, member

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer
from pccl.protocol.peer.calls import CONFIRMING, ENTERING, MOVING, Collective
from pccl.protocol.peer.effects import (
    Answer,
    Arrange,
    EagerOp,
    Effect,
    Fail,
    Fault,
    MembersChanged,
    Send,
    Waits,
)
from pccl.protocol.rounds import Grace
from pccl.types import Result

SMALL = m.Spec("all_reduce", 0, 10, 1)
HELLO = m.Hello(m.PROTOCOL_VERSION, "1", 0, "h", 1001, "", "m1", b"")


def sent(actions: list[Effect]) -> list[m.PeerMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def ends(actions: list[Effect]) -> list[tuple[int, Fault, Result]]:
    return [(end.call, end.fault, end.result) for end in actions if isinstance(end, Fail)]


# ---- what its runtime asks ----


def test_a_peer_is_idle_without_collectives_and_transfers() -> None:
    peer = member()
    peer.are_peers_pending(2)
    assert peer.idle and not peer.moves, "it has no memory of a caller"
    peer.collective(Collective(3, 0, WORK))
    assert not peer.idle and not peer.moves, "nothing has started"
    peer.received(m.Started(3, 9, 1))
    assert not peer.idle and peer.moves and peer.moving == [3]
    peer.engine_complete(3, True, 0, 0)
    assert not peer.idle and peer.moves and peer.moving == [], "it waits for the others"
    peer.received(m.Finished(9, True))
    assert peer.idle and not peer.moves


def test_a_peer_is_not_idle_in_a_synchronization() -> None:
    peer = member()
    peer.sync(2, 3, m.Manifest(0, 0, ()))
    assert not peer.idle and peer.moves and peer.moving == []
    peer.received(m.SyncPlan(2, 9, (), (2,), (0,), (b"digest",)))
    peer.fetch(4, 9)
    assert peer.moving == [4]


def test_a_vote_is_sent_at_once_if_nothing_is_in_its_way() -> None:
    """It says which seq the peer has heard of last."""
    peer = member()
    assert peer.heard_if_free == 0
    peer.collective(Collective(2, 0, SMALL, b"1234"))
    peer.received(m.Started(2, 9, 1, b"5678", final=True))
    assert peer.heard_if_free == 9
    peer.collective(Collective(3, 0, SMALL, b"1234"))
    assert peer.heard_if_free == 9 and not peer.awaits_withdrawal(3)
    peer.cancel(3)
    assert peer.heard_if_free is None and peer.awaits_withdrawal(3)
    peer.received(m.CallError(3, Result.RANK_CONNECTION_LOST.value, "withdrawn"))
    assert peer.heard_if_free == 9 and not peer.awaits_withdrawal(3)
    peer.disconnected("it broke")
    assert peer.heard_if_free is None
    peer.reconnected()
    peer.received(m.Resumed(m.Done()))
    assert peer.heard_if_free == 9
    peer.leave("done")
    assert peer.heard_if_free is None


def test_a_peer_asks_what_a_call_waits_for() -> None:
    peer = member()
    peer.update_topology(2)
    assert sent(peer.inquire(2)) == [m.Inquire(2, 0)]
    peer.collective(Collective(3, 0, WORK))
    assert sent(peer.inquire(3)) == [m.Inquire(3, 0)]
    peer.received(m.Started(3, 9, 1))
    assert sent(peer.inquire(3)) == [m.Inquire(3, 9)]
    assert peer.received(m.Waiting(3, "for peer 2")) == [Waits(3, "for peer 2")]
    stranger = Peer()
    stranger.join(1, HELLO)
    assert not stranger.inquire(1), "the master does not know it yet"


def test_the_master_arranges_streams_that_peers_cannot_open() -> None:
    peer, request = member(), m.RendezvousRequest(2, "ab" * 16, 7, 1)
    assert peer.rendezvous(request) == [Send(request)]
    result = m.RendezvousResult(2, "ab" * 16, False)
    assert peer.received(result) == [Arrange(result)]


# ---- who is in the group ----


def members(epoch: int, *numbers: int, gone: tuple[m.Gone, ...] = ()) -> m.Plan:
    known = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}") for n in numbers)
    return m.Plan(epoch, known, (m.Ring(numbers, 1),), 0, gone=gone)


def test_a_peer_tells_who_has_joined_and_who_is_gone_and_why() -> None:
    peer = member(1, 3)
    assert not any(isinstance(one, MembersChanged) for one in peer.received(members(2, 1, 2, 3)))
    gone = m.Gone(3, "it left", True), m.Gone(2, "its connection broke", False)
    (changed,) = [
        one for one in peer.received(members(3, 1, 4, gone=gone)) if isinstance(one, MembersChanged)
    ]
    joined, lost, left = "peer 4 (h:1004)", "peer 2 (h:1002): it", "peer 3 (h:1003): it left"
    assert changed == MembersChanged(
        (joined,), (f"{lost}s connection broke",), (left,), 2, begun=False
    )
    peer.collective(Collective(2, 0, SMALL, b"1234"))
    peer.received(m.Started(2, 9, 3, b"5678", final=True))
    (changed,) = [one for one in peer.received(members(4, 1)) if isinstance(one, MembersChanged)]
    lost = "peer 4 (h:1004): the run goes on without it"
    assert changed == MembersChanged((), (lost,), (), 1, begun=True)


def test_the_first_plan_of_a_newcomer_is_no_change() -> None:
    peer = Peer()
    peer.join(1, HELLO)
    peer.received(m.Welcome(1))
    assert not any(isinstance(one, MembersChanged) for one in peer.received(members(1, 1, 2)))


# ---- streams ----


def test_a_peer_reports_whom_it_cannot_reach() -> None:
    peer = member(1, 3)
    other = peer.knowledge.plan.peers[1]
    assert peer.unreached(other, "y" * 5000) == [Send(m.Unreached(2, 1, "y" * 1000))]
    peer.optimize(2, 3)
    assert not peer.unreached(other, "refused"), "a probe has a result: there is no link"
    peer.received(m.OptimizeResult(2, 1))
    peer.engine_settled(3, 0, 0)
    peer.sync(4, 5, m.Manifest(0, 0, ()))
    assert peer.unreached(other, "refused") == [Send(m.Unreached(2, 1, "refused"))]


# ---- the end ----


@pytest.mark.parametrize(
    ("told", "why", "fault", "now"),
    [
        (
            m.Kicked(Result.RANK_CONNECTION_FAILED.value, "it was late"),
            "the master dropped this peer: it was late",
            Fault.KICKED,
            Fault.KICKED,
        ),
        (
            m.Refused(Result.INVALID_USAGE.value, "too old"),
            "the master refused this peer: too old",
            Fault.KICKED,
            Fault.KICKED,
        ),
        (
            m.Kicked(Result.MASTER_CONNECTION_FAILED.value, "the master was stopped"),
            "the master dropped this peer: the master was stopped",
            Fault.MASTER_LOST,
            Fault.MASTER_LOST,
        ),
        (
            m.Kicked(Result.INVALID_USAGE.value, "the run is finished", m.Cause.FINISHED),
            "the master dropped this peer: the run is finished",
            Fault.FINISHED,
            Fault.FINISHED,
        ),
        (
            m.Kicked(Result.INVALID_ARGUMENT.value, "it stood alone", m.Cause.MISMATCH),
            "the master dropped this peer: it stood alone",
            Fault.KICKED,
            Fault.MISMATCH,
        ),
    ],
)
def test_all_calls_of_a_dropped_peer_fail(
    told: m.Kicked | m.Refused, why: str, fault: Fault, now: Fault
) -> None:
    """Those that wait with what is wrong with them, and later ones with the end of the run."""
    peer = member()
    peer.update_topology(2)
    peer.collective(Collective(3, 0, SMALL, b"1234"))
    result = Result(told.result)
    assert ends(peer.received(told)) == [(call, now, result) for call in (2, 3)]
    assert peer.over is not None and (peer.over.why, peer.over.fault) == (why, fault)
    assert ends(peer.update_topology(4)) == [(4, fault, result)]
    assert not peer.time_out(4, "late") and not peer.received(m.TopologyResult(2, 1))
    assert peer.knowledge.world == m.World(0, 0, 0, 0) and peer.idle


def test_a_peer_that_was_never_registered_does_not_come_back() -> None:
    for registered in (False, True):
        peer = Peer()
        assert sent(peer.join(1, HELLO)) == [HELLO]
        if registered:
            peer.received(m.Welcome(1))
        lost = (1, Fault.MASTER_LOST, Result.MASTER_CONNECTION_FAILED)
        assert ends(peer.disconnected("it broke")) == [lost] * (not registered)
        assert sent(peer.reconnected()) == [HELLO] * registered


def test_a_peer_that_was_not_accepted_begins_anew_with_the_next_master() -> None:
    """Which may be of another run."""
    peer = Peer()
    peer.join(1, HELLO)
    peer.received(m.Welcome(1))
    peer.received(members(5, 1, 2))
    peer.received(m.WorldSizes(m.World(2, 2, 1, 2)))
    peer.disconnected("it broke")
    assert sent(peer.reconnected()) == [HELLO]
    assert (peer.knowledge.plan, peer.knowledge.world) == (
        m.Plan(0, (), (), 0),
        m.World(0, 0, 0, 0),
    )


def test_a_peer_that_leaves_says_so_once() -> None:
    peer = member()
    peer.update_topology(2)
    actions = peer.leave("done")
    assert sent(actions) == [m.Leave()]
    assert ends(actions) == [(2, Fault.OTHER, Result.INVALID_USAGE)]
    assert not peer.leave("again") and not peer.lost_master("gone") and not peer.broken("a bug")


@pytest.mark.parametrize(
    ("end", "fault", "result"),
    [
        (Peer.lost_master, Fault.MASTER_LOST, Result.MASTER_CONNECTION_FAILED),
        (Peer.broken, Fault.OTHER, Result.INTERNAL_ERROR),
    ],
)
def test_calls_fail_when_the_peer_itself_ends(end, fault: Fault, result: Result) -> None:  # type: ignore[no-untyped-def]
    peer = member()
    peer.update_topology(2)
    peer.sync(3, 4, m.Manifest(0, 0, ()))
    assert ends(end(peer, "why") + peer.engine_settled(4, 0, 0)) == [
        (2, fault, result),
        (3, fault, result),
    ]


# ---- a call that fails ----


def test_a_call_that_the_master_refuses_fails_alone() -> None:
    peer = member()
    peer.update_topology(2)
    peer.sync(3, 4, m.Manifest(0, 0, ()))
    lost = Result.RANK_CONNECTION_LOST
    refused = (3, Fault.PEER_LOST, lost)
    assert not ends(peer.received(m.CallError(3, lost.value, "why"))), "the engine serves it"
    assert ends(peer.engine_settled(4, 0, 0)) == [refused]
    assert ends(peer.received(m.CallError(2, lost.value, "why"))) == [(2, Fault.PEER_LOST, lost)]
    assert not peer.received(m.CallError(2, lost.value, "again"))


def test_a_peer_says_that_it_ran_out_of_memory() -> None:
    for cause, why in (
        (m.Cause.MEMORY, "it ran out of memory: for 7 arrays"),
        (m.Cause.OTHER, "for 7 arrays"),
    ):
        peer = member()
        peer.collective(Collective(2, 0, WORK))
        peer.received(m.Started(2, 9, 1))
        vote = m.FinishVote(9, False, why, cause)
        assert sent(peer.engine_failed(2, "for 7 arrays", cause=cause)) == [vote]


def test_a_caller_whose_time_is_up_waits_for_what_the_master_says() -> None:
    """Only the master knows whether the call has ended already."""
    peer = member()
    peer.update_topology(2)
    assert peer.time_out(2, "its time is up") == [Send(m.Withdraw(2))]
    assert not peer.time_out(99, "its time is up"), "of a call that has ended"
    peer.sync(3, 4, m.Manifest(0, 0, ()))
    assert peer.time_out(3, "its time is up") == [Send(m.Withdraw(3))]
    peer.collective(Collective(5, 0, WORK))
    assert peer.time_out(5, "its time is up") == [Send(m.Withdraw(5))]
    peer.collective(Collective(6, 1, WORK))
    peer.received(m.Started(6, 9, 1))
    peer.engine_complete(6, True, 0, 0)
    assert peer.time_out(6, "its time is up") == [Send(m.Withdraw(6, 9))]
    peer.received(m.Finished(9, False, "withdrawn"))
    grace = Grace(2, 1.5)
    assert sent(peer.are_peers_pending(7, grace=grace)) == [m.PendingVote(7, False, False, 2, 1500)]


SEND = m.Spec("send", 0, 10, 1000)


@pytest.mark.parametrize("pair", [(), (1, 2)])
def test_an_error_says_how_far_the_call_had_come(pair: tuple[int, int] | tuple[()]) -> None:
    phases = []
    for happens in range(3):
        peer = member()
        peer.collective(Collective(2, 0, SEND if pair else WORK, pair=pair))
        if happens > 0:
            peer.received(m.Started(2, 9, 1))
        if happens > 1:
            peer.engine_complete(2, True, 0, 0)
        actions = peer.broken("a bug") + peer.engine_settled(2, 0, 0)
        (fail,) = [one for one in actions if isinstance(one, Fail)]
        phases.append(fail.phase)
    assert phases == [
        ENTERING,
        MOVING if pair else "while its data went around the ring",
        CONFIRMING,
    ]


def test_a_lost_stream_matters_to_the_master_if_others_may_need_what_went_over_it() -> None:
    peer = member()
    peer.collective(Collective(2, 0, WORK))
    peer.received(m.Started(2, 9, 1))
    assert not peer.stream_lost(1, "reset"), "its op fails, which is a vote"
    peer.collective(Collective(3, 1, SMALL, b"1234"))
    peer.received(m.Started(3, 10, 1, b"5678"))
    assert not peer.stream_lost(1, "reset"), "its data came from the master"
    peer.engine_complete(2, False, 0, 0)
    assert sent(peer.stream_lost(1, "reset")) == [m.Stalled(1, 0, "reset")]
    peer = member()
    peer.collective(Collective(2, 0, SEND, pair=(1, 2)))
    peer.received(m.Started(2, 9, 1))
    peer.engine_complete(2, False, 0, 0)
    assert sent(peer.stream_lost(1, "reset")) == [m.Stalled(0, 9, "reset")], "it has no ring yet"


def test_a_peer_reports_the_members_of_what_runs_to_the_next_master() -> None:
    peer = member(1, 3)
    peer.collective(Collective(2, 5, WORK))
    peer.received(m.Started(2, 9, 1))
    peer.collective(Collective(3, 6, SEND, pair=(1, 2)))
    peer.received(m.Started(3, 10, 1))
    peer.engine_complete(3, True, 0, 0)
    peer.disconnected("it broke")
    (resume,) = sent(peer.reconnected())
    assert isinstance(resume, m.Resume)
    sending = m.Open(10, (1, 2), True, 6, paired=True)
    assert resume.open == (m.Open(9, (1, 2, 3), None, 5), sending)


def test_a_failure_that_was_missed_is_of_a_call_that_has_not_started() -> None:
    """Two calls may follow each other under one tag."""
    peer = member()
    peer.collective(Collective(2, 5, WORK))
    peer.received(m.Started(2, 9, 1))
    peer.disconnected("it broke")
    peer.reconnected()
    lost = Result.RANK_CONNECTION_LOST.value
    assert not peer.received(m.Failed(m.Failure(8, m.Called.COLLECTIVE, 5, (), lost, "why", 0)))


def test_rounds_whose_results_were_missed_are_answered_and_others_repeated() -> None:
    topology, pending = m.TopologyVote(2), m.PendingVote(3)
    for done, expected in (
        (m.Done(), [Send(topology), Send(pending)]),
        (m.Done(topology=1), [Answer(2, 2), Send(pending)]),
        (m.Done(pending=1, were_pending=True), [Send(topology), Answer(3, True)]),
        (m.Done(topology=1, pending=1), [Answer(2, 2), Answer(3, False)]),
    ):
        peer = member()
        peer.update_topology(2)
        peer.are_peers_pending(3)
        peer.disconnected("it broke")
        peer.reconnected()
        assert peer.received(m.Resumed(done)) == expected


@pytest.mark.parametrize("ok", [True, False])
def test_a_call_without_the_rings_says_nothing_about_them(ok: bool) -> None:
    """After a collective around them has committed, the next one may send before its start."""
    peer = member()
    large = m.Spec("all_reduce", 0, 10, 1_000_000)
    assert not any(isinstance(one, EagerOp) for one in peer.collective(Collective(2, 0, large)))
    peer.received(m.Started(2, 9, 1))
    peer.engine_complete(2, True, 0, 0)
    peer.received(m.Finished(9, True))
    for call, (seq, data) in enumerate(((10, b"1234"), (11, None)), 3):
        peer.collective(
            Collective(call, 0, SMALL if data else SEND, data, pair=() if data else (1, 2))
        )
        peer.received(m.Started(call, seq, 1, data))
        peer.engine_complete(call, True, 0, 0)
        peer.received(m.Finished(seq, ok))
    assert any(isinstance(one, EagerOp) for one in peer.collective(Collective(5, 0, large)))
