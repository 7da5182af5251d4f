"""When votes differ, only the odd one out is dropped."""

from __future__ import annotations

import pytest
from simulation.manual import ENTRY, SECRET, WORK, ManualRun, RestartedRun
from simulation.seeds import parts
from simulation.trainers import story_of_an_odd_one

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.inputs import Disconnected
from pccl.protocol.master.membership import NAMES_MAX
from pccl.protocol.master.voting import PART_BYTES, ROW_BYTES, held
from pccl.runtime.inline_collectives import combine
from pccl.types import Result

LISTED = m.Spec("all_reduce", 0, 0, 0, parts=(m.Part(10, 3, "a"), m.Part(10, 4, "b")))
OTHERS = {
    "one element longer": m.Spec("all_reduce", 0, 10, 1001),
    "another dtype": m.Spec("all_reduce", 0, 11, 1000),
    "another op": m.Spec("all_reduce", 3, 10, 1000),
    "quantized": m.Spec("all_reduce", 0, 10, 1000, algorithm=1),
    "another call": m.Spec("all_gather", 0, 10, 1000),
    "a dict": LISTED,
}
ALIKE = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)


class VeteransRun(ManualRun):
    """Peers, some of them veterans: these have reduced together before the others joined."""

    def __init__(self, veterans: int, newcomers: int = 0) -> None:
        super().__init__(0)
        self.master = Master(1, combine, secret=SECRET)
        self.call = 100
        self._admit(veterans)
        if veterans == 1:
            self.say(b"1", m.SyncVote(99, m.Manifest(0, 0, (ENTRY,))))
        elif veterans:
            self.reduce(*[WORK] * veterans)
            for conn in self.conns:
                started = self.last(conn)
                assert isinstance(started, m.Started)
                self.say(conn, m.FinishVote(started.seq, True))
        self._admit(newcomers)

    def _admit(self, count: int) -> None:
        before = self.conns
        for number in range(len(before), len(before) + count):
            self.join(b"%d" % (number + 1))
        for conn in before or self.conns[:1]:
            self.say(conn, m.TopologyVote(99))

    @property
    def conns(self) -> list[bytes]:
        return [peer.conn for peer in self.master.peers.values()]

    def reduce(self, *works: m.Spec | None, order: tuple[int, ...] = ()) -> None:
        """Each peer asks for this; None: it makes no call."""
        self.call += 1
        asked = dict(zip(list(self.conns), works, strict=True))
        for at in order or range(len(works)):
            conn = list(asked)[at]
            if (work := asked[conn]) is not None and conn not in self.dropped:
                self.say(conn, m.StartVote(self.call, 0, work))

    def outcome(self, conn: bytes) -> str:
        """The answer to a peer's latest call."""
        told = [one for one in self.told[conn] if not isinstance(one, m.Failed)]
        match told[-1]:
            case m.Kicked(cause=m.Cause.MISMATCH):
                return "dropped"
            case m.CallError(cause=m.Cause.MISMATCH):
                return "failed"
            case m.Started(call=call) if call == self.call:
                return "started"
            case _:
                return "waits"

    @property
    def outcomes(self) -> list[str]:
        return [self.outcome(conn) for conn in sorted(self.told)]


# ---- one collective ----


@ALIKE
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0)])
def test_one_of_three_newcomers_that_differs_is_dropped(
    other: m.Spec, order: tuple[int, ...]
) -> None:
    run = VeteransRun(0, 3)
    run.reduce(WORK, WORK, other, order=order)
    assert run.outcomes == ["started", "started", "dropped"]
    kicked = run.last(b"3")
    assert isinstance(kicked, m.Kicked) and kicked.result == Result.INVALID_ARGUMENT.value
    assert f"peer 3 (10.0.0.1:1) called {other} with tag 0" in kicked.why
    assert f"peer 1 (10.0.0.1:1) called {WORK} with tag 0" in kicked.why
    assert "peer 3 (10.0.0.1:1) is the odd one out: it is dropped" in kicked.why


@ALIKE
def test_the_odd_one_of_three_veterans_is_dropped(other: m.Spec) -> None:
    run = VeteransRun(3)
    run.reduce(other, WORK, WORK)
    assert run.outcomes == ["dropped", "started", "started"]


