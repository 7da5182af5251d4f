"""Counts of a master: durations, bytes, retries and the cost of failures; and the progress that
peers report."""

from __future__ import annotations

import re

import msgspec
import pytest
from simulation import trainers
from simulation.manual import ENTRY, OTHER, WORK, ManualRun
from simulation.run import SimulatedRun

from pccl.protocol import messages as m
from pccl.protocol.master.inputs import Disconnected
from pccl.protocol.master.status import Counts, Status
from pccl.protocol.master.tally import (
    BOUNDS_S,
    COUNT_MAX,
    Course,
    Histogram,
    Reason,
    Tally,
    size,
)
from pccl.protocol.peer.calls import State
from pccl.protocol.peer.effects import Send
from pccl.runtime.server.web import exposition
from pccl.types import CollectiveKind

SMALL = m.Spec("all_reduce", 0, 0, 4)


def at(run: ManualRun, now_s: float, conn: bytes, message: m.PeerMessage) -> None:
    run.master.now_s = now_s
    run.say(conn, message)


def counts(run: ManualRun) -> Counts:
    status = run.master.status()
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    return status.counts


def only(durations: Histogram) -> float:
    assert sum(durations.counts) == 1
    return durations.total_s


def run_one(run: ManualRun, start_s: float, end_s: float, ok: bool = True) -> None:
    run.master.now_s = start_s
    seq = run.start()
    run.master.now_s = end_s
    run.everyone(m.FinishVote(seq, ok, "" if ok else "a lane was cut"))


def test_how_long_a_collective_took_and_how_much_it_moved() -> None:
    run = ManualRun(4)
    for conn, now_s in ((b"1", 1.0), (b"3", 2.0), (b"2", 4.0), (b"4", 5.0)):
        at(run, now_s, conn, m.StartVote(2, 0, WORK))
    seq = run.master.run.numbers.next_seq - 1
    run.master.now_s = 5.5
    run.everyone(m.FinishVote(seq, True))
    found = counts(run)
    assert only(found.collectives[CollectiveKind.ALL_REDUCE]) == 0.5
    assert found.carried["none"] == size(WORK) == 4000
    (group,) = run.master.status().groups
    assert group.bus_rate == 4000 * 2 * 3 / 4 / 0.5 and group.goodput == 1.0
    run.everyone(m.StartVote(9, 0, SMALL, b"\1\2\3\4"))  # over when all have voted
    found = counts(run)
    assert sum(found.collectives[CollectiveKind.ALL_REDUCE].counts) == 2
    assert found.carried["none"] == 4004
    quantized = m.Spec("all_reduce", 0, 10, 1000, algorithm=3)
    run.everyone(m.StartVote(10, 0, quantized))
    run.everyone(m.FinishVote(run.master.run.numbers.next_seq - 1, True))
    assert counts(run).carried["blockwise_int8"] == 4000


def test_counts_begin_at_0_and_each_event_is_counted_once() -> None:
    tally, two = Tally(), (m.Part(10, 3), m.Part(11, 5))
    assert tally.counts == Counts() and (Counts().joined, Counts().committed) == (0, 0)
    work = m.Spec("all_reduce", 0, 0, 0, parts=two, algorithm=99)
    assert size(work) == 3 * 4 + 5 * 8
    tally.ended(0, work, 2, 0.0)
    assert tally.counts.committed == 1 and tally.counts.carried["unknown"] == size(work)
    assert COUNT_MAX == 2**63 - 1, "what JSON's readers can hold"


def test_the_cost_of_a_lost_peer() -> None:
    run = ManualRun(3)
    run_one(run, 10.0, 11.0)
    run.master.now_s = 20.0
    seq = run.start()
    run.master.now_s = 24.0
    run.perform(run.master.feed(Disconnected((b"3",), "it broke")))
    at(run, 25.0, b"1", m.FinishVote(seq, False, "lost"))
    at(run, 25.0, b"2", m.FinishVote(seq, False, "lost"))
    assert counts(run).retries == dict.fromkeys(Reason, 0) | {Reason.PEER_LOST: 1}
    (group,) = run.master.status().groups
    assert group.goodput == 1 - 5 / 15, "it goes on being lost until the next one starts"
    run_one(run, 26.0, 30.0)
    assert only(counts(run).recoveries) == 2.0  # from the loss to the start
    (group,) = run.master.status().groups
    assert group.goodput == 1 - 6 / 20
    run.perform(run.master.feed(Disconnected((b"1",), "it broke")))
    run.perform(run.master.feed(Disconnected((b"2",), "it broke")))
    run.join(b"9")
    (group,) = run.master.status().groups
    assert group.goodput is None, "a group that has ended is forgotten"


@pytest.mark.parametrize(
    ("vote", "reason"),
    [
        (m.FinishVote(1, False, "a lane was cut"), Reason.LINK),
        (m.FinishVote(1, False, "no memory", m.Cause.MEMORY), Reason.MEMORY),
        (m.FinishVote(1, False, "gave up", m.Cause.TIMEOUT), Reason.TIMEOUT),
    ],
)
def test_why_a_collective_was_aborted(vote: m.FinishVote, reason: Reason) -> None:
    run = ManualRun(2)
    seq = run.start()
    run.everyone(msgspec.structs.replace(vote, seq=seq))
    assert counts(run).retries[reason] == 1 == sum(counts(run).retries.values())
    assert not sum(counts(run).collectives[CollectiveKind.ALL_REDUCE].counts)


