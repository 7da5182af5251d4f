"""A master that is restarted, or was suspended: which peers it trusts, and how it continues."""

from __future__ import annotations

import sys

import pytest
from simulation.manual import WORK, ManualRun, RestartedRun, infos, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, restart
from pccl.protocol.master.collectives import SMALL_BYTES_MAX
from pccl.protocol.master.effects import Adopt, Refusal, Remember
from pccl.protocol.master.inputs import Disconnected, Rejected, Resume
from pccl.protocol.master.restart import UNJOURNALED_WAIT_S, WAIT_S
from pccl.protocol.peer import Peer
from pccl.protocol.peer.effects import Fail, Fault
from pccl.runtime.limits import STRANGER_BYTES
from pccl.types import Result

# ---- which peers the master believes ----


def test_without_a_journal_the_run_of_the_majority_continues() -> None:
    run = RestartedRun()
    run.back(b"stranger", 1, 666, 1, 2, 3, 4, 5)
    for number in (1, 2):
        run.back(b"%d" % number, number, 7, 1, 2)
    assert run.master.recovering
    run.wait(UNJOURNALED_WAIT_S + 0.1)
    assert run.master.run.number == 7
    assert sorted(run.master.peers) == [1, 2]
    assert "most of the returning peers" in run.refused(b"stranger").why
    assert run.refused(b"stranger").result == Result.MASTER_CONNECTION_FAILED.value


def test_a_peer_that_comes_back_alone_yields_to_a_later_one() -> None:
    run = RestartedRun()
    run.back(b"stranger", 1, 666)
    run.wait(WAIT_S - 1)
    assert run.master.recovering
    run.back(b"1", 1, 7)
    run.wait(2)
    assert run.master.run.number == 7
    assert "most of the returning peers" in run.refused(b"stranger").why
    alone = RestartedRun()
    alone.back(b"1", 1, 7)
    alone.wait(WAIT_S + 0.1)
    assert alone.master.run.number == 7
    assert sorted(alone.master.peers) == [1]


@pytest.mark.parametrize("peers", [2, 3])
def test_peers_that_all_come_back_to_a_master_without_a_journal_do_not_wait_long(
    peers: int,
) -> None:
    run = RestartedRun()
    known = range(1, peers + 1)
    for number in known:
        run.back(b"%d" % number, number, 7, *known)
    run.wait(UNJOURNALED_WAIT_S - 0.1)
    assert run.master.recovering, "another group may be slower"
    run.wait(0.3)
    assert sorted(run.master.peers) == [*known]


def test_a_peer_that_is_lost_while_it_waits_does_not_count() -> None:
    run = RestartedRun()
    for number in (1, 2):
        run.back(b"stranger %d" % number, number, 666, 1, 2)
    run.perform(run.master.feed(Disconnected((b"stranger 2",), "its connection broke")))
    for number in (1, 2):
        run.back(b"%d" % number, number, 7, 1, 2)
    run.wait(UNJOURNALED_WAIT_S + 0.1)
    assert run.master.run.number == 7


def test_a_run_without_a_valid_member_ends_and_its_number_is_not_reused() -> None:
    """Its peers' and collectives' numbers would be given twice."""
    run = RestartedRun()
    own = run.master.run.number
    half = m.PeerInfo(1, 0, "10.0.0.1", 1, "", "x", team=9, team_size=2)
    run.back(b"1", 1, 7, info=half)
    run.wait(WAIT_S + 0.1)
    assert "given up" in run.refused(b"1").why
    assert run.master.run.number == own != 7 and not run.master.peers


def test_one_number_comes_back_once() -> None:
    run = RestartedRun()
    run.back(b"1", 1, 7, 1, 2)
    run.back(b"again", 1, 7, 1, 2)
    assert "given up" in run.refused(b"again").why
    run.back(b"1", 2, 7, 1, 2)
    assert "given up" in run.refused(b"1").why


def test_with_a_journal_only_its_run_and_its_peers_count() -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    run.back(b"other", 1, 666)
    assert "another run" in run.refused(b"other").why
    run.back(b"unknown", 9, 7, 1, 2, 9)
    assert "given up" in run.refused(b"unknown").why
    for number in (1, 2):
        run.back(b"%d" % number, number, 7, 1, 2)
    assert sorted(run.master.peers) == [1, 2]