@ALIKE
@pytest.mark.parametrize("newcomers", [1, 4])
@pytest.mark.parametrize("first", [True, False])
def test_newcomers_that_differ_go_however_many_they_are(
    other: m.Spec, newcomers: int, first: bool
) -> None:
    run = VeteransRun(2, newcomers)
    size = 2 + newcomers
    order = (*range(2, size), 0, 1) if first else tuple(range(size))
    run.reduce(WORK, WORK, *[other] * newcomers, order=order)
    assert run.outcomes == ["started", "started", *["dropped"] * newcomers]


def test_an_odd_newcomer_is_dropped_and_the_only_veteran_is_alone() -> None:
    run = VeteransRun(1, 1)
    run.reduce(WORK, OTHERS["another op"])
    assert run.outcome(b"2") == "dropped"
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and error.result == Result.RANK_CONNECTION_LOST.value
    assert "alone in its group: peer 2" in error.why


@pytest.mark.parametrize(("veterans", "newcomers"), [(0, 2), (2, 0), (2, 3)])
def test_a_split_without_a_majority_fails_on_all_and_drops_no_peer(
    veterans: int, newcomers: int
) -> None:
    other = OTHERS["another dtype"]
    run = VeteransRun(veterans, newcomers)
    run.reduce(WORK, other, *[other] * (veterans + newcomers - 2))
    assert {*run.outcomes} == {"failed"}
    assert len(run.master.peers) == veterans + newcomers
    run.reduce(*[WORK] * (veterans + newcomers))
    assert {*run.outcomes} == {"started"}


def test_three_that_all_differ_all_fail_when_the_last_one_has_voted() -> None:
    run = VeteransRun(3)
    run.reduce(WORK, OTHERS["another op"], None)
    assert run.outcomes == ["waits", "waits", "waits"]
    run.reduce(None, None, OTHERS["another dtype"])
    assert run.outcomes == ["failed", "failed", "failed"]


def test_a_dispute_is_settled_without_lost_peers() -> None:
    for lost, outcomes in ((b"3", ["failed", "failed"]), (b"2", ["started", "started"])):
        run = VeteransRun(3)
        run.reduce(WORK, OTHERS["another op"], None)
        run.perform(run.master.feed(Disconnected((lost,), "its connection broke")))
        if lost == b"2":
            run.reduce(None, WORK)
            run.call -= 1
            assert isinstance(run.last(b"1"), m.Started)
        else:
            assert [run.outcome(conn) for conn in (b"1", b"2")] == outcomes


def test_a_vote_that_is_taken_back_is_no_part_of_a_dispute() -> None:
    run = VeteransRun(3)
    run.reduce(WORK, OTHERS["another op"], None)
    run.say(b"2", m.Withdraw(run.call))
    run.say(b"2", m.StartVote(run.call, 0, WORK))
    run.say(b"3", m.StartVote(run.call, 0, WORK))
    assert run.outcomes == ["started"] * 3


def test_peers_that_know_other_ranks_are_no_dispute_however_they_differ() -> None:
    run = VeteransRun(3)
    ranked = m.Spec("broadcast", 0, 10, 1000, members=3)
    run.reduce(ranked, m.Spec("broadcast", 0, 10, 1000, members=4), None)
    for conn in (b"1", b"2"):
        error = run.last(conn)
        assert isinstance(error, m.CallError)
        assert error.result == Result.RANK_CONNECTION_LOST.value and "call again" in error.why


# ---- calls that can never meet ----


def test_a_peer_in_another_call_than_most_is_dropped() -> None:
    run = VeteransRun(3)
    run.say(b"3", m.TopologyVote(7))
    run.reduce(WORK, None, None)
    assert run.outcomes == ["waits"] * 3, "the second one decides"
    run.say(b"2", m.StartVote(run.call, 0, WORK))
    assert run.outcomes == ["started", "started", "dropped"]
    kicked = run.last(b"3")
    assert isinstance(kicked, m.Kicked) and kicked.result == Result.INVALID_USAGE.value
    assert "can never meet: peer 3 (10.0.0.1:1) called update_topology(); peer 1" in kicked.why


