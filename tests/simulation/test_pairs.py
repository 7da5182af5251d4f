"""The rules of sends: two peers agree, and others have no part in it."""

from __future__ import annotations

from simulation.manual import WORK, ManualRun, member, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.inputs import Resume, Tick
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.calls import Collective, tag_of_send
from pccl.protocol.ring import RingPlace
from pccl.protocol.tuning import choose
from pccl.runtime.inline_collectives import combine
from pccl.types import Result

SEND = m.Spec("send", 0, 10, 5)
INFOS = tuple(m.PeerInfo(n, 0, "h", 1000 + n, "", f"m{n}") for n in (1, 2, 3))


def vote(
    run: ManualRun,
    number: int,
    pair: tuple[int, ...],
    call: int = 2,
    tag: int = 0,
    work: m.Spec = SEND,
    stuck: bool = False,
) -> None:
    run.say(b"%d" % number, m.StartVote(call, tag, work, stuck=stuck, pair=pair))


def meet(run: ManualRun) -> int:
    """Peer 1 sends to peer 2; the number of that."""
    for number in (1, 2):
        vote(run, number, (1, 2))
    first, second = run.last(b"1"), run.last(b"2")
    assert isinstance(first, m.Started) and isinstance(second, m.Started)
    assert first.seq == second.seq and first.nonce == second.nonce
    return first.seq


def finish(run: ManualRun, seq: int) -> None:
    """Both have all that they need."""
    for number in (1, 2):
        run.say(b"%d" % number, m.FinishVote(seq, True))
    assert run.last(b"1") == run.last(b"2") == m.Finished(seq, True)


def errors(run: ManualRun, *numbers: int) -> list[m.CallError]:
    found = [run.last(b"%d" % number) for number in numbers]
    assert all(isinstance(each, m.CallError) for each in found), found
    return [each for each in found if isinstance(each, m.CallError)]


def hears_nothing(run: ManualRun, number: int) -> bool:
    """Whether a peer has heard of no collective."""
    told = run.told[b"%d" % number]
    return not any(isinstance(each, m.Started | m.Interrupt | m.Finished) for each in told)


def test_two_meet_and_a_third_hears_nothing_of_it() -> None:
    run = ManualRun(3)
    seq = meet(run)
    finish(run, seq)
    assert hears_nothing(run, 3)
    assert not any(peer.proven for peer in run.master.peers.values())


def test_sends_are_distinguished_by_sender_receiver_and_tag() -> None:
    run = ManualRun(3)
    vote(run, 1, (1, 2))
    vote(run, 2, (2, 1))
    vote(run, 2, (1, 2), call=3, tag=1)
    vote(run, 3, (3, 2))
    run.say(b"1", m.StartVote(5, 0, WORK))
    assert all(hears_nothing(run, number) for number in (1, 2, 3))
    vote(run, 2, (1, 2), call=4)
    assert isinstance(run.last(b"1"), m.Started) and hears_nothing(run, 3)


def test_different_arrays_are_an_error_for_both() -> None:
    run = ManualRun(3)
    vote(run, 1, (1, 2))
    vote(run, 2, (1, 2), work=m.Spec("send", 0, 10, 6))
    for error in errors(run, 1, 2):
        assert error.cause == m.Cause.MISMATCH
        assert "called send(5 elements of float32) to peer 2 with tag 0; peer 2 (" in error.why
        assert "called recv(6 elements of float32) from peer 1 with tag 0" in error.why
    meet(run)


def test_the_loss_of_either_ends_it_for_the_other_with_its_name() -> None:
    for lost, left in ((1, 2), (2, 1)):
        run = ManualRun(3)
        vote(run, left, (1, 2))
        run.say(b"%d" % lost, m.Leave())
        (error,) = errors(run, left)
        assert error.result == Result.RANK_CONNECTION_LOST.value
        assert error.why.startswith(f"lost peer {lost} (")
        vote(run, left, (1, 2), call=3)  # it is not there any more
        (error,) = errors(run, left)
        assert error.result == Result.RANK_CONNECTION_LOST.value
        assert error.why == f"peer {lost} is not in this peer's group, or has left it"


