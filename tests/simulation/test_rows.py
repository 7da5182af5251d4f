"""The master's rules of rows: an all_to_all starts if what members give is what the others take."""

from __future__ import annotations

import pytest
from simulation.manual import ManualRun
from simulation.programs import Call, Scenario, Script, play

from pccl.protocol import messages as m
from pccl.protocol.ring import checksum
from pccl.types import Result

TRADE = m.Spec("all_to_all", 0, 10, 5, members=3)
ROWS = [  # of each rank: for each, and from each
    ((1, 2, 0), (1, 0, 7)),
    ((0, 4, 6), (2, 4, 1 << 40)),
    ((7, 1 << 40, 3), (0, 6, 3)),
]


def vote(run: ManualRun, number: int, gives: tuple[int, ...], takes: tuple[int, ...]) -> None:
    run.say(b"%d" % number, m.StartVote(2, 0, TRADE, gives=gives, takes=takes))


def test_rows_that_fit_start() -> None:
    run = ManualRun(3)
    for number, rows in enumerate(ROWS, 1):
        vote(run, number, *rows)
    assert all(isinstance(run.last(b"%d" % number), m.Started) for number in (1, 2, 3))


def test_rows_that_do_not_fit_are_an_error_that_names_the_peers() -> None:
    for rank, side, other in ((0, 0, 1), (2, 1, 0), (1, 0, 2)):
        run = ManualRun(3)
        for number, rows in enumerate(ROWS):
            given = [list(each) for each in rows]
            if number == rank:
                given[side][other] += 5
            vote(run, number + 1, *map(tuple, given))
        giver, taker = (rank, other) if side == 0 else (other, rank)
        was = ROWS[giver][0][taker]
        gives, takes = (was + 5, was) if side == 0 else (was, was + 5)
        for number in (1, 2, 3):
            error = run.last(b"%d" % number)
            assert isinstance(error, m.CallError) and error.cause == m.Cause.MISMATCH
            assert f"all_to_all(5 elements of float32) with tag 0, peer {giver + 1} (" in error.why
            assert f") gives {gives} rows to peer {taker + 1} (" in error.why
            assert error.why.endswith(f"which takes {takes}")
        for number in (1, 2, 3):  # and the group goes on
            vote(run, number, *ROWS[number - 1])
        assert isinstance(run.last(b"1"), m.Started)


def test_ranks_of_a_ring_that_has_changed_unseen_are_an_error_first() -> None:
    """Its peers are the same, in another order: the source would be another one."""
    for seen in ((1, 2, 3), (3, 1, 2)):
        run = ManualRun(3)
        work = m.Spec("broadcast", 0, 10, 5, root=1, members=3, ring=checksum(seen))
        for number in (1, 2):
            run.say(b"%d" % number, m.StartVote(2, 0, work))
        run.master.run.groups[0].rings = (m.Ring((3, 1, 2), 1),)
        run.master.run.groups.renew(0)  # a link is blocked, for instance
        run.say(b"3", m.StartVote(2, 0, work))
        told = run.last(b"1")
        if seen == (3, 1, 2):
            assert isinstance(told, m.Started)
            continue
        assert isinstance(told, m.CallError)
        assert told.result == Result.RANK_CONNECTION_LOST.value
        assert told.why == "the group has 3 peers by now, and ranks have changed: call again"


def test_peers_that_know_different_rings_may_try_again() -> None:
    run = ManualRun(3)
    for number, seen in ((1, (1, 2, 3)), (2, (2, 1, 3))):
        work = m.Spec("broadcast", 0, 10, 5, root=1, members=3, ring=checksum(seen))
        run.say(b"%d" % number, m.StartVote(2, 0, work))
    told = run.last(b"1")
    assert isinstance(told, m.CallError)
    assert told.result == Result.RANK_CONNECTION_LOST.value


def test_ranks_are_positions_in_the_ring() -> None:
    run = ManualRun(3)
    run.master.run.groups[0].rings = (m.Ring((3, 1, 2), 1),)
    run.master.run.groups.renew(0)
    for rank, number in enumerate((3, 1, 2)):
        vote(run, number, *ROWS[rank])
    assert isinstance(run.last(b"1"), m.Started)


def test_votes_with_and_without_rows_do_not_match() -> None:
    run = ManualRun(2)
    vote(run, 1, *ROWS[0])
    vote(run, 2, (), ())
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and error.cause == m.Cause.MISMATCH
    assert error.why.startswith(
        "some say how many rows they give and take, and some do not: peer 1"
    )


def test_numbers_that_cannot_be_cost_their_sender_the_membership() -> None:
    odd = m.Spec("all_gather", 0, 10, 5, members=3)
    for work, gives, takes in (
        (TRADE, (1, 1), (1, 1, 1)),
        (TRADE, (1, 1, 1), ()),
        (TRADE, (1,) * 4, (1,) * 4),
        (odd, (1, 1, 1), (1, 1, 1)),
    ):
        run = ManualRun(3)
        run.say(b"1", m.StartVote(2, 0, work, gives=gives, takes=takes))
        assert "out of turn" in run.dropped[b"1"]


def test_uneven_rows_do_not_show_that_a_ring_works() -> None:
    for uneven in (False, True):
        run = ManualRun(3)
        for number, rows in enumerate(ROWS, 1):
            vote(run, number, *(rows if uneven else ((), ())))
        started = run.last(b"1")
        assert isinstance(started, m.Started)
        run.everyone(m.FinishVote(started.seq, True))
        assert all(peer.proven is not uneven for peer in run.master.peers.values())


@pytest.mark.parametrize("tag", [0, 1])  # rows, and quantized contributions
def test_calls_succeed_without_direct_streams_once_the_rings_avoid_all_walls(tag: int) -> None:
    calls = (Call("update_topology"), *[Call("all_reduce", tag)] * 9)
    forgone = 0
    for seed in range(20):
        trace: list[str] = []
        scripts = tuple(Script(0, (calls,), cut_from=((i + 2) % 5,)) for i in range(5))
        play(Scenario(seed, scripts, rows=True, lawful=True), trace)
        forgone += sum("loses its stream" in line for line in trace)
        ends = [line for line in trace if "returns from all_" in line]
        good = [i for i, line in enumerate(ends) if "Reduced(" in line]
        assert len(good) >= 10 and not any("could not" in line for line in ends[good[-5] :])
    assert forgone > 20
