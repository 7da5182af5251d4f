"""Calls that fail for all members: whoever missed it learns of it from a restarted master."""

from __future__ import annotations

import msgspec
import pytest
from simulation.manual import ENTRY, OTHER, WORK, ManualRun, RestartedRun, infos, member, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal
from pccl.protocol.master.collectives import SMALL_BYTES_MAX
from pccl.protocol.master.effects import WHY_MAX
from pccl.protocol.master.inputs import Resume
from pccl.protocol.peer import Peer
from pccl.protocol.peer.calls import Collective
from pccl.protocol.peer.effects import Fail, Fault, Send
from pccl.protocol.peer.state import OUTCOMES_KEPT
from pccl.runtime.limits import STRANGER_BYTES
from pccl.types import Result


def failure(seq: int, **fields: object) -> m.Failure:
    known = {"called": m.Called.COLLECTIVE, "tag": 7, "pair": (), "why": "apart", "cause": 0}
    result = Result.RANK_CONNECTION_FAILED.value
    return m.Failure(**{"seq": seq, "result": result, **known, **fields})  # type: ignore[arg-type]


def told_of(run: RestartedRun, conn: bytes) -> list[int]:
    """The seqs of what a peer is told to have missed, in order."""
    told = run.told[conn]
    seqs = [
        one.small.seq if isinstance(one, m.Missed) else one.failure.seq
        for one in told
        if isinstance(one, m.Missed | m.Failed)
    ]
    assert isinstance(told[-1], m.Resumed) or not seqs, "it votes anew before it knows"
    return seqs


def test_only_the_peer_that_missed_a_failure_gets_it() -> None:
    run = RestartedRun(Journal(7, 1, 6, frozenset((1, 2, 3, 4, 5))))
    failed = failure(9), failure(10, pair=(2, 5)), failure(11, pair=(2, 3))
    for number in (1, 2, 3):
        last, known = (11, failed) if number == 3 else (8, ())
        run.back(b"%d" % number, number, 7, 1, 2, 3, 5, last_seq=last, failed=known)
    run.back(b"5", 5, 7, 1, 2, 3, 5, last_seq=10)
    other = msgspec.structs.replace(infos(4)[0], group=1)
    run.perform(
        run.master.feed(
            Resume(b"4", resume(4, 7, info=other, known=(other,), last_seq=2), "10.0.0.1")
        )
    )
    assert not run.master.recovering
    assert {n: told_of(run, b"%d" % n) for n in range(1, 6)} == {
        1: [9],
        2: [9, 10, 11],
        3: [],
        4: [],
        5: [],
    }
    assert [one for one in run.told[b"1"] if isinstance(one, m.Failed)] == [m.Failed(failed[0])]


def test_a_failure_of_the_whole_run_is_sent_to_all_groups() -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    failed = (failure(3, called=m.Called.OPTIMIZE, tag=0),)
    run.back(b"1", 1, 7, last_seq=3, failed=failed)
    other = msgspec.structs.replace(infos(2)[0], group=1)
    run.perform(
        run.master.feed(
            Resume(b"2", resume(2, 7, info=other, known=(other,), last_seq=2), "10.0.0.1")
        )
    )
    assert told_of(run, b"2") == [3]


def test_missed_failures_are_sent_in_order() -> None:
    """A peer that has the last failure has all: the next restart relies on that."""
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    small = m.Small(9, 1, (1, 2), b"data")
    running = m.Open(10, (1, 2), True, 5)
    failed = failure(8), failure(11)
    known = {"failed": failed, "small": (small,), "open": (running,)}
    run.back(b"1", 1, 7, 1, 2, last_seq=11, **known)
    run.back(b"2", 2, 7, 1, 2, last_seq=7)
    assert told_of(run, b"2") == [8, 9, 10, 11]


@pytest.mark.parametrize("what", ["sync", "optimization"])
def test_a_call_that_one_takes_back_for_all_has_failed_for_all(what: str) -> None:
    run = ManualRun(2)
    if what == "sync":
        votes = [m.SyncVote(5, m.Manifest(0, 0, (entry,))) for entry in (ENTRY, OTHER)]
    else:
        votes = [m.OptimizeVote(5)] * 2
    for conn, vote in zip((b"1", b"2"), votes, strict=True):
        run.say(conn, vote)
    run.say(b"1", m.Withdraw(5))
    errors = [run.last(conn) for conn in (b"1", b"2")]
    assert errors[0] == errors[1]
    assert isinstance(errors[0], m.CallError) and errors[0].seq
    assert errors[0].called == (m.Called.SYNC if what == "sync" else m.Called.OPTIMIZE)


def test_a_failure_that_cannot_be_is_not_believed() -> None:
    unlike = {"result": 999}, {"called": 9}, {"pair": (1,)}
    for impossible in (failure(4), *(failure(3, **fields) for fields in unlike)):
        run = RestartedRun()
        run.back(b"1", 1, 7, failed=(impossible,))
        assert "impossible numbers" in run.refused(b"1").why


# ---- the peer ----