def test_the_loss_of_either_while_the_data_is_under_way_fails_it() -> None:
    for lost, left in ((b"1", b"2"), (b"2", b"1")):
        for complete in (False, True):  # also if the other one holds all that it needs
            run = ManualRun(3)
            seq = meet(run)
            if complete:
                run.say(left, m.FinishVote(seq, True))
            run.say(lost, m.Leave())
            if not complete:
                assert isinstance(run.last(left), m.Interrupt)
                run.say(left, m.FinishVote(seq, False))
            finished = run.last(left)
            assert isinstance(finished, m.Finished) and not finished.ok
            assert finished.why.startswith(f"lost peer {lost.decode()} (")


def test_the_loss_of_a_third_is_nothing_to_it() -> None:
    run = ManualRun(3)
    vote(run, 2, (1, 2), tag=7)
    seq = meet(run)
    run.say(b"3", m.Leave())
    assert not any(isinstance(each, m.Interrupt | m.CallError) for each in run.told[b"1"])
    assert not any(isinstance(each, m.Interrupt | m.CallError) for each in run.told[b"2"])
    finish(run, seq)
    vote(run, 1, (1, 2), tag=7, call=9)
    assert isinstance(run.last(b"2"), m.Started)


def test_a_failure_interrupts_the_other_one_and_no_collective() -> None:
    run = ManualRun(3)
    running, seq = run.start(), meet(run)
    epoch = run.master.run.groups[0].epoch
    run.say(b"2", m.FinishVote(seq, False, "no memory"))
    interrupt = run.last(b"1")
    assert isinstance(interrupt, m.Interrupt) and interrupt.seq == seq
    assert "peer 2 (" in interrupt.why and "no memory" in interrupt.why
    run.say(b"1", m.FinishVote(seq, True))
    assert isinstance(run.last(b"1"), m.Finished)
    run.everyone(m.FinishVote(running, True))
    assert run.last(b"3") == m.Finished(running, True)
    assert run.start() and run.master.run.groups[0].epoch == epoch


def test_a_collective_that_fails_interrupts_no_send() -> None:
    run = ManualRun(3)
    running, seq = run.start(), meet(run)
    run.say(b"3", m.FinishVote(running, False, "no memory"))
    interrupt = run.last(b"1")
    assert isinstance(interrupt, m.Interrupt) and interrupt.seq == running
    finish(run, seq)


def test_a_send_ends_when_its_data_is_lost() -> None:
    run = ManualRun(3)
    running, seq = run.start(), meet(run)
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"3", m.Stalled(1, seq, "a third one"))  # it has no part in it
    assert isinstance(run.last(b"2"), m.Started)
    run.say(b"1", m.Stalled(1, seq, "a lane was disconnected"))
    interrupt = run.last(b"2")
    assert isinstance(interrupt, m.Interrupt) and interrupt.seq == seq
    assert "a lane was disconnected" in interrupt.why
    run.everyone(m.FinishVote(running, True))
    assert run.last(b"3") == m.Finished(running, True)


def test_a_caller_withdraws_before_and_after_the_start() -> None:
    run = ManualRun(3)
    vote(run, 2, (1, 2))
    run.say(b"2", m.Withdraw(2))
    (error,) = errors(run, 2)
    assert error.cause == m.Cause.TIMEOUT and error.why.startswith("waited for peer 1 (")
    seq = meet(run)
    run.say(b"2", m.FinishVote(seq, True))
    run.say(b"2", m.Withdraw(2, seq))
    interrupt = run.last(b"1")
    assert isinstance(interrupt, m.Interrupt)
    assert "waited no longer for peer 1 (" in interrupt.why


def test_a_waiting_send_gets_the_reason() -> None:
    run = ManualRun(3)
    vote(run, 2, (1, 2))
    run.say(b"2", m.Inquire(2))
    waiting = run.last(b"2")
    assert isinstance(waiting, m.Waiting)
    assert waiting.why.startswith("in recv(5 elements of float32) from peer 1 with tag 0: peer 1 (")
    (wait,) = run.master.status().waits
    assert wait.missing == (1,) and wait.missing_count == wait.entered == 1


def test_calls_that_can_never_meet() -> None:
    for single in (True, False):  # a peer with several threads may still enter
        run = ManualRun(3)
        vote(run, 1, (1, 2), stuck=single)
        vote(run, 2, (2, 1), stuck=single)
        if not single:
            assert all(hears_nothing(run, number) for number in (1, 2))
            continue
        for error in errors(run, 1, 2):
            assert error.cause == m.Cause.MISMATCH
            assert "the peers are in calls that can never meet: " in error.why
            assert "called send(5 elements of float32) to peer 1 with tag 0" in error.why
            assert "called send(5 elements of float32) to peer 2 with tag 0" in error.why
        meet(run)


