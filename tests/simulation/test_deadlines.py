"""Rounds that do not wait for everybody: who is dropped as late, and when."""

from __future__ import annotations

from simulation.manual import ManualRun

from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.eventlog import Recorder
from pccl.protocol.master.inputs import Received, Tick
from pccl.protocol.peer import Peer
from pccl.protocol.peer.effects import Send
from pccl.protocol.rounds import Grace
from pccl.types import Result


def run_of(*groups: int) -> ManualRun:
    """Accepted peers "1", "2", ... of these groups, at 100 s."""
    run = ManualRun(0)
    for i, group in enumerate(groups, 1):
        run.join(b"%d" % i, group=group)
    run.say(b"1", m.TopologyVote(1))
    pass_time(run, 100.0)
    return run


def arrive(run: ManualRun, *conns: bytes, enough: int = 2, grace_ms: int = 1000) -> None:
    for conn in conns:
        run.say(conn, m.PendingVote(2, False, False, enough, grace_ms))


def pass_time(run: ManualRun, now_s: float) -> None:
    run.perform(run.master.feed(Tick(now_s)))


def here(master: Master) -> list[int]:
    return sorted(master.peers)


def test_a_peer_that_comes_after_the_grace_is_dropped() -> None:
    run = run_of(0, 0, 0, 0)
    arrive(run, b"1", b"3")
    pass_time(run, 101.0)
    assert run.master.patience_s == 1.0, "it begins when enough have come, and not before"
    arrive(run, b"4")
    pass_time(run, 101.75)
    assert run.master.patience_s == 0.25 and here(run.master) == [1, 2, 3, 4]
    pass_time(run, 102.0)
    assert here(run.master) == [1, 3, 4] and run.master.patience_s is None
    (kicked,) = [told for told in run.told[b"2"] if isinstance(told, m.Kicked)]
    assert kicked.result == Result.RANK_CONNECTION_FAILED.value
    assert kicked.why == (
        "it was late: 3 of 4 had entered are_peers_pending(), and waited for 1 s more, which is "
        "their grace"
    )
    for conn in (b"1", b"3", b"4"):
        assert run.last(conn) == m.PendingResult(2, False, 1)


def test_a_grace_may_be_a_fraction_of_a_second() -> None:
    run = run_of(0, 0, 0)
    arrive(run, b"1", b"3", grace_ms=1500)
    pass_time(run, 101.0)
    assert run.master.patience_s == 1.5
    pass_time(run, 102.25)
    assert run.master.patience_s == 0.25 and here(run.master) == [1, 2, 3]
    pass_time(run, 102.5)
    assert here(run.master) == [1, 3]


def test_a_master_that_looks_later_drops_late_peers_then() -> None:
    run = run_of(0, 0, 0)
    arrive(run, b"1", b"3")
    pass_time(run, 101.0)
    pass_time(run, 105.0)
    assert here(run.master) == [1, 3] and run.master.patience_s is None


def test_all_late_peers_are_dropped_at_once_in_one_plan() -> None:
    run = run_of(0, 0, 0, 0)
    arrive(run, b"1", b"4", grace_ms=0)
    before = len(run.told[b"1"])
    pass_time(run, 101.0)
    assert here(run.master) == [1, 4]
    told = [type(one) for one in run.told[b"1"][before:]]
    assert told == [m.WorldSizes, m.Plan, m.PendingResult]


def test_no_peer_is_late_before_enough_votes_with_a_grace() -> None:
    run = run_of(0, 0, 0)
    arrive(run, b"1", grace_ms=0)
    run.say(b"2", m.PendingVote(2))
    for now_s in (101.0, 200.0):
        pass_time(run, now_s)
        assert here(run.master) == [1, 2, 3] and run.master.patience_s is None


def test_no_peer_is_late_where_enough_exceeds_the_members() -> None:
    run = run_of(0, 0)
    arrive(run, b"1", enough=9, grace_ms=0)
    pass_time(run, 101.0)
    assert here(run.master) == [1, 2]
    arrive(run, b"2", enough=9, grace_ms=0)
    assert run.last(b"1") == m.PendingResult(2, False, 1)