def test_a_peer_reports_a_failure_to_the_next_master() -> None:
    machine = member()
    machine.collective(Collective(2, 0, WORK))
    lost, called = Result.RANK_CONNECTION_LOST.value, m.Called.COLLECTIVE
    machine.received(m.CallError(2, lost, "first", 0, 9, called, 0))
    machine.collective(Collective(3, 1, WORK))
    machine.disconnected("a restart")
    machine.reconnected()
    second = m.Failure(10, called, 1, (), lost, "second", 0)
    fails = [a for a in machine.received(m.Failed(second)) if isinstance(a, Fail)]
    assert not fails, "the engine still knows its memory"
    (fail,) = [a for a in machine.engine_settled(3, 0, 0) if isinstance(a, Fail)]
    assert (fail.call, fail.why, fail.fault) == (3, "second", Fault.PEER_LOST)
    machine.disconnected("the next restart")
    (again,) = machine.reconnected()
    assert isinstance(again, Send)
    assert isinstance(again.message, m.Resume)
    assert again.message.last_seq == 10
    assert again.message.failed == (m.Failure(9, called, 0, (), lost, "first", 0), second)


def test_a_newcomer_gets_no_earlier_failure() -> None:
    run = ManualRun(2)
    for call in (2, 3, 4):
        run.everyone(m.StartVote(call, 7, msgspec.structs.replace(WORK, members=3)))
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and error.seq
    assert (error.called, error.tag, error.pair) == (m.Called.COLLECTIVE, 7, ())
    run.join(b"3")
    run.everyone(m.TopologyVote(3))
    (admitted,) = [told for told in run.told[b"3"] if isinstance(told, m.Admitted)]
    assert admitted.heard == error.seq
    newcomer = Peer()
    newcomer.join(1, m.Hello(m.PROTOCOL_VERSION, "1", 0, "h", 1, "", "", b""))
    for told in run.told[b"3"]:
        newcomer.received(told)
    newcomer.disconnected("a restart")
    (again,) = newcomer.reconnected()
    assert isinstance(again, Send)
    assert isinstance(again.message, m.Resume)
    assert again.message.last_seq == error.seq


def failed_twice() -> Peer:
    """One of two peers: a synchronization and an optimization have failed."""
    machine, lost = member(), Result.RANK_CONNECTION_LOST.value
    for call, called in enumerate((m.Called.SYNC, m.Called.OPTIMIZE), 2):
        machine.received(m.CallError(call, lost, "why", 0, call, called))
    return machine


def test_a_failure_known_to_all_is_not_reported_to_the_next_master() -> None:
    """Some peers may have missed the start of a failed collective, and an earlier failure."""
    for ok, left in ((True, [3]), (False, [2, 3])):
        machine = failed_twice()
        machine.collective(Collective(9, 0, WORK))
        machine.received(m.Started(9, 5, 1))
        machine.received(m.Finished(5, ok))
        machine.disconnected("a restart")
        (again,) = machine.reconnected()
        assert isinstance(again, Send) and isinstance(again.message, m.Resume)
        assert [one.seq for one in again.message.failed] == left


def test_resume_after_a_thousand_failures_is_small_enough() -> None:
    machine, why = failed_twice(), "\N{SNOWMAN}" * WHY_MAX
    for call in range(10, 1100):
        machine.received(m.CallError(call, 6, why, 0, call, m.Called.COLLECTIVE))
    machine.disconnected("a restart")
    (again,) = machine.reconnected()
    assert isinstance(again, Send) and isinstance(again.message, m.Resume)
    assert again.message.failed[-1].seq == 1099
    assert len(m.encode(again.message)) + SMALL_BYTES_MAX < STRANGER_BYTES
    for call in range(1100, 3000):
        machine.received(m.CallError(call, 6, "", 0, call, m.Called.COLLECTIVE))
    (again,) = machine.reconnected()
    assert isinstance(again, Send) and isinstance(again.message, m.Resume)
    assert len(again.message.failed) == OUTCOMES_KEPT


def test_peers_in_conflicting_calls_all_keep_the_failure() -> None:
    """So each of them can tell the next master, which tells the others."""
    run = ManualRun(2)
    run.say(b"1", m.TopologyVote(5))
    run.say(b"2", m.SyncVote(6, m.Manifest(0, 0, (ENTRY,))))
    told = {conn: run.told[conn][-2:] for conn in (b"1", b"2")}
    known = {}
    for conn, messages in told.items():
        errors = [one for one in messages if isinstance(one, m.CallError)]
        failures = [one.failure for one in messages if isinstance(one, m.Failed)]
        assert [one.cause for one in errors] == [m.Cause.MISMATCH]
        known[conn] = sorted([(one.seq, one.called) for one in [*errors, *failures]])
    assert known[b"1"] == known[b"2"]
    assert [called for _, called in known[b"1"]] == [m.Called.SYNC, m.Called.TOPOLOGY]


@pytest.mark.parametrize("called", [m.Called.TOPOLOGY, m.Called.PENDING, m.Called.FINISH])
def test_a_peer_that_missed_the_failure_of_conflicting_calls_gets_it(called: m.Called) -> None:
    machine = member()
    calls = {
        m.Called.TOPOLOGY: machine.update_topology,
        m.Called.PENDING: machine.are_peers_pending,
        m.Called.FINISH: machine.finish,
    }
    calls[called](2)
    failed = failure(9, called=called, tag=0, cause=m.Cause.MISMATCH)
    assert not machine.received(m.Failed(failed)), "a call of others that failed just now"
    machine.disconnected("it broke")
    machine.reconnected()
    (end,) = machine.received(m.Failed(failed))
    assert isinstance(end, Fail) and (end.call, end.fault) == (2, Fault.MISMATCH)
