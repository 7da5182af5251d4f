"""When a group's epoch ends, and when the next one begins."""

from __future__ import annotations

from hall import Hall

from pccl.protocol import messages as m


def plans(hall: Hall, conn: bytes) -> list[int]:
    """The epochs that a peer was told of."""
    return [plan.epoch for plan in hall.told[conn] if isinstance(plan, m.Plan)]


def test_a_stall_interrupts_who_has_not_voted_and_begins_a_new_epoch() -> None:
    hall = Hall(3)
    seq, epoch = hall.start(), hall.master.run.groups[0].epoch
    hall.say(b"1", m.FinishVote(seq, True))
    hall.say(b"1", m.Stalled(epoch, 0, "a lane was disconnected"))
    interrupt = hall.last(b"2")
    assert isinstance(interrupt, m.Interrupt)
    assert "peer 1 (10.0.0.1:1) could not pass on its data: a lane was disc" in interrupt.why
    hall.say(b"2", m.FinishVote(seq, False, "interrupted"))
    assert hall.master.run.groups[0].epoch == epoch
    hall.say(b"3", m.FinishVote(seq, False, "interrupted"))
    assert hall.master.run.groups[0].epoch == epoch + 1
    hall.start()
    for late in (epoch, 0):
        hall.say(b"2", m.Stalled(late, 0, "heard of after the epoch's end"))
        assert hall.master.run.groups[0].epoch == epoch + 1
        assert isinstance(hall.last(b"3"), m.Started)
    assert sorted(hall.master.peers) == [1, 2, 3]


def test_a_death_ends_one_epoch_whoever_tells_of_it_first() -> None:
    for lane_first in (True, False):
        hall = Hall(3)
        seq, before = hall.start(), len(plans(hall, b"1"))
        lost = [
            lambda hall=hall: hall.perform(hall.master.disconnected(b"3", "its connection broke")),
            lambda hall=hall, seq=seq: hall.say(b"1", m.FinishVote(seq, False, "a lane broke")),
        ]
        for event in reversed(lost) if lane_first else lost:
            event()
        hall.say(b"2", m.FinishVote(seq, False, "interrupted"))
        assert len(plans(hall, b"1")) == before + 1
        kinds = [type(message) for message in hall.told[b"2"]]
        assert kinds.index(m.Finished) > len(kinds) - 1 - kinds[::-1].index(m.Plan)


def test_streams_that_were_lost_when_all_had_voted_are_replaced_at_the_next_start() -> None:
    hall = Hall(2)
    seq, before = hall.start(), plans(hall, b"1")
    hall.say(b"1", m.FinishVote(seq, True))
    hall.say(b"1", m.Stalled(before[-1], 0, "a lane was disconnected"))
    hall.say(b"2", m.FinishVote(seq, True))
    finished = hall.last(b"1")
    assert isinstance(finished, m.Finished) and finished.ok
    assert plans(hall, b"1") == before
    hall.start()
    assert plans(hall, b"1") == [*before, before[-1] + 1]
