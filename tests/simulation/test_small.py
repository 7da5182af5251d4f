"""The master's rules of small collectives: data travels with the votes of few members."""

from __future__ import annotations

from simulation.manual import ManualRun

from pccl.protocol import messages as m
from pccl.protocol.master.inputs import Disconnected
from pccl.protocol.tuning import Conditions, Tuning, choose
from pccl.types import Result

BETWEEN = 50_000  # elements of fp32, which travel with the votes of two members and not of three
DATA = bytes(4 * BETWEEN)
WORK = m.Spec("all_reduce", 0, 10, BETWEEN)


def known_to(members: int) -> Tuning:
    """The effects of a call by a peer that knows this number of members."""
    return choose(WORK, len(DATA), Conditions(1, members, (), together=False, local=False))


def votes(run: ManualRun, *works: m.Spec) -> list[m.CallError]:
    """The answers to peers that vote for these."""
    for number, work in enumerate(works, 1):
        data = bytes(4 * work.count) if work.members != 3 else None
        run.say(b"%d" % number, m.StartVote(9, 0, work, data))
    told = [run.last(b"%d" % number) for number, _ in enumerate(works, 1)]
    errors = [one for one in told if isinstance(one, m.CallError)]
    assert len(errors) == len(works)
    return errors


def test_a_peer_that_knows_other_members_may_try_again() -> None:
    two, three = (known_to(members).spec for members in (2, 3))
    for works in ((two, three), (three, two)):
        for error in votes(ManualRun(2), *works):
            lost = Result.RANK_CONNECTION_LOST.value
            assert (error.result, error.cause) == (lost, m.Cause.OTHER)


def test_a_vote_for_more_members_than_there_are_may_be_repeated() -> None:
    """All have voted so, and then one was lost."""
    run = ManualRun(3)
    tuning = known_to(3)
    assert not tuning.inline
    for conn in (b"1", b"2"):
        run.say(conn, m.StartVote(9, 0, tuning.spec))
    run.perform(run.master.feed(Disconnected((b"3",), "it is gone")))
    for conn in (b"1", b"2"):
        error = run.last(conn)
        assert isinstance(error, m.CallError)
        assert error.result == Result.RANK_CONNECTION_LOST.value


def test_votes_with_and_without_a_number_of_members_do_not_match() -> None:
    two = known_to(2).spec
    fewer = m.Spec("all_reduce", 0, 10, 20)
    for other, why in (
        (WORK, "PCCL_INLINE_BYTES is not the same for all"),
        (fewer, "the peers do not ask for the same"),
    ):
        for works in ((two, other), (other, two)):
            for error in votes(ManualRun(2), *works):
                assert error.cause == m.Cause.MISMATCH
                assert why in error.why