def test_a_peer_that_hangs_costs_goodput_and_is_named() -> None:
    run = ManualRun(3)
    run_one(run, 10.0, 10.0)
    for conn, now_s in ((b"1", 20.0), (b"2", 21.0)):
        at(run, now_s, conn, m.StartVote(2, 0, WORK, stuck=True))
    run.master.now_s = 30.0
    status = run.master.status()
    assert status.groups[0].goodput == 0.5, "it hangs still"
    assert [peer.awaited_s for peer in status.peers] == [0.0, 0.0, 10.0]
    at(run, 40.0, b"3", m.StartVote(2, 0, WORK))
    run.everyone(m.FinishVote(run.master.run.numbers.next_seq - 1, True))
    run.master.now_s = 50.0
    status = run.master.status()
    assert status.groups[0].goodput == 0.5, "nothing is lost any more"
    assert [peer.late_total_s for peer in status.peers] == [0.0, 1.0, 20.0]
    assert [peer.late_s for peer in status.peers] == pytest.approx([0.0, 0.1, 2.0])
    assert not any(peer.awaited_s for peer in status.peers)
    metrics = exposition(status).splitlines()
    assert 'pccl_peer_late_seconds_total{peer="3",name=""} 20.0' in metrics


@pytest.mark.parametrize("vote", [m.TopologyVote(2), m.SyncVote(2, m.Manifest(1, 0, ()))])
def test_any_round_of_a_group_that_waits_costs_goodput(vote: m.PeerMessage) -> None:
    run = ManualRun(2)
    run_one(run, 10.0, 10.0)
    at(run, 20.0, b"1", vote)
    run.master.now_s = 30.0
    assert run.master.status().groups[0].goodput == 0.5


def test_a_launched_call_costs_nothing_for_some_seconds() -> None:
    run = ManualRun(2)
    run_one(run, 10.0, 10.0)
    at(run, 20.0, b"1", m.StartVote(2, 0, WORK))
    for now_s, goodput in ((30.0, 1.0), (50.0, 0.5)):
        run.master.now_s = now_s
        assert run.master.status().groups[0].goodput == goodput


def test_several_that_are_aborted_together_are_one_recovery() -> None:
    course = Course()
    assert course.goodput(5.0) is None and course.started(10.0) is None
    assert course.goodput(9.0) is course.goodput(10.0) is None, "nothing can be said of no time"
    course.aborted(11.0, 15.0)
    course.aborted(12.0, 15.0)
    assert course.goodput(16.0) == 1 - 5 / 6
    assert course.started(20.0) == 5.0 and course.started(21.0) is None
    assert course.goodput(30.0) == 1 - 9 / 20


def test_shared_state_that_newcomers_lack_and_that_others_have_lost() -> None:
    run = ManualRun(2)
    at(run, 1.0, b"1", m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    at(run, 3.0, b"2", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    at(run, 3.25, b"2", m.FetchedVote(run.master.run.numbers.next_seq - 1, True))
    found = counts(run)
    assert only(found.syncs) == 0.25
    assert (found.synced_bytes, found.resynced_bytes, found.parity_failures) == (16, 0, 0)
    run.say(b"1", m.SyncVote(4, m.Manifest(2, 0, (ENTRY,))))
    run.say(b"2", m.SyncVote(4, m.Manifest(2, 0, (OTHER,))))
    run.say(b"2", m.FetchedVote(run.master.run.numbers.next_seq - 1, True))
    found = counts(run)
    assert (found.synced_bytes, found.resynced_bytes, found.parity_failures) == (32, 16, 1)


def test_absurd_sizes_break_nothing() -> None:
    run = ManualRun(2)
    boast = m.Spec("all_reduce", 0, 7, (1 << 64) - 1)
    for _ in range(3):
        run.everyone(m.StartVote(2, 0, boast))
        run.everyone(m.FinishVote(run.master.run.numbers.next_seq - 1, True))
    assert counts(run).carried["none"] == COUNT_MAX
    odd = m.Spec("all_reduce", 0, 999, 10, algorithm=999)
    Tally().ended(0, odd, 2, 0.0)
    assert size(odd) == 0


def test_each_is_a_metric() -> None:
    run = ManualRun(3)
    run_one(run, 1.0, 1.5)
    run_one(run, 2.0, 3.0, ok=False)
    run_one(run, 3.5, 4.0)
    lines = exposition(run.master.status()).splitlines()
    for line in (
        'pccl_retries_total{reason="link"} 1',
        'pccl_collective_bytes_total{wire="none"} 8000',
        "pccl_parity_failures_total 0",
        'pccl_collective_seconds_sum{collective="all_reduce"} 1.0',
        "pccl_recovery_seconds_count 1",
        'pccl_recovery_seconds_bucket{le="0.5"} 1',
        'pccl_goodput_ratio{group="0"} 0.5',
        f'pccl_bus_bandwidth_gbs{{group="0"}} {2 * 2 / 3 * 4000 / 0.5 / 1e9}',
    ):
        assert line in lines
    bounds = [re.search(r'le="([^"]+)"', line) for line in lines if "sync_seconds_bucket" in line]
    assert [bound[1] for bound in bounds if bound] == [*map(str, BOUNDS_S), "+Inf"]


def test_a_peer_reports_its_progress() -> None:
    run = SimulatedRun(3)
    peers = [run.add(trainers.trainer(3)) for _ in range(2)]
    said = 0
    while not said:
        assert run.step()
        for peer in peers:
            for one in list(peer.machine.collectives.started.values()):
                told = [
                    each.message
                    for each in peer.machine.engine_progress(one.call, 250)
                    if isinstance(each, Send)
                ]
                moves = one.state is State.RUNNING
                assert (one.call in peer.machine.moving) is moves
                assert told == ([m.Progress(one.seq, 250)] if moves else [])
                said += one.state is State.COMPLETE
    machine = peers[0].machine
    assert machine.engine_progress(12345, 250) == [], "of an op that has ended"