def test_a_journal_that_lacks_something_knows_the_run_and_lets_peers_tell_the_rest() -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1,)), complete=False))
    run.back(b"other", 1, 666)
    assert "another run" in run.refused(b"other").why
    for number in (1, 2, 3):
        assert run.master.recovering
        run.back(b"%d" % number, number, 7, 1, 2, 3)
    run.wait(UNJOURNALED_WAIT_S + 0.1)
    assert sorted(run.master.peers) == [1, 2, 3]


def test_a_stranger_does_not_change_the_arithmetic_of_the_run() -> None:
    run = RestartedRun()
    for number in (1, 2):
        run.back(b"%d" % number, number, 7, 1, 2, arithmetic=b"right")
    run.back(b"stranger", 1, 666, arithmetic=b"wrong")
    run.wait(UNJOURNALED_WAIT_S + 0.1)
    run.join(b"3", arithmetic=b"right")
    assert isinstance(run.last(b"3"), m.Welcome)


def test_messages_of_strangers_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart, "HELD_MAX", 10_000)
    run = RestartedRun()
    for number in (1, 2):
        run.back(b"%d" % number, number, 7, 1, 2)
    for number in range(20):
        run.back(b"stranger %d" % number, 1, 1000 + number)
    crowded = [c for c, told in run.told.items() if isinstance(told[-1], m.Refused)]
    assert len(crowded) == 20 - 10_000 // restart.weight(resume(1, known=infos(1)))
    assert "take too much memory" in run.refused(crowded[0]).why
    run.perform(run.master.feed(Disconnected((b"stranger 0",), "its connection broke")))
    run.back(b"another", 1, 2000)
    assert b"another" not in run.told
    run.wait(UNJOURNALED_WAIT_S + 0.1)
    assert run.master.run.number == 7


def test_no_vote_is_kept_while_the_master_waits() -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1,))))
    huge = m.SyncVote(2, m.Manifest(0, 0, (m.Entry("x", 10, 4, False, b""),) * 1000))
    before = sys.getrefcount(huge)
    run.say(b"stranger", huge)
    assert sys.getrefcount(huge) == before
    run.back(b"1", 1, 7)
    assert "before the master had answered its first one" in run.dropped[b"stranger"]
    assert sorted(run.master.peers) == [1]


def test_returning_peers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "ALL_HELD_MAX", 90_000)
    run = RestartedRun()
    for number in range(1, 20):
        run.back(b"%d" % number, number, 7, *range(1, 20))
    assert "take too much memory" in run.refused(b"19").why
    run.wait(WAIT_S + 0.1)
    one = restart.weight(resume(1, known=infos(*range(1, 20))))
    assert len(run.master.peers) == 90_000 // one


def test_the_memory_that_a_returning_peer_takes_is_about_right() -> None:
    bare = restart.weight(resume(1, known=infos(1)))
    assert bare == 1400
    failed = m.Failure(3, m.Called.COLLECTIVE, 0, (), 6, "x" * 100, 0)
    for fields, more in (
        ({"known": infos(1, 2, 3)}, 2 * 400),
        ({"finished": ((1, True), (2, False))}, 2 * 200),
        ({"failed": (failed, failed)}, 2 * (200 + 4 * 100)),
        ({"open": (m.Open(3, (1, 2), None), m.Open(4, (1,), True))}, 3 * 40),
        ({"small": (m.Small(3, 0, (1, 2), b"x" * 500),)}, 2 * 40 + 500),
        ({"rings": (m.Ring((1, 2, 3), 1), m.Ring((1, 3, 2), 1))}, 6 * 40),
    ):
        assert restart.weight(resume(1, **{"known": infos(1), **fields})) == bare + more


ALONE = Refusal("it stood alone", Result.INVALID_ARGUMENT, m.Cause.MISMATCH)


@pytest.mark.parametrize("complete", [True, False])
def test_a_dropped_peer_hears_why_from_the_next_master(complete: bool) -> None:
    run = RestartedRun(Journal(7, 1, 4, frozenset((1, 3)), complete, {2: ALONE}))
    for number in (1, 2, 3):
        run.back(b"%d" % number, number, 7, 1, 2, 3)
    assert run.refused(b"2") == m.Refused(ALONE.result.value, ALONE.why, ALONE.cause)
    run.wait(WAIT_S + 0.1)
    assert sorted(run.master.peers) == [1, 3]
    run.perform(run.master.feed(Disconnected((b"3",), "its connection broke")))
    journal, _ = run.master.reborn()
    assert journal is not None and journal.refused == {2: ALONE}