@pytest.mark.parametrize("newcomers", [1, 3])
def test_newcomers_in_another_call_than_veterans_go(newcomers: int) -> None:
    run = VeteransRun(2, newcomers)
    for conn in run.conns[2:]:
        run.say(conn, m.SyncVote(7, m.Manifest(0, 0, (ENTRY,))))
    run.reduce(WORK, WORK, *[None] * newcomers)
    assert run.outcomes == ["started", "started", *["dropped"] * newcomers]


def test_the_call_of_the_majority_continues_when_three_calls_exclude_each_other() -> None:
    run = VeteransRun(5)
    run.say(b"1", m.TopologyVote(7))
    run.say(b"2", m.SyncVote(7, m.Manifest(0, 0, (ENTRY,))))
    run.reduce(None, None, WORK, WORK, WORK)
    assert run.outcomes == ["dropped", "dropped", "started", "started", "started"]


def test_when_no_call_can_have_most_all_fail() -> None:
    run = VeteransRun(4)
    run.say(b"1", m.TopologyVote(7))
    run.say(b"2", m.TopologyVote(7))
    run.reduce(None, None, WORK, None)
    assert "failed" not in run.outcomes
    run.say(b"4", m.StartVote(run.call, 0, WORK))
    assert run.outcomes == ["failed"] * 4
    assert len(run.master.peers) == 4


def test_members_of_other_groups_are_no_part_of_a_dispute() -> None:
    run = ManualRun(1)
    for conn in (b"2", b"3", b"4"):
        run.join(conn, group=1)
    for conn in (b"1", b"2"):
        run.say(conn, m.TopologyVote(1))
    run.everyone(m.TopologyVote(2))
    run.say(b"1", m.TopologyVote(3))
    run.say(b"2", m.TopologyVote(3))
    for conn in (b"3", b"4"):
        run.say(conn, m.SyncVote(3, m.Manifest(0, 0, (ENTRY,))))
    assert run.dropped.keys() == {b"2"}
    assert isinstance(run.last(b"3"), m.SyncPlan | m.SyncResult)


@pytest.mark.parametrize("half", [NAMES_MAX, NAMES_MAX + 1])
def test_of_many_callers_the_first_ones_and_the_last_are_named(half: int) -> None:
    run = VeteransRun(2 * half)
    for conn in run.conns[:half]:
        run.say(conn, m.TopologyVote(7))
    run.reduce(*[None] * half, *[WORK] * half)
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and "calls that can never meet" in error.why
    named = [n for n in range(1, half + 1) if f"peer {n} (10.0.0.1:1) called update" in error.why]
    if half == NAMES_MAX:
        assert named == [*range(1, half + 1)] and "so did" not in error.why
    else:
        assert named == [*range(1, NAMES_MAX), half] and "so did 1 more" in error.why


def test_a_peer_that_was_not_asked_gets_the_errors_of_all_rounds_that_have_failed() -> None:
    run = VeteransRun(2, 1)
    for tag in (3, 4, 5):
        for conn, work in ((b"1", WORK), (b"2", OTHERS["another op"])):
            run.say(conn, m.StartVote(7 + tag, tag, work))
    for tag in (4, 5, 3):
        run.say(b"3", m.StartVote(7 + tag, tag, WORK))
        error = run.last(b"3")
        assert isinstance(error, m.CallError) and error.call == 7 + tag
        assert f"with tag {tag}" in error.why


def test_a_peer_that_is_alone_hears_which_members_of_its_group_were_lost() -> None:
    run = ManualRun(2)
    for conn in (b"3", b"4"):
        run.join(conn, group=1)
    run.everyone(m.TopologyVote(1))
    run.say(b"3", m.StartVote(2, 0, WORK))
    run.perform(run.master.feed(Disconnected((b"1", b"4"), "it broke")))
    error = run.last(b"3")
    assert isinstance(error, m.CallError)
    assert "alone in its group: peer 4" in error.why and "peer 1" not in error.why