def test_a_cycle_of_three_can_never_meet() -> None:
    run = ManualRun(3)
    for number in (1, 2, 3):
        vote(run, number, (number, number % 3 + 1), stuck=True)
    for error in errors(run, 3, 2):
        assert "can never meet" in error.why
    assert not isinstance(run.last(b"1"), m.CallError)  # its own partner comes back, and may come


def test_a_chain_is_no_deadlock() -> None:
    run = ManualRun(3)
    vote(run, 1, (1, 2), stuck=True)
    vote(run, 2, (2, 3), stuck=True)
    vote(run, 3, (3, 1))
    assert not any(isinstance(run.last(b"%d" % n), m.CallError) for n in (1, 2, 3))


def test_a_collective_and_a_send_wait_for_each_other() -> None:
    for first in (1, 2):
        run = ManualRun(3)
        for number in (first, 3 - first):
            if number == 1:
                vote(run, 1, (1, 2), stuck=True)
            else:
                run.say(b"2", m.StartVote(5, 0, WORK, stuck=True))
        for error in errors(run, 1, 2):
            assert "called all_reduce(" in error.why and "called send(" in error.why
        run.say(b"3", m.StartVote(5, 0, WORK, stuck=True))  # of that collective, which has ended
        assert errors(run, 3)


def test_an_exclusive_call_waits_for_a_peer_in_a_send() -> None:
    """One that was launched, and not awaited, keeps its peer from an exclusive call too."""
    for stuck in (False, True):
        for first in (1, 2):
            run = ManualRun(3)
            for number in (first, 3 - first):
                if number == 1:
                    vote(run, 1, (1, 2), stuck=stuck)
                else:
                    run.say(b"2", m.TopologyVote(5))
            assert len(errors(run, 1, 2)) == 2
    run = ManualRun(3)
    vote(run, 1, (1, 2))
    run.say(b"3", m.TopologyVote(5))  # the other two may come when they have met
    assert not isinstance(run.last(b"3"), m.CallError)
    meet_now = m.StartVote(3, 0, SEND, pair=(1, 2))
    run.say(b"2", meet_now)
    assert isinstance(run.last(b"2"), m.Started)


def test_a_third_peer_gets_no_error_of_a_failed_send() -> None:
    run = ManualRun(3)
    vote(run, 1, (1, 2), stuck=True)
    vote(run, 2, (2, 1), stuck=True)
    assert errors(run, 1, 2)
    vote(run, 3, (1, 3))
    vote(run, 3, (3, 2))
    assert not any(isinstance(told, m.CallError | m.Failed) for told in run.told[b"3"])


def test_votes_that_cannot_be_cost_their_sender_the_membership() -> None:
    for work, pair in (
        (SEND, ()),
        (SEND, (1,)),
        (SEND, (1, 1)),
        (SEND, (2, 3)),
        (WORK, (1, 2)),
    ):
        run = ManualRun(3)
        vote(run, 1, pair, work=work)
        assert "out of turn" in run.dropped[b"1"]


def test_a_restarted_master_continues_a_send() -> None:
    both = (m.PeerInfo(1, 0, "10.0.0.1", 1, "", "x"), m.PeerInfo(2, 0, "10.0.0.1", 1, "", "x"))
    third = m.PeerInfo(3, 0, "10.0.0.1", 1, "", "x")
    for unheard in (False, True):
        run = ManualRun(0)
        journal = Journal(5, 1, 4, frozenset((1, 2, 3)))
        run.master = Master(1, combine, journal=journal, secret=b"s")
        held = m.Open(3, (1, 2), True, 7, paired=True)
        for number in (1, 2, 3):
            open_ = (held,) if number == 1 or (number == 2 and not unheard) else ()
            seq = 2 if unheard and number == 2 else 3
            told = resume(number, known=(*both, third), open=open_, last_seq=seq)
            run.perform(run.master.feed(Resume(b"%d" % number, told, "10.0.0.1")))
        if not unheard:
            assert m.Finished(3, True) in run.told[b"2"]
            continue
        finished = [each for each in run.told[b"1"] if isinstance(each, m.Finished)]
        assert [each.ok for each in finished] == [False]
        told = [each for each in run.told[b"2"] if isinstance(each, m.Failed)]
        assert [(one.failure.seq, one.failure.pair) for one in told] == [(3, (1, 2))]
        vote(run, 2, (1, 2), tag=7, call=5)
        vote(run, 1, (1, 2), tag=7, call=5)
        assert isinstance(run.last(b"2"), m.Started)