def test_a_dropped_peer_hears_why_from_the_same_master() -> None:
    """Its connection may break before it has heard of it."""
    first = ManualRun(2)
    first.say(b"2", m.FinishVote(99, True))
    kicked = first.last(b"2")
    assert isinstance(kicked, m.Kicked)
    said = resume(2, first.master.run.number)
    first.perform(first.master.feed(Resume(b"2 again", said, "10.0.0.1")))
    assert first.last(b"2 again") == m.Refused(kicked.result, kicked.why)


@pytest.mark.parametrize("told", [m.Kicked, m.Refused])
def test_calls_of_a_lone_peer_fail_alike_from_any_source(
    told: type[m.Kicked] | type[m.Refused],
) -> None:
    machine = Peer()
    machine.join(1, m.Hello(m.PROTOCOL_VERSION, "1", 0, "h", 1, "", "", b""))
    for message in (m.Welcome(1), m.Admitted(7, m.Done())):
        machine.received(message)
    machine.update_topology(2)
    (end,) = machine.received(told(ALONE.result.value, ALONE.why, ALONE.cause))
    assert isinstance(end, Fail) and (end.call, end.fault) == (2, Fault.MISMATCH)
    assert machine.over is not None and machine.over.fault is Fault.KICKED


# ---- what the peers know ----


def test_a_peer_that_missed_outcomes_of_collectives_gets_them() -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    open_ = tuple(m.Open(seq, (1, 2), True) for seq in (3, 4, 5))
    ended = ((4, True), (5, False))
    run.back(b"1", 1, 7, 1, 2, open=open_[:1], finished=ended, last_seq=5)
    run.back(b"2", 2, 7, 1, 2, open=open_, last_seq=5)
    outcomes = {
        conn: [one for one in run.told[conn] if isinstance(one, m.Finished)]
        for conn in (b"1", b"2")
    }
    assert outcomes[b"1"] == [m.Finished(3, True)], "all have voted for what nobody knew"
    missed = m.Finished(4, True), m.Finished(5, False, "the master was restarted")
    assert outcomes[b"2"] == [m.Finished(3, True), *missed]


@pytest.mark.parametrize(
    ("done", "holds"),
    [
        (m.Done(sync=4, revision=9, holds=True), True),
        (m.Done(sync=3, revision=5), True),  # it has missed the result
        (m.Done(sync=4, revision=9), False),  # its caller had left
    ],
)
def test_shared_state_goes_on_while_a_peer_is_left_that_held_it(done: m.Done, holds: bool) -> None:
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    run.back(b"1", 1, 7, 1, 2, done=m.Done(sync=4, revision=9, holds=True, plan=3))
    run.back(b"2", 2, 7, 1, 2, done=done)
    resumed = run.last(b"2")
    assert isinstance(resumed, m.Resumed)
    assert (resumed.done.sync, resumed.done.revision) == (4, 9)
    run.perform(run.master.feed(Disconnected((b"1",), "its connection broke")))
    run.say(b"2", m.SyncVote(5, m.Manifest(3, 0, ())))
    told = run.last(b"2")
    if holds:
        assert isinstance(told, m.CallError) and "the group is at 9 already" in told.why
    else:
        assert isinstance(told, m.SyncResult) and (told.revision, told.round) == (3, 5)


# ---- numbers ----


