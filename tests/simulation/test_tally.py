"""What a master counts of its run: durations, bytes, retries and what a failure has cost; and what
peers say of their progress."""

from __future__ import annotations

import re

import msgspec
import pytest
import trainers
from hall import ENTRY, OTHER, WORK, Hall
from simulator import Run

from pccl.protocol import messages as m
from pccl.protocol.master.status import Counts, Status
from pccl.protocol.master.tally import (
    BOUNDS_S,
    COUNT_MAX,
    Course,
    Histogram,
    Reason,
    Tally,
    factor,
    size,
)
from pccl.protocol.messages import CollectiveKind
from pccl.protocol.peer.calls import State
from pccl.protocol.peer.effects import Send
from pccl.runtime.server.web import exposition

SMALL = m.Spec("all_reduce", 0, 0, 4)


def at(hall: Hall, now_s: float, conn: bytes, message: m.PeerMessage) -> None:
    hall.master.now_s = now_s
    hall.say(conn, message)


def counts(hall: Hall) -> Counts:
    status = hall.master.status()
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    return status.counts


def only(durations: Histogram) -> float:
    assert sum(durations.counts) == 1
    return durations.total_s


def run_one(hall: Hall, start_s: float, end_s: float, ok: bool = True) -> None:
    hall.master.now_s = start_s
    seq = hall.start()
    hall.master.now_s = end_s
    hall.everyone(m.FinishVote(seq, ok, "" if ok else "a lane was cut"))


def test_how_long_a_collective_took_and_how_much_it_moved() -> None:
    hall = Hall(4)
    for conn, now_s in ((b"1", 1.0), (b"3", 2.0), (b"2", 4.0), (b"4", 5.0)):
        at(hall, now_s, conn, m.StartVote(2, 0, WORK))
    seq = hall.master.run.numbers.next_seq - 1
    hall.master.now_s = 5.5
    hall.everyone(m.FinishVote(seq, True))
    found = counts(hall)
    assert only(found.collectives[CollectiveKind.ALL_REDUCE]) == 0.5
    assert found.carried["none"] == size(WORK) == 4000
    (group,) = hall.master.status().groups
    assert group.bus_rate == 4000 * 2 * 3 / 4 / 0.5 and group.goodput == 1.0
    hall.everyone(m.StartVote(9, 0, SMALL, b"\1\2\3\4"))  # over when all have voted
    found = counts(hall)
    assert sum(found.collectives[CollectiveKind.ALL_REDUCE].counts) == 2
    assert found.carried["none"] == 4004
    quantized = m.Spec("all_reduce", 0, 10, 1000, algorithm=3)
    hall.everyone(m.StartVote(10, 0, quantized))
    hall.everyone(m.FinishVote(hall.master.run.numbers.next_seq - 1, True))
    assert counts(hall).carried["blockwise_int8"] == 4000


def test_what_a_lost_peer_has_cost() -> None:
    hall = Hall(3)
    run_one(hall, 10.0, 11.0)
    hall.master.now_s = 20.0
    seq = hall.start()
    hall.master.now_s = 24.0
    hall.perform(hall.master.disconnected(b"3", "it broke"))
    at(hall, 25.0, b"1", m.FinishVote(seq, False, "lost"))
    at(hall, 25.0, b"2", m.FinishVote(seq, False, "lost"))
    assert counts(hall).retries == dict.fromkeys(Reason, 0) | {Reason.PEER_LOST: 1}
    (group,) = hall.master.status().groups
    assert group.goodput == 1 - 5 / 15, "it goes on being lost until the next one starts"
    run_one(hall, 26.0, 30.0)
    assert only(counts(hall).recoveries) == 2.0  # from the loss to the start
    (group,) = hall.master.status().groups
    assert group.goodput == 1 - 6 / 20
    hall.perform(hall.master.disconnected(b"1", "it broke"))
    hall.perform(hall.master.disconnected(b"2", "it broke"))
    hall.join(b"9")
    (group,) = hall.master.status().groups
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
    hall = Hall(2)
    seq = hall.start()
    hall.everyone(msgspec.structs.replace(vote, seq=seq))
    assert counts(hall).retries[reason] == 1 == sum(counts(hall).retries.values())
    assert not sum(counts(hall).collectives[CollectiveKind.ALL_REDUCE].counts)


def test_several_that_are_aborted_together_are_one_recovery() -> None:
    course = Course()
    assert course.goodput(5.0) is None and course.started(10.0) is None
    assert course.goodput(10.0) is None, "nothing can be said of no time"
    course.aborted(11.0, 15.0)
    course.aborted(12.0, 15.0)
    assert course.goodput(16.0) == 1 - 5 / 6
    assert course.started(20.0) == 5.0 and course.started(21.0) is None
    assert course.goodput(30.0) == 1 - 9 / 20


def test_shared_state_that_newcomers_lack_and_that_others_have_lost() -> None:
    hall = Hall(2)
    at(hall, 1.0, b"1", m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    at(hall, 3.0, b"2", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    at(hall, 3.25, b"2", m.FetchedVote(hall.master.run.numbers.next_seq - 1, True))
    found = counts(hall)
    assert only(found.syncs) == 0.25
    assert (found.synced_bytes, found.resynced_bytes, found.parity_failures) == (16, 0, 0)
    hall.say(b"1", m.SyncVote(4, m.Manifest(2, 0, (ENTRY,))))
    hall.say(b"2", m.SyncVote(4, m.Manifest(2, 0, (OTHER,))))
    hall.say(b"2", m.FetchedVote(hall.master.run.numbers.next_seq - 1, True))
    found = counts(hall)
    assert (found.synced_bytes, found.resynced_bytes, found.parity_failures) == (32, 16, 1)


def test_sizes_that_nobody_has_break_nothing() -> None:
    hall = Hall(2)
    boast = m.Spec("all_reduce", 0, 7, (1 << 64) - 1)
    for _ in range(3):
        hall.everyone(m.StartVote(2, 0, boast))
        hall.everyone(m.FinishVote(hall.master.run.numbers.next_seq - 1, True))
    assert counts(hall).carried["none"] == COUNT_MAX
    odd = m.Spec("all_reduce", 0, 999, 10, algorithm=999)
    Tally().ended(0, odd, 2, 0.0)
    assert size(odd) == 0
    assert all(factor(kind, 5) >= 0 for kind in CollectiveKind)


def test_each_is_a_metric() -> None:
    hall = Hall(3)
    run_one(hall, 1.0, 1.5)
    run_one(hall, 2.0, 3.0, ok=False)
    run_one(hall, 3.5, 4.0)
    lines = exposition(hall.master.status()).splitlines()
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


def test_a_peer_says_how_far_it_is_while_its_data_is_under_way() -> None:
    run = Run(3)
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
