"""Rules of the master's core that random runs hardly come to, one at a time."""

from __future__ import annotations

from test_hostile import WORK, Hall, resume

from pccl.protocol import messages as m
from pccl.protocol.collectives import REACH_ATTEMPTS_MAX
from pccl.protocol.master import Journal, Master
from pccl.runtime.inline import combine
from pccl.types import Result


def unreached(hall: Hall, by: bytes, peer: int) -> None:
    hall.say(by, m.Unreached(peer, hall.master._groups[0].epoch))


def commit(hall: Hall) -> None:
    seq = hall.start()
    hall.everyone(m.FinishVote(seq, True))
    assert hall.last(b"1") == m.Finished(seq, True)


def test_a_fresh_peer_that_nobody_reaches_goes_at_once() -> None:
    hall = Hall(3)
    unreached(hall, b"1", 2)
    kicked = next(t for t in hall.told[b"2"] if isinstance(t, m.Kicked))
    assert kicked.result == Result.RANK_CONNECTION_FAILED.value
    assert "peer 1 (10.0.0.1:1) could not reach peer 2 (10.0.0.1:1)" in kicked.why
    assert sorted(hall.master.peers) == [1, 3]


def test_of_peers_that_were_reached_before_the_later_one_goes_after_some_attempts() -> None:
    hall = Hall(3)
    commit(hall)
    for _ in range(REACH_ATTEMPTS_MAX - 1):
        unreached(hall, b"3", 1)
    commit(hall)  # it was nothing lasting
    for _ in range(REACH_ATTEMPTS_MAX - 1):
        unreached(hall, b"3", 1)
    assert sorted(hall.master.peers) == [1, 2, 3]
    unreached(hall, b"3", 1)
    assert sorted(hall.master.peers) == [1, 2]


def test_what_was_unreachable_in_another_epoch_does_not_count() -> None:
    hall = Hall(3)
    hall.say(b"1", m.Unreached(2, hall.master._groups[0].epoch - 1))
    unreached(hall, b"1", 99)
    assert sorted(hall.master.peers) == [1, 2, 3]


def test_who_is_lost_again_while_the_master_recovers_may_come_back_once_more() -> None:
    hall = Hall(2)
    hall.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))))
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    hall.perform(hall.master.resume(b"a", resume(1, known=known), "10.0.0.1"))
    hall.perform(hall.master.disconnected(b"a", "its connection broke"))
    for conn, number in ((b"b", 1), (b"c", 2)):
        hall.perform(hall.master.resume(conn, resume(number, known=known), "10.0.0.1"))
    assert {n: peer.conn for n, peer in hall.master.peers.items()} == {1: b"b", 2: b"c"}


def test_who_comes_late_to_a_call_that_failed_is_told_once() -> None:
    hall = Hall(3)
    hall.say(b"1", m.TopologyVote(5))
    hall.say(b"2", m.SyncVote(5, m.Offer(0, 0, ())))
    for call, conn in enumerate((b"1", b"2", b"3"), 5):
        if conn == b"3":
            hall.say(conn, m.TopologyVote(call))
        error = hall.last(conn)
        assert isinstance(error, m.CallError)
        assert error.cause == m.Cause.MISMATCH
        assert "called update_topology()" in error.why
        assert "called sync_shared_state()" in error.why
    hall.everyone(m.TopologyVote(9))
    assert isinstance(hall.last(b"3"), m.TopologyResult)


def test_who_was_given_up_before_the_restart_is_told_so() -> None:
    hall = Hall(0)
    hall.master = Master(1, combine, journal=Journal(5, 1, 4, frozenset((1,))))
    hall.perform(hall.master.resume(b"late", resume(2), "10.0.0.1"))
    refused = hall.last(b"late")
    assert isinstance(refused, m.Refused)
    assert refused.result == Result.RANK_CONNECTION_FAILED.value
    assert "given up as lost" in refused.why


def test_who_comes_back_to_a_run_that_has_gone_on_is_told_so() -> None:
    infos = [m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2)]
    hall = Hall(0)
    hall.master = Master(1, combine)
    late = resume(2, known=tuple(infos), epoch=3)
    hall.perform(hall.master.resume(b"late", late, "10.0.0.1"))
    hall.perform(hall.master.resume(b"one", resume(1, known=(infos[0],), epoch=4), "10.0.0.1"))
    for now_s in (0.0, 60.0):
        hall.perform(hall.master.tick(now_s))
    assert isinstance(hall.last(b"late"), m.Refused)
    assert sorted(hall.master.peers) == [1]


def test_stragglers_are_those_that_others_wait_for() -> None:
    hall = Hall(0)
    hall.master = Master(1, combine, 5.0)
    for conn in (b"1", b"2", b"3"):
        hall.join(conn)
    hall.say(b"1", m.TopologyVote(1))
    for conn in (b"1", b"3"):
        hall.say(conn, m.StartVote(2, 0, WORK))
    for now_s in (0.0, 4.0, 6.0):
        assert sorted(hall.master.peers) == [1, 2, 3]
        hall.perform(hall.master.tick(now_s))
    assert sorted(hall.master.peers) == [1, 3]


def test_a_small_result_is_stable_when_all_have_heard_of_it() -> None:
    hall = Hall(2)

    def reduce(*heard: int) -> m.Started:
        for conn, seq in zip((b"1", b"2"), heard, strict=True):
            hall.say(conn, m.StartVote(2, 0, m.Work("all_reduce", 0, 0, 4), b"abcd", seq))
        started = hall.last(b"1")
        assert isinstance(started, m.Started)
        return started

    first = reduce(0, 0)
    assert first.stable == 0
    second = reduce(first.seq, 0)
    assert second.stable == 0
    assert reduce(second.seq, first.seq).stable == first.seq
