"""Abandoned calls: how a peer handles the messages that follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pages import listed
from simulation.manual import member

from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.calls import Collective

WORK = m.Spec("all_reduce", 0, 10, 2)
BIG = m.Spec("all_reduce", 0, 10, 1000)
DATA = b"8 bytes."


def said(actions: list[effects.Effect]) -> list[m.PeerMessage]:
    return [action.message for action in actions if isinstance(action, effects.Send)]


def ends(actions: list[effects.Effect]) -> list[effects.Answer | effects.Fail]:
    return [action for action in actions if isinstance(action, effects.Answer | effects.Fail)]


def test_a_limit_holds_while_the_master_is_away() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, WORK, DATA))
    peer.update_topology(3)
    assert not ends(peer.time_out(2, "its caller gave up after 1 s"))  # the master is asked
    (lost,) = ends(peer.disconnected("the connection broke"))
    assert isinstance(lost, effects.Fail) and lost.call == 2 and lost.fault is effects.Fault.TIMEOUT
    (late,) = ends(peer.time_out(3, "its caller gave up after 1 s"))
    assert isinstance(late, effects.Fail) and late.fault is effects.Fault.TIMEOUT
    assert "while the master at m:48148 was away" in late.why
    peer.reconnected()
    assert not ends(peer.received(m.Resumed(m.Done())))
    assert said(peer.update_topology(4)) == [m.TopologyVote(4)]


def test_a_peer_that_hears_a_false_failure_leaves() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, WORK, DATA))
    peer.disconnected("the connection broke")
    peer.time_out(2, "its caller gave up after 1 s")
    peer.reconnected()
    actions = peer.received(m.Missed(m.Small(5, 0, (1, 2), DATA)))
    assert said(actions) == [m.Leave()]
    assert not any(isinstance(action, effects.Store) for action in actions)
    assert peer.over is not None and peer.over.fault is effects.Fault.KICKED
    listed(f"KickedError: {peer.over.why}")


def test_patience_that_ends_behind_a_ghost_has_ended() -> None:
    peer = member(2)
    peer.are_peers_pending(2)
    peer.disconnected("the connection broke")
    peer.time_out(2, "its caller gave up after 1 s")
    peer.are_peers_pending(3, patient=True)
    peer.hurry(3)
    peer.reconnected()
    assert said(peer.received(m.Resumed(m.Done()))) == [
        m.PendingVote(3, patient=True),
        m.Hurry(3),
    ]


def test_a_peer_that_leaves_for_one_abandoned_call_has_no_other() -> None:
    peer = member(2)
    peer.update_topology(2)
    peer.disconnected("the connection broke")
    peer.time_out(2, "its caller gave up after 1 s")
    peer.are_peers_pending(3)
    peer.time_out(3, "its caller gave up after 1 s")
    peer.reconnected()
    assert said(peer.received(m.Resumed(m.Done(topology=1)))) == [m.Leave()]
    assert peer.over is not None and "update_topology()" in peer.over.why


ROUNDS: dict[str, tuple[Callable[[Peer], list[effects.Effect]], m.Done]] = {
    "update_topology": (lambda peer: peer.update_topology(2), m.Done(topology=1)),
    "are_peers_pending": (lambda peer: peer.are_peers_pending(2), m.Done(pending=1)),
    "sync_shared_state": (lambda peer: peer.sync(2, 3, m.Manifest(0, 0, ())), m.Done(sync=1)),
    "optimize_topology": (lambda peer: peer.optimize(2, 3), m.Done(optimized=1)),
}


@pytest.mark.parametrize("called", ROUNDS)
@pytest.mark.parametrize("committed", ROUNDS)
def test_a_peer_leaves_if_the_round_that_it_gave_up_has_committed(
    called: str, committed: str
) -> None:
    """Then the others have a result that it lacks."""
    peer = member(2)
    enter, (_, done) = ROUNDS[called][0], ROUNDS[committed]
    enter(peer)
    peer.disconnected("the connection broke")
    actions = peer.time_out(2, "its caller gave up after 1 s") + peer.engine_settled(3, 0, 0)
    assert [type(end) for end in ends(actions)] == [effects.Fail]
    peer.reconnected()
    actions = peer.received(m.Resumed(done))
    if called == committed:
        assert said(actions) == [m.Leave()]
        assert peer.over is not None and f"in {called}()" in peer.over.why
    else:
        assert not said(actions) and peer.over is None and not peer.awaits_withdrawal(2)


def test_a_caller_taken_by_an_exception_stays() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, WORK, DATA))
    (gone,) = ends(peer.cancel(2))
    assert isinstance(gone, effects.Fail) and gone.fault is effects.Fault.OTHER
    actions = peer.received(m.Started(2, 5, 1, DATA, True))
    assert not actions and peer.over is None, "the memory is another's by now"
    peer.disconnected("the connection broke")
    (resume,) = said(peer.reconnected())
    assert isinstance(resume, m.Resume) and [small.seq for small in resume.small] == [5]


def test_the_next_call_waits_for_the_ghost_in_its_place() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, WORK, DATA))
    assert said(peer.cancel(2)) == [m.Withdraw(2, abandoned=True)]
    assert not said(peer.collective(Collective(3, 0, WORK, DATA)))
    assert [type(one) for one in said(peer.collective(Collective(4, 1, WORK, DATA)))] == [
        m.StartVote
    ]
    refused = m.CallError(2, 5, "waited for peer 1", m.Cause.TIMEOUT)
    (vote,) = said(peer.received(refused))
    assert isinstance(vote, m.StartVote) and vote.call == 3


def test_a_call_behind_an_abandoned_one_can_be_given_up() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, WORK, DATA))
    peer.cancel(2)
    peer.collective(Collective(3, 0, WORK, DATA))
    (end,) = ends(peer.time_out(3, "its caller gave up after 1 s"))
    assert isinstance(end, effects.Fail) and end.call == 3
    assert not peer.received(m.CallError(2, 5, "waited for peer 1", m.Cause.TIMEOUT))


def test_a_running_call_is_aborted_and_settled_first() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, BIG))
    peer.received(m.Started(2, 5, 1))
    actions = peer.cancel(2)
    assert effects.AbortOp(2) in actions and not ends(actions)
    assert [(vote.seq, vote.ok) for vote in said(actions) if isinstance(vote, m.FinishVote)] == [
        (5, False)
    ]
    assert [end.call for end in ends(peer.engine_settled(2, 0, 0))] == [2]
    assert not peer.received(m.Finished(5, False, "a caller waits no longer"))


def test_a_complete_call_is_restored_when_its_caller_goes() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, BIG))
    peer.received(m.Started(2, 5, 1))
    peer.engine_complete(2, False, 0, 0)
    actions = peer.cancel(2)
    assert effects.AbortOp(2) in actions and said(actions) == [m.Withdraw(2, 5, abandoned=True)]
    peer.engine_settled(2, 0, 0)
    assert not peer.received(m.Finished(5, True, "")), "others may have it; nothing is left here"


def test_a_start_that_crosses_gets_a_no() -> None:
    peer = member(2)
    peer.collective(Collective(2, 0, BIG))
    peer.cancel(2)
    peer.engine_settled(2, 0, 0)
    (vote,) = said(peer.received(m.Started(2, 5, 1)))
    assert isinstance(vote, m.FinishVote) and not vote.ok


def test_an_agreement_without_an_absent_caller_is_known_to_the_next_master() -> None:
    peer = member(2)
    peer.sync(2, 3, m.Manifest(0, 0, ()))
    peer.disconnected("the connection broke")
    peer.cancel(2)
    peer.engine_settled(3, 0, 0)
    peer.reconnected()
    peer.received(m.Resumed(m.Done(sync=1, revision=5, plan=9, optimized=2)))
    peer.disconnected("the connection broke")
    (resume,) = said(peer.reconnected())
    assert isinstance(resume, m.Resume)
    assert resume.done == m.Done(sync=1, revision=5, plan=9, optimized=2, holds=False)