def test_a_restarted_master_commits_no_send_with_a_lost_peer() -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 4, frozenset((1, 2))), secret=b"s")
    infos = tuple(m.PeerInfo(n, 0, "10.0.0.1", 1, "", "x") for n in (1, 2))
    held = m.Open(3, (1, 2), True, 7, paired=True)
    told = resume(1, known=infos, open=(held,))
    run.perform(run.master.feed(Resume(b"1", told, "10.0.0.1")))
    for now_s in (0.0, 10.0):
        run.perform(run.master.feed(Tick(now_s)))
    finished = [each for each in run.told[b"1"] if isinstance(each, m.Finished)]
    assert [each.ok for each in finished] == [False]


# ---- a peer's side ----


def sent(peer: Peer) -> int:
    """The bytes of a message of a send."""
    return choose(SEND, 0, peer.knowledge.conditions).chunk_bytes


def send(peer: Peer, call: int, to: int) -> list[effects.Effect]:
    """It sends, and the other one has voted; up to the start of the op."""
    peer.collective(Collective(call, 0, SEND, pair=(2, to)))
    return peer.received(m.Started(call, 10 + call, 1, nonce=call))


def test_data_goes_directly_and_the_stream_stays_for_the_next_send() -> None:
    peer = member(2, 3)
    register, said = peer.collective(Collective(2, 0, SEND, stuck=True, pair=(2, 3)))
    assert isinstance(register, effects.RegisterOp) and register.tag == tag_of_send(0, (2, 3))
    assert said == effects.Send(m.StartVote(2, 0, SEND, stuck=True, pair=(2, 3)))
    place = RingPlace(1, members=2, position=0)
    opened = effects.OpenStream(1, INFOS[2], 0)
    started = peer.received(m.Started(2, 12, 1, nonce=5))
    assert started == [opened, effects.StartOp(2, 12, 5, (place,), sent(peer))]
    peer.engine_complete(2, True, 20, 0)
    assert peer.received(m.Finished(12, True)) == [effects.Answer(2, effects.Reduced(2, 20, 0))]
    assert send(peer, 3, 3) == [effects.StartOp(3, 13, 3, (place,), sent(peer))]
    peer.collective(Collective(4, 0, SEND, pair=(3, 2)))  # a receiver opens none
    place = RingPlace(0, members=2, position=1)
    assert peer.received(m.Started(4, 14, 1, nonce=9)) == [
        effects.StartOp(4, 14, 9, (place,), sent(peer))
    ]


def test_a_sender_with_a_lost_stream_fails_and_opens_another() -> None:
    peer = member(2, 3)
    send(peer, 2, 3)
    send(peer, 3, 1)
    peer.collective(Collective(4, 5, WORK))
    peer.received(m.Started(4, 20, 1, nonce=1))
    for call in (2, 3, 4):
        peer.engine_complete(call, True, 20, 0)
    why = "a lane was disconnected"
    assert peer.stream_lost(1, why) == [effects.Send(m.Stalled(1, 12, why))]
    assert not peer.stream_lost(1, why)
    assert send(peer, 5, 3)[:2] == [effects.CloseStream(1), effects.OpenStream(4, INFOS[2], 0)]


def test_streams_are_closed_when_their_peer_has_left() -> None:
    peer = member(2, 3)
    send(peer, 2, 3)
    send(peer, 3, 1)
    left = peer.received(m.Plan(2, INFOS[1:], (m.Ring((2, 3), 1),), 0))
    assert effects.CloseStream(2) in left
    assert effects.CloseStream(1) in peer.leave("done")


def test_a_ghost_is_in_the_way_of_the_same_send_alone() -> None:
    peer = member(2, 3)
    peer.collective(Collective(2, 0, SEND, pair=(2, 3)))
    peer.cancel(2)
    peer.engine_settled(2, 0, 0)
    assert not peer.collective(Collective(3, 0, SEND, pair=(2, 3)))
    for call, pair in ((4, (3, 2)), (5, (2, 1)), (6, ())):
        assert peer.collective(Collective(call, 0, SEND if pair else WORK, pair=pair))