def test_the_most_patient_vote_counts() -> None:
    run = run_of(0, 0, 0, 0)
    arrive(run, b"1", enough=1, grace_ms=1000)
    pass_time(run, 101.0)
    arrive(run, b"2", enough=3, grace_ms=5000)
    pass_time(run, 110.0)
    assert here(run.master) == [1, 2, 3, 4]
    arrive(run, b"3", enough=1, grace_ms=0)
    pass_time(run, 111.0)
    pass_time(run, 115.5)
    assert here(run.master) == [1, 2, 3, 4]
    pass_time(run, 116.0)
    assert here(run.master) == [1, 2, 3]


def test_a_grace_that_has_begun_ends_with_its_round_and_without_enough() -> None:
    run = run_of(0, 0, 0)
    arrive(run, b"1", b"2")
    pass_time(run, 101.0)
    run.say(b"2", m.Withdraw(2))
    pass_time(run, 101.9)
    arrive(run, b"2")
    pass_time(run, 102.5)
    pass_time(run, 103.0)
    assert here(run.master) == [1, 2, 3], "it begins anew"
    arrive(run, b"3")
    arrive(run, b"1", b"2")
    pass_time(run, 103.6)
    assert here(run.master) == [1, 2, 3], "and in the next round"
    pass_time(run, 104.6)
    assert here(run.master) == [1, 2]


def test_no_group_decides_about_the_members_of_another() -> None:
    run = run_of(0, 0, 7, 7, 7)
    arrive(run, b"1", b"3", b"4", grace_ms=0)
    pass_time(run, 101.0)
    assert here(run.master) == [1, 2, 3, 4], "of group 7 enough have come, of group 0 not"
    arrive(run, b"2")
    assert run.last(b"3") == m.PendingResult(2, False, 1)


def test_a_collective_starts_without_the_late_peer() -> None:
    run = run_of(0, 0, 0)
    work = m.Spec("all_reduce", 0, 10, 1000)
    for conn in (b"1", b"2"):
        run.say(conn, m.StartVote(3, 5, work))
    arrive(run, b"1", b"2", grace_ms=0)
    pass_time(run, 101.0)
    assert [type(one) for one in run.told[b"1"][-2:]] == [m.Started, m.PendingResult]


def test_the_vote_has_the_grace_in_milliseconds() -> None:
    run, peer = run_of(0), Peer()
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "x", b"")
    peer.join(1, hello)
    for told in run.told[b"1"]:
        peer.received(told)
    effects = peer.are_peers_pending(3, False, False, Grace(2, 0.0125))
    assert [one.message for one in effects if isinstance(one, Send)] == [
        m.PendingVote(3, False, False, 2, 12)
    ]
    (long,) = [
        one.message
        for one in peer.are_peers_pending(4, False, False, Grace(2, 1e12))
        if isinstance(one, Send)
    ]
    assert m.decode_from_peer(m.encode(long)) == long, "a measured one may be longer than it can be"


def test_ticks_are_recorded_from_the_first_grace_on() -> None:
    recorder = Recorder(None)
    recorder.matters(Received(b"1", m.PendingVote(1)), False, [])
    assert not recorder.matters(Tick(1.0), False, [])
    recorder.matters(Received(b"1", m.PendingVote(1, False, False, 2, 0)), False, [])
    assert recorder.matters(Tick(2.0), False, [])
    assert not recorder.matters(Tick(3.0), False, [])


def test_the_master_watches_the_time_while_a_peer_may_be_late() -> None:
    """Then a tick follows each message; votes on collectives alone need none (server.py)."""
    run = run_of(0, 0, 0)
    run.say(b"3", m.StartVote(2, 0, m.Spec("all_reduce", 0, 10, 1000)))
    assert not run.master.watches_time
    arrive(run, b"1", b"2")
    assert run.master.watches_time
    pass_time(run, 101.0)
    pass_time(run, 102.0)
    assert here(run.master) == [1, 2] and not run.master.watches_time