@pytest.mark.parametrize(
    "fields",
    [
        {"last_seq": (1 << 47) - 1, "epoch": (1 << 31) - 1},
        {"done": m.Done(*[(1 << 62) - 1] * 2, True, (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1)},
        {"known": infos(1, (1 << 62) - 1)},
        {"done": m.Done(revision=(1 << 64) - 1)},
    ],
)
def test_messages_that_follow_from_any_resume_can_be_decoded(fields: dict[str, object]) -> None:
    run = RestartedRun()
    run.perform(run.master.feed(Resume(b"1", resume(1, 7, **fields), "10.0.0.1")))
    run.wait(WAIT_S + 0.1)
    assert sorted(run.master.peers) == [1]
    for conn in (b"2", b"3"):
        run.join(conn)
    run.say(b"1", m.TopologyVote(1))
    for message in (m.TopologyVote(2), m.StartVote(2, 0, WORK), m.PendingVote(3)):
        run.everyone(message)  # ManualRun decodes as a peer does
    assert any(isinstance(told, m.Started) for told in run.told[b"3"])
    back = resume(
        1, 7, epoch=run.master.run.numbers.epoch, last_seq=run.master.run.numbers.next_seq
    )
    assert restart.plausible(back) or fields.keys() == {"last_seq", "epoch"}


@pytest.mark.parametrize(
    "fields",
    [
        {"last_seq": 1 << 47},
        {"epoch": 1 << 31},
        {"done": m.Done(sync=1 << 62)},
        {"done": m.Done(plan=1 << 62)},
        {"known": infos(2)},
        {"known": infos(1, 1)},
        {"known": infos(1, 2), "rings": (m.Ring((1, 3), 1),)},
        {"known": infos(1, 2), "rings": (m.Ring((1, 1), 1),)},
        {"known": infos(1, 2), "rings": (m.Ring((1, 2), (1 << 32) - 1),)},
    ],
)
def test_an_impossible_resume_is_not_believed(fields: dict[str, object]) -> None:
    run = RestartedRun()
    run.perform(run.master.feed(Resume(b"1", resume(1, 7, **fields), "10.0.0.1")))
    assert "impossible numbers" in run.refused(b"1").why
    assert not run.master.recovering


@pytest.mark.parametrize("before", [0, 1, 2, 7])
def test_a_master_without_a_journal_counts_on_from_what_its_peers_know(before: int) -> None:
    """Numbers of collectives and epochs begin with that of the master, so they never repeat."""
    for known in ({"last_seq": (before << 32) + 5}, {"epoch": (before << 16) + 5}):
        run = RestartedRun()
        run.back(b"1", 1, 7, **known)
        run.wait(WAIT_S + 0.1)
        numbers = run.master.run.numbers
        assert numbers.next_seq >> 32 == numbers.epoch >> 16 == before + 1
        journal, _ = run.master.reborn()
        assert journal is not None and journal.incarnation == before + 2


# ---- a master that was away ----


def test_impossible_epochs_are_refused() -> None:
    run = RestartedRun()
    run.back(b"1", 1, 7, last_seq=1 << 49)
    assert "impossible numbers" in run.refused(b"1").why


def test_rings_of_others_are_not_believed() -> None:
    run = RestartedRun()
    run.back(b"1", 1, 7, 1, 2, rings=(m.Ring((1, 3), 1),))
    assert "impossible numbers" in run.refused(b"1").why


def test_a_run_that_all_were_lost_from_is_there_when_they_come_back() -> None:
    first = ManualRun(3)
    first.start()
    for number in (1, 2, 3):
        first.perform(first.master.feed(Disconnected((b"%d" % number,), "its connection broke")))
    said = resume(
        2, first.master.run.number, known=infos(1, 2, 3), epoch=first.master.run.numbers.epoch
    )
    assert first.master.deserted(said)
    assert not first.master.deserted(resume(2, 99))
    assert not first.master.deserted(resume(9, first.master.run.number))
    journal, actions = first.master.reborn()
    assert journal == Journal(first.master.run.number, 1, 4, frozenset((1, 2, 3)))
    assert actions[0] == Adopt(first.master.run.number, 1)
    assert [a.info.peer for a in actions if isinstance(a, Remember)] == [1, 2, 3]
    run = RestartedRun(journal)
    for number in (1, 2, 3):
        run.back(b"%d again" % number, number, first.master.run.number, 1, 2, 3, epoch=1)
    assert sorted(run.master.peers) == [1, 2, 3]
    assert run.master.run.numbers.next_seq > first.master.run.numbers.next_seq


def test_a_run_that_went_on_without_a_peer_does_not_take_it_back() -> None:
    for goes_on in (m.PendingVote(9), m.StartVote(9, 0, WORK), m.Leave()):
        first = ManualRun(3)
        first.perform(first.master.feed(Disconnected((b"1",), "its connection broke")))
        first.say(b"2", goes_on)
        for number in (2, 3):
            first.perform(
                first.master.feed(Disconnected((b"%d" % number,), "its connection broke"))
            )
        assert not first.master.deserted(resume(1, first.master.run.number))
        assert first.master.deserted(resume(3, first.master.run.number))


def test_an_optimization_ended_by_a_loss_continues_without_the_peer() -> None:
    first = ManualRun(2)
    first.everyone(m.OptimizeVote(9))
    for number in (2, 1):
        first.perform(first.master.feed(Disconnected((b"%d" % number,), "its connection broke")))
    assert not first.master.deserted(resume(2, first.master.run.number))
    assert first.master.deserted(resume(1, first.master.run.number))


def test_a_round_ended_by_a_loss_continues_without_the_peer() -> None:
    for vote in (m.PendingVote(9), m.OptimizeVote(9)):
        first = ManualRun(2)
        first.say(b"1", vote)
        for number in (2, 1):
            first.perform(
                first.master.feed(Disconnected((b"%d" % number,), "its connection broke"))
            )
        assert not first.master.deserted(resume(2, first.master.run.number))
        assert first.master.deserted(resume(1, first.master.run.number))


def test_a_group_that_is_lost_before_another_one_is_given_up() -> None:
    """The other peer may have got it and gone on; the master cannot know."""
    first = ManualRun(2)
    first.join(b"3", group=1)
    first.everyone(m.TopologyVote(9))
    for number in (3, 1, 2):
        first.perform(first.master.feed(Disconnected((b"%d" % number,), "its connection broke")))
    assert not first.master.deserted(resume(3, first.master.run.number))
    for number in (1, 2):
        assert first.master.deserted(resume(number, first.master.run.number))


def test_newcomers_to_an_empty_run_do_not_wait() -> None:
    first = ManualRun(2)
    first.perform(first.master.feed(Disconnected((b"1", b"2"), "its connection broke")))
    first.join(b"3")
    assert isinstance(first.told[b"3"][-1], m.Admitted)
    late = resume(1, first.master.run.number)
    assert not first.master.deserted(late)
    first.perform(first.master.feed(Resume(b"1 again", late, "10.0.0.1")))
    refused = first.last(b"1 again")
    assert isinstance(refused, m.Refused)
    assert "given up" in refused.why
    first.perform(first.master.feed(Disconnected((b"3",), "its connection broke")))
    assert not first.master.deserted(late)
    assert first.master.deserted(resume(3, first.master.run.number))


def test_a_peer_that_was_kicked_or_left_does_not_come_back() -> None:
    first = ManualRun(2)
    first.say(b"1", m.Leave())
    first.perform(first.master.feed(Rejected(b"2", "it sent bytes that are not a message")))
    for number in (1, 2):
        assert not first.master.deserted(resume(number, first.master.run.number))


def test_a_peer_may_be_back_before_its_old_connection_is_seen_to_be_broken() -> None:
    first = ManualRun(2)
    assert first.master.misses(resume(2, first.master.run.number))
    assert not first.master.misses(resume(2, 99))
    assert not first.master.misses(resume(3, first.master.run.number))
    journal, _ = first.master.reborn()
    assert journal.accepted == {1, 2}


def test_a_peer_that_waits_during_recovery_counts_as_heard() -> None:
    """If that master begins anew, these have to come back: the fresh one knows nothing of them."""
    journal = Journal(7, 3, 9, frozenset((1, 2, 3)), complete=False)
    run = RestartedRun(journal)
    run.back(b"1", 1, 7, 1, 2)
    run.join(b"newcomer")
    assert [run.master.has_heard(conn) for conn in (b"1", b"newcomer", b"2")] == [1, 1, 0]
    assert run.master.reborn() == (
        Journal(7, 4, 9, frozenset((1, 2, 3)), complete=False),
        [Adopt(7, 4)],
    )
    unaware = RestartedRun()
    unaware.back(b"1", 1, 7, 1, 2)
    assert unaware.master.has_heard(b"1")
    assert unaware.master.reborn() == (None, [])


def test_too_many_bytes_of_small_results_on_the_way_are_voted_on() -> None:
    """Or who comes back to the next master would have more to say than a stranger may."""
    first, data = ManualRun(), bytes(m.INLINE_BYTES_MAX)
    work = m.Spec("all_reduce", 0, 10, len(data) // 4)
    final = []
    for tag in range(SMALL_BYTES_MAX // len(data) + 1):
        first.everyone(m.StartVote(2 + tag, tag, work, data))
        started = first.last(b"1")
        assert isinstance(started, m.Started)
        final.append(started.final)
    assert final == [True] * (len(final) - 1) + [False]
    assert SMALL_BYTES_MAX < STRANGER_BYTES - 128 * 256
    first.everyone(m.StartVote(99, 99, work, data, heard=started.seq - 1))
    again = first.last(b"1")
    assert isinstance(again, m.Started) and again.final
