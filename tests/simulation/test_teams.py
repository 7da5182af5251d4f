"""Teams: peers that are admitted together, in one order in all groups, and lost together."""

from __future__ import annotations

from simulation.manual import ManualRun, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.inputs import Disconnected, Resume, Tick
from pccl.protocol.master.status import explain
from pccl.runtime.inline_collectives import combine
from pccl.types import Result


def accepted(run: ManualRun, group: int | None = None) -> list[int]:
    return run.master.run.membership.accepted(group)


def grid(run: ManualRun, *members: tuple[bytes, int, int]) -> None:
    """Teams of two join: each member by its connection, its group and its team."""
    for conn, group, team in members:
        run.join(conn, group=group, team=team, team_size=2)


def test_a_team_is_admitted_when_all_of_it_are_there() -> None:
    run = ManualRun(1)
    run.join(b"2", team=7, team_size=2)
    run.say(b"1", m.PendingVote(2))
    answer = run.last(b"1")
    assert isinstance(answer, m.PendingResult) and not answer.pending
    run.say(b"1", m.TopologyVote(3))
    assert accepted(run) == [1]
    assert explain(run.master.run, 2, 1, 0).endswith("the other 1 of its team must connect()")
    run.join(b"3", group=1, team=7, team_size=2)
    run.say(b"1", m.PendingVote(4))
    answer = run.last(b"1")
    assert isinstance(answer, m.PendingResult) and answer.pending
    run.say(b"1", m.TopologyVote(5))
    assert accepted(run) == [1, 2, 3]


def test_half_a_team_is_not_pending() -> None:
    run = ManualRun(1)
    run.say(b"1", m.PendingVote(2, patient=True))
    run.join(b"2", team=7, team_size=2)
    assert not isinstance(run.last(b"1"), m.PendingResult)
    run.join(b"3", group=1, team=7, team_size=2)
    assert isinstance(run.last(b"1"), m.PendingResult)


def test_a_run_begins_with_a_whole_team() -> None:
    run = ManualRun(0)
    grid(run, (b"1", 0, 7), (b"2", 0, 8), (b"3", 1, 8))
    assert accepted(run) == [2, 3]


def test_all_groups_have_the_teams_in_one_order() -> None:
    run = ManualRun(1)
    grid(run, (b"2", 0, 7), (b"3", 1, 8), (b"4", 0, 8), (b"5", 1, 7))
    run.say(b"1", m.TopologyVote(2))
    assert accepted(run, 0) == [1, 2, 4]
    assert accepted(run, 1) == [5, 3]


def test_a_team_is_lost_together() -> None:
    run = ManualRun(1)
    grid(run, (b"2", 0, 7), (b"3", 1, 7), (b"4", 0, 8))
    run.say(b"1", m.TopologyVote(2))
    assert accepted(run) == [1, 2, 3]
    run.perform(run.master.feed(Disconnected((b"2",), "its connection broke")))
    assert accepted(run) == [1]
    kicked = run.last(b"3")
    assert isinstance(kicked, m.Kicked)
    assert kicked.result == Result.RANK_CONNECTION_FAILED.value
    assert "peer 2 (10.0.0.1:1), of its team, is gone: its connection broke" in kicked.why
    assert "its connection broke" in run.dropped[b"2"]
    run.say(b"4", m.Leave())
    assert sorted(run.master.peers) == [1]


def test_two_of_a_team_that_are_late_together_are_dropped_once() -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, straggler_s=1.0, secret=b"s")
    run.join(b"1")
    run.say(b"1", m.TopologyVote(1))
    grid(run, (b"2", 0, 7), (b"3", 1, 7))
    run.say(b"1", m.TopologyVote(2))
    run.say(b"1", m.TopologyVote(3))
    for now_s in (0.0, 2.0):
        run.perform(run.master.feed(Tick(now_s)))
    assert accepted(run) == [1]
    assert "others waited for it" in run.dropped[b"3"]


def test_a_team_has_as_many_members_as_it_says() -> None:
    run = ManualRun(1)
    grid(run, (b"2", 0, 7), (b"3", 1, 7))
    for conn, size, why in (
        (b"4", 2, "its team has all its 2 members already"),
        (b"5", 3, "it says that its team has 3 members, and another one does not"),
        (b"6", 0, "it is of team 7, of 0 members, which cannot be"),
    ):
        run.join(conn, team=7, team_size=size)
        refused = run.last(conn)
        assert isinstance(refused, m.Refused)
        assert refused.why == why
    assert sorted(run.master.peers) == [1, 2, 3]


def of_team(number: int, team: int, group: int) -> m.PeerInfo:
    return m.PeerInfo(number, group, "10.0.0.1", 1, "", "x", "", team, 2)


def test_half_a_team_cannot_come_back() -> None:
    """And those that can are in one order, as before."""
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 8, frozenset(range(1, 7))), secret=b"s")
    teams = {1: (7, 0), 2: (8, 1), 3: (8, 0), 4: (7, 1), 5: (9, 0)}
    infos = {number: of_team(number, *where) for number, where in teams.items()}
    for number, info in infos.items():
        known = tuple(one for one in infos.values() if one.group == info.group)
        said = resume(number, info=info, known=known)
        run.perform(run.master.feed(Resume(b"%d" % number, said, "10.0.0.1")))
    for now_s in (0.0, 6.0):
        run.perform(run.master.feed(Tick(now_s)))
    refused = run.last(b"5")
    assert isinstance(refused, m.Refused) and "given up" in refused.why
    assert accepted(run, 0) == [1, 3]
    assert accepted(run, 1) == [4, 2]


def test_a_team_that_is_cut_off_with_all_others_comes_back_as_a_whole() -> None:
    run = ManualRun(0)
    grid(run, (b"1", 0, 7), (b"2", 1, 7))
    run.perform(run.master.feed(Disconnected((b"1",), "its connection broke")))
    run.perform(run.master.feed(Disconnected((b"2",), "its connection broke")))
    assert [info.peer for info in run.master.run.membership.last_seen] == [1, 2]