def test_the_memory_that_a_vote_takes_is_about_right() -> None:
    assert held(WORK) == 0 and held(WORK, data=b"1234") == 4
    assert held(WORK, ((1, 2), (3,))) == 3 * ROW_BYTES
    assert held(m.Spec("all_gather", 0, 10, 5, members=2, rows=(1, 2)), data=b"x") == (
        2 * ROW_BYTES + 1
    )
    assert held(LISTED, data=b"123") == 2 * PART_BYTES + 2 + 3
    wide = m.Spec("all_reduce", 0, 0, 0, parts=(m.Part(10, 3, "ä", "2x3/1,2"),))
    assert held(wide) == PART_BYTES + 4 * 8
    assert held(m.Manifest(0, 0, (ENTRY,))) == PART_BYTES + 1


def test_veterans_that_launch_several_collectives_are_waited_for() -> None:
    run = VeteransRun(2, 1)
    run.say(b"3", m.TopologyVote(7))
    run.say(b"2", m.PendingVote(8, patient=True))  # in another thread
    for tag in (1, 2):
        run.say(b"1", m.StartVote(200 + tag, tag, WORK))
    assert {*run.outcomes} == {"waits"}
    run.say(b"2", m.StartVote(201, 1, WORK))
    assert run.outcome(b"3") == "dropped"
    assert isinstance(run.last(b"2"), m.Started)


def test_slower_peers_in_a_pipeline_are_waited_for() -> None:
    """Each launches the same collectives in the same order, and waits for none of them yet."""
    run = VeteransRun(5, 1)
    for conn, tags in ((b"1", (4, 5, 6)), (b"2", (4, 5)), (b"3", (4, 5)), (b"4", (4,))):
        for tag in tags:
            run.say(conn, m.StartVote(200 + tag, tag, WORK))
    for tag in (4, 5, 6):
        work = OTHERS["another op"] if tag == 6 else WORK
        run.say(b"6", m.StartVote(200 + tag, tag, work))
    assert "failed" not in run.outcomes
    for conn, first in ((b"5", 4), (b"4", 5), (b"3", 6)):
        for tag in range(first, 7):
            run.say(conn, m.StartVote(200 + tag, tag, WORK))
    assert "failed" not in run.outcomes
    assert isinstance(run.last(b"6"), m.Kicked)


def test_two_threads_stuck_in_two_calls_that_no_third_can_decide() -> None:
    run = VeteransRun(3)
    run.say(b"1", m.StartVote(7, 1, WORK, stuck=True))
    run.say(b"2", m.StartVote(7, 2, WORK, stuck=True))
    run.say(b"3", m.StartVote(7, 3, WORK, stuck=True))
    assert "failed" in run.outcomes, "else all three would wait for ever"


# ---- a restarted master ----


@pytest.mark.parametrize("knows", ["flag", "finished", "small", "sync"])
def test_a_restarted_master_knows_the_veterans(knows: str) -> None:
    """Also who has only missed the news of it."""
    run = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    small = m.Small(4, 0, (1, 2), b"abcd")
    said: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "flag": ({"veteran": True}, {"veteran": True}),
        "finished": (
            {"veteran": True, "finished": ((3, True),)},
            {"open": (m.Open(3, (1, 2), True),)},
        ),
        "small": ({"veteran": True, "small": (small,), "last_seq": 4}, {}),
        "sync": (
            {"veteran": True, "done": m.Done(sync=1, revision=5, holds=True)},
            {"done": m.Done()},
        ),
    }
    for number, fields in enumerate(said[knows], 1):
        run.back(b"%d" % number, number, 7, 1, 2, **fields)
    assert [run.master.peers[number].veteran for number in (1, 2)] == [True, True]
    fresh = RestartedRun(Journal(7, 1, 3, frozenset((1, 2))))
    for number in (1, 2):
        fresh.back(b"%d" % number, number, 7, 1, 2)
    assert not any(peer.veteran for peer in fresh.master.peers.values())


# ---- whole runs ----


@parts(1200, 300, 50)
def test_peers_that_agree_with_most_never_pay_for_one_that_does_not(part: range) -> None:
    paid = 0
    for seed in part:
        run, odd = story_of_an_odd_one(seed)
        assert run.odd <= {odd.machine.number}, f"seed {seed}"
        paid += len(run.odd)
    assert paid > 0.4 * len(part), "the odd one is hardly ever met"
