"""When a group's epoch ends, and when the next one begins."""

from __future__ import annotations

from simulation.manual import ManualRun

from pccl.protocol import messages as m
from pccl.protocol.master.inputs import Disconnected


def plans(run: ManualRun, conn: bytes) -> list[int]:
    """The epochs that a peer was told of."""
    return [plan.epoch for plan in run.told[conn] if isinstance(plan, m.Plan)]


def test_a_stall_interrupts_peers_that_have_not_voted_and_begins_an_epoch() -> None:
    run = ManualRun(3)
    seq, epoch = run.start(), run.master.run.groups[0].epoch
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"1", m.Stalled(epoch, 0, "a lane was disconnected"))
    interrupt = run.last(b"2")
    assert isinstance(interrupt, m.Interrupt)
    assert "peer 1 (10.0.0.1:1) could not pass on its data: a lane was disc" in interrupt.why
    run.say(b"2", m.FinishVote(seq, False, "interrupted"))
    assert run.master.run.groups[0].epoch == epoch
    run.say(b"3", m.FinishVote(seq, False, "interrupted"))
    assert run.master.run.groups[0].epoch == epoch + 1
    run.start()
    for late in (epoch, 0):
        run.say(b"2", m.Stalled(late, 0, "heard of after the epoch's end"))
        assert run.master.run.groups[0].epoch == epoch + 1
        assert isinstance(run.last(b"3"), m.Started)
    assert sorted(run.master.peers) == [1, 2, 3]


def test_a_death_ends_one_epoch_in_any_order_of_reports() -> None:
    for lane_first in (True, False):
        run = ManualRun(3)
        seq, before = run.start(), len(plans(run, b"1"))
        lost = [
            lambda run=run: run.perform(
                run.master.feed(Disconnected((b"3",), "its connection broke"))
            ),
            lambda run=run, seq=seq: run.say(b"1", m.FinishVote(seq, False, "a lane broke")),
        ]
        for event in reversed(lost) if lane_first else lost:
            event()
        run.say(b"2", m.FinishVote(seq, False, "interrupted"))
        assert len(plans(run, b"1")) == before + 1
        kinds = [type(message) for message in run.told[b"2"]]
        assert kinds.index(m.Finished) > len(kinds) - 1 - kinds[::-1].index(m.Plan)


def test_streams_that_were_lost_when_all_had_voted_are_replaced_at_the_next_start() -> None:
    run = ManualRun(2)
    seq, before = run.start(), plans(run, b"1")
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"1", m.Stalled(before[-1], 0, "a lane was disconnected"))
    run.say(b"2", m.FinishVote(seq, True))
    finished = run.last(b"1")
    assert isinstance(finished, m.Finished) and finished.ok
    assert plans(run, b"1") == before
    run.start()
    assert plans(run, b"1") == [*before, before[-1] + 1]
