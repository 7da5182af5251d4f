"""Rules of the master's state machine that random runs rarely reach, one at a time."""

from __future__ import annotations

import pytest
from simulation.manual import ENTRY, OTHER, RUN, WORK, ManualRun, member, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.inputs import Dialled, Disconnected, Farewell, Resume, Tick
from pccl.protocol.master.synchronizations import STALLS_MAX, SYNC_ATTEMPTS_MAX
from pccl.protocol.master.topology import ATTEMPTS
from pccl.protocol.peer import Peer
from pccl.protocol.peer.calls import Collective
from pccl.protocol.peer.effects import Fail, Fault, Send
from pccl.runtime.inline_collectives import combine
from pccl.types import Result

SMALL = m.Spec("all_reduce", 0, 0, 4)


def unreached(run: ManualRun, by: bytes, peer: int) -> None:
    run.say(by, m.Unreached(peer, run.master.run.groups[0].epoch, "timed out"))


def commit(run: ManualRun) -> None:
    seq = run.start()
    run.everyone(m.FinishVote(seq, True))
    assert run.last(b"1") == m.Finished(seq, True)


def order(run: ManualRun, conn: bytes) -> tuple[int, ...]:
    """The only ring that a peer was told of last."""
    (ring,) = [told.rings for told in run.told[conn] if isinstance(told, m.Plan)][-1]
    return ring.order


def test_the_ring_goes_around_a_link_that_cannot_be_and_the_master_dials() -> None:
    run = ManualRun(3)
    seq = run.start()
    unreached(run, b"1", 2)
    assert run.dials == [2]
    assert order(run, b"3") == (1, 3, 2)
    for conn in (b"1", b"2", b"3"):
        assert isinstance(run.last(conn), m.Interrupt)
        run.say(conn, m.FinishVote(seq, False))
    run.perform(run.master.feed(Dialled(2, "")))
    assert sorted(run.master.peers) == [1, 2, 3]
    commit(run)
    unreached(run, b"3", 2)
    assert run.dials == [2, 2]
    assert order(run, b"3") == (1, 2, 3)  # what was blocked before may work again


def test_an_accused_peer_that_the_master_cannot_reach_is_dropped_if_its_view_counts() -> None:
    run = ManualRun(3)
    unreached(run, b"1", 2)
    run.perform(run.master.feed(Dialled(2, "no answer")))
    kicked = next(t for t in run.told[b"2"] if isinstance(t, m.Kicked))
    assert kicked.result == Result.RANK_CONNECTION_FAILED.value
    assert "peer 1 (10.0.0.1:1) could not reach peer 2 (10.0.0.1:1) (timed out)" in kicked.why
    assert "the master could not (no answer)" in kicked.why
    assert sorted(run.master.peers) == [1, 3]


def test_a_dial_into_a_private_network_of_others_does_not_count() -> None:
    run = ManualRun(2)
    run.join(b"3", host="192.168.0.3")
    run.everyone(m.TopologyVote(1))
    unreached(run, b"2", 3)
    run.perform(run.master.feed(Dialled(3, "no answer")))
    assert sorted(run.master.peers) == [1, 2, 3]
    unreached(run, b"1", 3)  # but that two cannot reach it does
    assert sorted(run.master.peers) == [1, 2]


def test_a_stalled_synchronization_is_planned_again_a_few_times() -> None:
    run = ManualRun(3)
    for conn, content in ((b"1", b"old"), (b"2", b"new"), (b"3", b"new")):
        manifest = m.Manifest(int(content == b"new"), 0, (m.Entry("x", 10, 4, False, content),))
        run.say(conn, m.SyncVote(2, manifest))
    first = plan = run.last(b"2")
    assert isinstance(first, m.SyncPlan)
    for _ in range(STALLS_MAX - 1):
        assert isinstance(plan, m.SyncPlan)
        assert plan.serve == (1,)
        run.say(b"2", m.Stalled(1, plan.seq, "a lane was disconnected"))
        plan = run.last(b"2")
        run.say(b"3", m.Stalled(1, first.seq, "heard of after the next plan"))
        assert run.last(b"2") == plan
    assert isinstance(plan, m.SyncPlan)
    assert plan.seq == first.seq + STALLS_MAX - 1
    run.say(b"2", m.Stalled(1, plan.seq, "a lane was disconnected"))
    error = run.last(b"1")
    assert isinstance(error, m.CallError)
    assert "data was lost 8 times in one synchronization; the last time peer 2" in error.why
    assert error.result == Result.RANK_CONNECTION_LOST.value
    assert error.cause == m.Cause.OTHER
    assert sorted(run.master.peers) == [1, 2, 3]


def test_a_receiver_that_the_holder_cannot_connect_to_costs_a_synchronization_only_itself() -> None:
    """Peer 2 holds the state of peers 1 and 3, and cannot connect to peer 3."""
    run = ManualRun(3)
    unreached(run, b"2", 3)
    run.perform(run.master.feed(Dialled(3, "")))
    for conn, content in ((b"1", b"old"), (b"2", b"new"), (b"3", b"old")):
        manifest = m.Manifest(int(content == b"new"), 0, (m.Entry("x", 10, 4, False, content),))
        run.say(conn, m.SyncVote(2, manifest))
    for _ in range(STALLS_MAX):
        assert sorted(run.master.peers) == [1, 2, 3]
        plan = run.last(b"2")
        assert isinstance(plan, m.SyncPlan) and plan.serve == (1, 3)
        run.say(b"2", m.Stalled(1, plan.seq, "no lane stood within 6 s"))
    assert "peer 2 (10.0.0.1:1) could not send the shared state" in run.dropped[b"3"]
    plan = run.last(b"1")
    assert isinstance(plan, m.SyncPlan)
    run.say(b"1", m.FetchedVote(plan.seq, True))
    for conn in (b"1", b"2"):
        assert isinstance(run.last(conn), m.SyncResult)


def test_the_only_peer_with_the_state_is_not_dropped_because_others_cannot_fetch_it() -> None:
    """Peers 2 and 3 are newcomers, whose own content the first transfer may have overwritten."""
    run = ManualRun(1)
    run.say(b"1", m.SyncVote(2, m.Manifest(5, 0, (m.Entry("x", 10, 4, False, b"new"),))))
    for conn in (b"2", b"3"):
        run.join(conn)
    run.say(b"1", m.TopologyVote(1))
    for conn, content in ((b"1", b"new"), (b"2", b"old"), (b"3", b"old")):
        manifest = m.Manifest(5 * (content == b"new"), 0, (m.Entry("x", 10, 4, False, content),))
        run.say(conn, m.SyncVote(2, manifest))
    for _ in range(SYNC_ATTEMPTS_MAX):
        for conn in (b"2", b"3"):
            plan = run.last(conn)
            assert isinstance(plan, m.SyncPlan) and plan.in_place
            run.say(conn, m.FetchedVote(plan.seq, False, "the data has another digest"))
            assert 1 in run.master.peers
    assert sorted(run.master.peers) == [1]
    for conn in (b"2", b"3"):
        assert "3 failed transfers of shared state: the data has" in run.dropped[conn]
    assert isinstance(run.last(b"1"), m.SyncResult)


def test_the_peer_that_reaches_no_other_is_dropped() -> None:
    run = ManualRun(3)
    commit(run)
    for accused in (2, 3):
        unreached(run, b"1", accused)
        run.perform(run.master.feed(Dialled(accused, "")))
    assert sorted(run.master.peers) == [2, 3]
    assert "whom the master reaches: let its connections out" in run.dropped[b"1"]


def test_a_small_result_or_a_broadcast_does_not_show_that_a_ring_works() -> None:
    """Nor does an all-gather to which only one member gives anything: nothing comes to that one."""
    run = ManualRun(3)
    one_sided = m.Spec("all_gather", 0, 10, 5, members=3, rows=(0, 7, 0))
    others = (m.Spec("broadcast", 0, 10, 5), None), (one_sided, None), (SMALL, b"abcd")
    for work, data in ((WORK, None), *others):
        run.master.run.collectives.small_max = 0
        run.everyone(m.StartVote(2, 0, work, data))
        started = run.last(b"1")
        assert isinstance(started, m.Started)
        if work is not WORK:
            unreached(run, b"1", 2)
            assert run.master.run.groups[0].blame.blocked
        run.everyone(m.FinishVote(started.seq, work is not WORK))
    assert not any(peer.proven for peer in run.master.peers.values())
    unreached(run, b"1", 3)
    run.perform(run.master.feed(Dialled(2, None)) + run.master.feed(Dialled(3, None)))
    assert sorted(run.master.peers) == [2, 3]


@pytest.mark.parametrize("rows", [(1, 0, 7), (1, 2, 7)])
def test_an_all_gather_of_several_members_rows_shows_that_a_ring_works(
    rows: tuple[int, ...],
) -> None:
    run = ManualRun(3)
    run.everyone(m.StartVote(2, 0, m.Spec("all_gather", 0, 10, 5, members=3, rows=rows)))
    started = run.last(b"1")
    assert isinstance(started, m.Started)
    run.everyone(m.FinishVote(started.seq, True))
    assert all(peer.proven for peer in run.master.peers.values())


def test_an_error_names_the_peers_with_different_rows() -> None:
    run = ManualRun(2)
    rows = (*range(8), 1, 2, 3)  # more than a text shows
    for conn, last in ((b"1", 3), (b"2", 4)):
        work = m.Spec("all_gather", 0, 10, 5, members=3, rows=(*rows, last))
        run.say(conn, m.StartVote(2, 0, work))
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and error.cause == m.Cause.MISMATCH
    assert "all_gather(5 elements of float32, times 0, 1, 2, 3, 4, 5, 6, 7, ... rows)" in error.why
    assert "; rank 11 gives 3 rows, and 4" in error.why or "4 rows, and 3" in error.why


def test_a_fetch_fails_for_want_of_a_link_and_the_one_at_fault_goes() -> None:
    run = ManualRun(3)
    for conn, revision in ((b"1", 0), (b"2", 0), (b"3", 7)):
        run.say(conn, m.SyncVote(2, m.Manifest(revision, 0, (ENTRY if revision else OTHER,))))
    unreached(run, b"1", 3)
    run.perform(run.master.feed(Dialled(3, "")))
    for _ in range(3):
        plan = run.last(b"1")
        assert isinstance(plan, m.SyncPlan)
        run.say(b"1", m.FetchedVote(plan.seq, False, "no holder is left"))
    assert sorted(run.master.peers) == [2, 3]


def test_an_impossible_accusation_is_ignored() -> None:
    run = ManualRun(3)
    run.say(b"1", m.Unreached(2, run.master.run.groups[0].epoch + 1))
    for accused in (1, 99):
        unreached(run, b"1", accused)
    run.perform(run.master.feed(Dialled(99, "refused")))
    run.perform(run.master.feed(Dialled(3, "refused")))
    assert not run.master.run.groups[0].blame.blocked
    assert sorted(run.master.peers) == [1, 2, 3]


def test_two_peers_that_were_together_before_have_some_attempts() -> None:
    run = ManualRun(2)
    commit(run)
    for attempt in range(ATTEMPTS):
        assert sorted(run.master.peers) == [1, 2]
        seq = run.start()
        unreached(run, b"1", 2)
        if attempt == 0:
            run.perform(run.master.feed(Dialled(2, None)))
        run.everyone(m.FinishVote(seq, False))
    assert sorted(run.master.peers) == [1]


def test_a_peer_lost_again_during_recovery_may_come_back_once_more() -> None:
    run = ManualRun(2)
    run.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))), secret=b"s")
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    run.perform(run.master.feed(Resume(b"a", resume(1, known=known), "10.0.0.1")))
    run.perform(run.master.feed(Disconnected((b"a",), "its connection broke")))
    for conn, number in ((b"b", 1), (b"c", 2)):
        run.perform(run.master.feed(Resume(conn, resume(number, known=known), "10.0.0.1")))
    assert {n: peer.conn for n, peer in run.master.peers.items()} == {1: b"b", 2: b"c"}


def test_a_peer_late_to_a_failed_call_gets_one_error() -> None:
    run = ManualRun(2)
    commit(run)  # so the third one has no say
    run.join(b"3")
    for conn in (b"1", b"2"):
        run.say(conn, m.TopologyVote(4))
    run.say(b"1", m.TopologyVote(5))
    run.say(b"2", m.SyncVote(5, m.Manifest(0, 0, ())))
    for call, conn in enumerate((b"1", b"2", b"3"), 5):
        if conn == b"3":
            run.say(conn, m.TopologyVote(call))
        error = run.last(conn)
        assert isinstance(error, m.CallError)
        assert error.cause == m.Cause.MISMATCH
        assert "called update_topology()" in error.why
        assert "called sync_shared_state()" in error.why
    run.everyone(m.TopologyVote(9))
    assert isinstance(run.last(b"3"), m.TopologyResult)


def test_tensors_of_different_layouts_do_not_match() -> None:
    """They have as many elements, and would be reduced with those of other places."""
    for listed in (False, True):
        run = ManualRun()
        for conn, layout in ((b"1", ""), (b"2", "2x3/1,2")):
            work = m.Spec("all_reduce", 0, 10, 6, layout=layout)
            if listed:
                work = m.Spec("all_reduce", 0, 0, 0, parts=(m.Part(10, 6, "w", layout),))
            run.say(conn, m.StartVote(2, 0, work))
        error = run.last(b"1")
        assert isinstance(error, m.CallError) and error.cause == m.Cause.MISMATCH
        assert "6 elements of float32 (2x3 with strides 1,2)" in error.why
        assert "have all call it with c = x.contiguous()" in error.why


def test_a_peer_given_up_before_the_restart_is_refused() -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 4, frozenset((1,))), secret=b"s")
    run.perform(run.master.feed(Resume(b"late", resume(2), "10.0.0.1")))
    refused = run.last(b"late")
    assert isinstance(refused, m.Refused)
    assert refused.result == Result.RANK_CONNECTION_FAILED.value
    assert "given up as lost" in refused.why


def test_returning_peers_know_more_than_an_incomplete_journal() -> None:
    infos = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    for accepted in (frozenset((1,)), frozenset[int]()):
        run = ManualRun(0)
        behind = Journal(5, 1, 2, accepted, complete=False)
        run.master = Master(1, combine, journal=behind, secret=b"s")
        for number in (1, 2):
            back = resume(number, known=infos)
            run.perform(run.master.feed(Resume(b"%d" % number, back, "10.0.0.1")))
        for now_s in (0.0, 60.0):
            run.perform(run.master.feed(Tick(now_s)))
        assert run.master.peers.keys() == {1, 2}
        assert all(peer.accepted for peer in run.master.peers.values())


def test_a_peer_that_comes_back_too_late_is_refused() -> None:
    infos = [m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2)]
    run = ManualRun(0)
    run.master = Master(1, combine, secret=b"s")
    late = resume(2, known=tuple(infos), epoch=3)
    run.perform(run.master.feed(Resume(b"late", late, "10.0.0.1")))
    run.perform(run.master.feed(Resume(b"one", resume(1, known=(infos[0],), epoch=4), "10.0.0.1")))
    for now_s in (0.0, 60.0):
        run.perform(run.master.feed(Tick(now_s)))
    assert isinstance(run.last(b"late"), m.Refused)
    assert sorted(run.master.peers) == [1]


# ---- who comes and goes ----


def test_rounds_of_the_topology_are_counted() -> None:
    run = ManualRun(2)
    for call in (2, 3, 4):
        run.everyone(m.TopologyVote(call))
        assert run.last(b"1") == run.last(b"2") == m.TopologyResult(call, call)


def test_who_is_pending_is_admitted_when_the_last_peer_is_gone() -> None:
    run = ManualRun(1)
    run.join(b"2")
    assert isinstance(run.last(b"2"), m.Welcome)
    run.say(b"1", m.Leave())
    assert isinstance(run.last(b"2"), m.Admitted)
    assert run.notes[-2:] == [
        "peer 1 (10.0.0.1:1): it left; 0 peers now",
        "joined: peer 2 (10.0.0.1:1); 1 peer now",
    ]


def test_the_others_are_told_whether_a_peer_left_or_was_lost() -> None:
    run = ManualRun(3)
    run.say(b"3", m.Leave())
    run.perform(run.master.feed(Disconnected((b"2",), "its connection broke")))
    gone = [one for told in run.told[b"1"] if isinstance(told, m.Plan) for one in told.gone]
    assert gone == [m.Gone(3, "it left", True), m.Gone(2, "its connection broke", False)]
    assert run.notes[-1] == "lost: peer 2 (10.0.0.1:1): its connection broke; 1 peer now"


# ---- why a collective fails ----


def told_of_failure(run: ManualRun, conn: bytes) -> tuple[m.Cause, str]:
    finished = run.last(conn)
    assert isinstance(finished, m.Finished)
    assert not finished.ok
    return m.Cause(finished.cause), finished.why


def test_all_peers_get_the_cause_of_a_failure() -> None:
    run = ManualRun(3)
    for cause in (*m.Cause, 99):
        seq = run.start()
        run.say(b"2", m.FinishVote(seq, False, "it was like this", cause))
        for conn in (b"1", b"3"):  # what they give up for is what they were told
            run.say(conn, m.FinishVote(seq, False, "interrupted", m.Cause.OTHER))
        expected = cause if cause in (m.Cause.TIMEOUT, m.Cause.MEMORY) else m.Cause.OTHER
        for conn in (b"1", b"2", b"3"):
            told, why = told_of_failure(run, conn)
            assert told is m.Cause(expected)
            assert "peer 2 (10.0.0.1:1) could not complete: it was like this" in why


def test_all_peers_get_the_causes_timeout_and_loss() -> None:
    run = ManualRun(3)
    seq = run.start()
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"1", m.Withdraw(2, seq))
    for conn in (b"2", b"3"):
        run.say(conn, m.FinishVote(seq, False))
    assert told_of_failure(run, b"3")[0] is m.Cause.TIMEOUT
    assert "peer 1 (10.0.0.1:1) waited no longer for" in told_of_failure(run, b"3")[1]
    seq = run.start()
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"1", m.Withdraw(2, seq, abandoned=True))
    for conn in (b"2", b"3"):
        run.say(conn, m.FinishVote(seq, False))
    assert told_of_failure(run, b"3")[0] is m.Cause.OTHER
    assert "has left by an exception" in told_of_failure(run, b"3")[1]
    seq = run.start()
    run.perform(run.master.feed(Disconnected((b"3",), "its connection broke")))
    for conn in (b"1", b"2"):
        run.say(conn, m.FinishVote(seq, False))
    assert told_of_failure(run, b"1")[0] is m.Cause.OTHER


def running_peer() -> Peer:
    """A peer in a collective, which is its call 2 and seq 9."""
    machine = member()
    machine.collective(Collective(2, 0, WORK))
    machine.received(m.Started(2, 9, 1))
    return machine


def end(machine: Peer, cause: m.Cause) -> Fail:
    machine.received(m.Interrupt(9, "why"))
    machine.received(m.Finished(9, False, "why", cause))
    fail = machine.engine_settled(2, 0, 0)[-1]
    assert isinstance(fail, Fail)
    expected = Result.TIMEOUT if fail.fault is Fault.TIMEOUT else Result.RANK_CONNECTION_LOST
    assert fail.result is expected
    return fail


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        (m.Cause.OTHER, Fault.PEER_LOST),
        (m.Cause.TIMEOUT, Fault.TIMEOUT),
        (m.Cause.MEMORY, Fault.OTHER),
    ],
)
def test_the_fault_of_another_peer_is_an_error_that_fits_and_the_call_may_be_made_again(
    cause: m.Cause, fault: Fault
) -> None:
    fail = end(running_peer(), cause)
    assert fail.fault is fault
    assert fail.again


def test_a_peer_that_ran_out_of_memory_or_time_does_not_try_again() -> None:
    machine = running_peer()
    said = machine.engine_failed(2, "no memory for a message", 0, m.Cause.MEMORY)[-1]
    assert isinstance(said, Send)
    assert said.message == m.FinishVote(
        9, False, "it ran out of memory: no memory for a message", m.Cause.MEMORY
    )
    fail = end(machine, m.Cause.MEMORY)
    assert fail.fault is Fault.OTHER and not fail.again
    machine = running_peer()
    machine.time_out(2, "its time is up")
    fail = end(machine, m.Cause.OTHER)  # somebody was lost before the master heard of it
    assert fail.fault is Fault.TIMEOUT and not fail.again


def test_stragglers_are_peers_that_others_wait_for() -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, 5.0, secret=b"s")
    for conn in (b"1", b"2", b"3"):
        run.join(conn)
    run.say(b"1", m.TopologyVote(1))
    for conn in (b"1", b"3"):
        run.say(conn, m.StartVote(2, 0, WORK))
    for now_s in (0.0, 4.0, 6.0):
        assert sorted(run.master.peers) == [1, 2, 3]
        run.perform(run.master.feed(Tick(now_s)))
    assert sorted(run.master.peers) == [1, 3]


def test_a_small_result_is_stable_when_all_have_heard_of_it() -> None:
    run = ManualRun(2)

    def reduce(*heard: int) -> m.Started:
        for conn, seq in zip((b"1", b"2"), heard, strict=True):
            run.say(conn, m.StartVote(2, 0, m.Spec("all_reduce", 0, 0, 4), b"abcd", seq))
        started = run.last(b"1")
        assert isinstance(started, m.Started)
        return started

    first = reduce(0, 0)
    assert first.stable == 0
    second = reduce(first.seq, 0)
    assert second.stable == 0
    assert reduce(second.seq, first.seq).stable == first.seq


def test_the_error_of_an_engine_reaches_the_other_peers() -> None:
    machine = member()
    machine.collective(Collective(2, 0, WORK))
    machine.engine_failed(2, "no memory for 7 arrays")
    said = [a.message for a in machine.received(m.Started(2, 9, 1)) if isinstance(a, Send)]
    assert said == [m.FinishVote(9, False, "no memory for 7 arrays")]


# ---- optimize_topology ----


class MeasuredRun(ManualRun):
    """Peers on different machines that measure links."""

    def __init__(self, groups: str) -> None:
        super().__init__(0)
        for number, group in enumerate(groups, 1):
            self.join(b"%d" % number, group=int(group), machine=f"m{number}")
        self.everyone(m.TopologyVote(1))

    def everyone(self, message: m.PeerMessage) -> None:
        accepted = [peer.conn for peer in self.master.peers.values() if peer.accepted]
        for conn in accepted:
            self.say(conn, message)

    def probes(self) -> dict[int, m.Probe]:
        """The last probe of each peer, by its number."""
        found = {}
        for number, peer in self.master.peers.items():
            told = [t for t in self.told[peer.conn] if isinstance(t, m.Probe)]
            if told:
                found[number] = told[-1]
        return found

    def pairs(self) -> set[frozenset[int]]:
        """The pairs of peers that are being measured."""
        return {frozenset((number, *probe.peers)) for number, probe in self.probes().items()}

    def measure(self, *slow: int, together: int = 10**8) -> int:
        """All that is to be measured is, and fast but between `slow`; the number of slots.

        `together`: what reaches a peer of all others at once.
        """
        seqs: set[int] = set()
        while self.master.run.optimizations.current is not None:
            seq = self.master.run.optimizations.current.seq
            seqs.add(seq)
            for number, probe in self.probes().items():
                if probe.seq == seq:
                    rate = 10**8 if len(probe.peers) == 1 else together
                    rate = 1000 if {number, *probe.peers} == set(slow) else rate
                    self.say(self.master.peers[number].conn, m.Measured(seq, rate, 1000))
        return len(seqs)

    def rings(self, conn: bytes) -> tuple[m.Ring, ...]:
        """The rings that a peer was told of last."""
        return [told.rings for told in self.told[conn] if isinstance(told, m.Plan)][-1]

    def order(self, conn: bytes) -> tuple[int, ...]:
        """The only ring that a peer was told of last."""
        (ring,) = self.rings(conn)
        return ring.order


def test_the_ring_avoids_a_slow_link_also_after_a_loss() -> None:
    run = MeasuredRun("0000")
    run.everyone(m.OptimizeVote(7))
    assert run.pairs() == {frozenset((1, 4)), frozenset((2, 3))}
    assert run.measure(2, 3) == 4
    assert isinstance(run.last(b"1"), m.OptimizeResult)
    assert run.order(b"1") == run.order(b"4") == (1, 2, 4, 3)
    (chosen,) = (note for note in run.notes if note.startswith("the rings of group 0 are"))
    assert chosen.startswith("the rings of group 0 are 1 -> 2 -> 4 -> 3 (weight ")
    assert "carries 800 Mbit/s" in chosen
    run.join(b"5", machine="m5")
    run.everyone(m.TopologyVote(8))
    assert run.order(b"5") == (1, 2, 4, 3, 5)
    run.perform(run.master.feed(Disconnected((b"2",), "its connection broke")))
    assert run.order(b"5") == (1, 4, 3, 5)


def test_links_that_carry_more_together_get_several_rings() -> None:
    run = MeasuredRun("0000")
    run.everyone(m.OptimizeVote(7))
    assert run.measure(together=3 * 10**8) == 4
    rings = run.rings(b"1")
    assert len(rings) == 6
    assert {ring.weight for ring in rings} == {rings[0].weight}
    run.join(b"5", machine="m5")
    run.everyone(m.TopologyVote(8))
    assert all(sorted(ring.order) == [1, 2, 3, 4, 5] for ring in run.rings(b"5"))
    run.perform(run.master.feed(Disconnected((b"2",), "its connection broke")))
    assert len({ring.order for ring in run.rings(b"1")}) == len(run.rings(b"1")) > 1


def test_groups_are_measured_at_the_same_time_and_only_within() -> None:
    run = MeasuredRun("01010")
    run.everyone(m.OptimizeVote(7))
    assert frozenset((2, 4)) in run.pairs()
    assert len(run.pairs()) == 2
    assert run.measure(1, 3) == 4
    assert run.master.run.groups[1].rates.keys() == {(2, 4), (4, 2)}


def test_peers_of_one_machine_are_not_measured() -> None:
    run = MeasuredRun("0")
    for conn in (b"2", b"3"):
        run.join(conn, machine="m1", ipc="/tmp/x")
    run.everyone(m.TopologyVote(1))
    run.everyone(m.OptimizeVote(7))
    assert run.pairs() in ({frozenset((1, 2))}, {frozenset((1, 3))})
    assert run.measure() == 3


def test_measurements_of_a_lost_peer_are_not_waited_for() -> None:
    run = MeasuredRun("0000")
    run.everyone(m.OptimizeVote(7))
    probes = run.probes()
    run.say(b"2", m.Measured(probes[2].seq, 1, 1))
    run.say(b"3", m.Measured(probes[3].seq, 1, 1))
    assert run.probes() == probes
    run.perform(run.master.feed(Disconnected((b"4",), "its connection broke")))
    after = run.probes()
    assert after[1].seq > probes[1].seq
    run.say(b"1", m.Measured(probes[1].seq, 1, 1))  # it was on its way
    assert 1 in run.master.run.optimizations.current.measuring  # type: ignore[union-attr]
    assert run.measure() >= 1
    for conn in (b"1", b"2", b"3"):
        assert isinstance(run.last(conn), m.OptimizeResult)


def test_the_last_vote_is_not_waited_for_when_its_peer_leaves() -> None:
    run = MeasuredRun("000")
    run.say(b"1", m.OptimizeVote(7))
    run.say(b"3", m.OptimizeVote(7))
    run.say(b"2", m.Leave())
    assert run.measure() == 1
    assert isinstance(run.last(b"3"), m.OptimizeResult)


def test_an_optimization_that_one_gives_up_fails_for_all() -> None:
    run = MeasuredRun("000")
    run.everyone(m.OptimizeVote(7))
    late = run.probes()[2]
    run.say(b"2", m.Withdraw(7))
    for conn in (b"1", b"2", b"3"):
        error = run.last(conn)
        assert isinstance(error, m.CallError)
        assert Result(error.result) is Result.TIMEOUT
        assert "peer 2 (10.0.0.1:1) waited no longer" in error.why
    run.say(b"2", m.Measured(late.seq, 1, 1))  # it was on its way
    assert sorted(run.master.peers) == [1, 2, 3]
    run.everyone(m.OptimizeVote(8))
    assert run.measure() == 4


def test_a_peer_that_reports_an_unknown_measurement_is_dropped() -> None:
    run = MeasuredRun("000")
    run.everyone(m.OptimizeVote(7))
    run.say(b"1", m.Measured(10**6, 1, 1))
    assert sorted(run.master.peers) == [2, 3]
    assert run.measure() >= 1


def test_a_restarted_master_keeps_the_ring() -> None:
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", f"m{number}") for number in (1, 2, 3, 4))
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 5, frozenset((1, 2, 3, 4))), secret=b"s")
    for number in (1, 2, 3, 4):
        # 1 had not heard of the last plan
        rings = (m.Ring((1, 2, 3, 4) if number == 1 else (1, 3, 2, 4), 1),)
        known_by = resume(number, known=known, epoch=2 + (number > 1), rings=rings)
        run.perform(run.master.feed(Resume(b"%d" % number, known_by, "10.0.0.1")))
    plans = [told for told in run.told[b"1"] if isinstance(told, m.Plan)]
    assert plans[-1].rings[0].order == (1, 3, 2, 4)


def test_rings_that_no_message_could_carry_are_not_taken_up() -> None:
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", f"m{number}") for number in (1, 2))
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))), secret=b"s")
    heavy = (m.Ring((1, 9, 2), (1 << 32) - 1), m.Ring((1, 2), (1 << 32) - 1))
    liar = resume(1, known=known, epoch=9, rings=heavy)
    run.perform(run.master.feed(Resume(b"liar", liar, "10.0.0.1")))
    assert isinstance(run.last(b"liar"), m.Refused)


# ---- what strangers cannot know ----


def test_the_number_of_the_run_is_sent_on_admission_only() -> None:
    run = ManualRun(2)
    run.join(b"stranger")
    commit(run)
    run.perform(run.master.feed(Farewell()))
    told = b"".join(m.encode(each) for each in run.told[b"stranger"])
    assert len(run.told[b"stranger"]) == 2  # Welcome and Kicked
    assert RUN.to_bytes(8) not in told
    assert str(RUN).encode() not in told
    assert any(each == m.Admitted(RUN, m.Done()) for each in run.told[b"1"])


def test_a_peer_must_know_the_runs_number_to_come_back() -> None:
    for journaled in (True, False):
        run = ManualRun(0)
        expected = Journal(RUN, 1, 3, frozenset((1, 2))) if journaled else None
        run.master = Master(1, combine, journal=expected, secret=b"s")
        known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
        for guess in (0, 1, RUN - 1):
            conn = b"%d guesses" % guess
            run.perform(run.master.feed(Resume(conn, resume(2, run=guess), "10.0.0.1")))
        for number in (1, 2):
            back = resume(number, run=RUN, known=known)
            run.perform(run.master.feed(Resume(b"%d" % number, back, "10.0.0.1")))
        for now_s in (0.0, 2.0):
            run.perform(run.master.feed(Tick(now_s)))
        assert sorted(run.master.peers) == [1, 2]
        for guess in (0, 1, RUN - 1):
            refused = run.last(b"%d guesses" % guess)
            assert isinstance(refused, m.Refused)
            assert "another" in refused.why


def nonces(run: ManualRun) -> tuple[set[int], set[int]]:
    """All that a peer was told: of epochs, and of calls."""
    run.start()
    run.everyone(m.FinishVote(run.start(), False))
    run.everyone(m.OptimizeVote(9))
    run.say(b"3", m.Leave())
    for number, manifest in enumerate((m.Manifest(0, 0, (ENTRY,)), m.Manifest(1, 0, (ENTRY,))), 1):
        run.say(b"%d" % number, m.SyncVote(5, manifest))
    told = run.told[b"1"]
    calls = [t.nonce for t in told if isinstance(t, m.Started | m.SyncPlan | m.Probe)]
    epochs = [t.nonce for t in told if isinstance(t, m.Plan)]
    assert len(calls) >= 3
    assert len(epochs) >= 3
    assert len({*calls, *epochs}) == len(calls) + len(epochs)
    return set(epochs), set(calls)


def test_nonces_do_not_repeat_and_depend_on_the_masters_secret() -> None:
    first, second = ManualRun(0), ManualRun(0)
    for run, secret in ((first, b"one"), (second, b"another")):
        run.master = Master(RUN, combine, secret=secret)
        for conn in (b"1", b"2", b"3"):
            run.join(conn, machine=conn.decode())
        run.say(b"1", m.TopologyVote(1))
    for mine, theirs in zip(nonces(first), nonces(second), strict=True):
        assert not mine & theirs
        assert max(mine | theirs) > 1 << 56


def answers(run: ManualRun, conn: bytes) -> list[bool]:
    return [told.pending for told in run.told[conn] if isinstance(told, m.PendingResult)]


def test_patient_peers_hear_whether_peers_are_pending_when_one_is() -> None:
    run = ManualRun(2)
    run.everyone(m.PendingVote(5, patient=True))
    assert answers(run, b"1") == answers(run, b"2") == []
    run.join(b"3")
    assert answers(run, b"1") == answers(run, b"2") == [True]


def test_one_caller_in_a_hurry_is_enough_for_an_answer() -> None:
    run = ManualRun(2)
    run.say(b"1", m.PendingVote(5, patient=True))
    run.say(b"2", m.PendingVote(5))
    assert answers(run, b"1") == answers(run, b"2") == [False]
    run.everyone(m.PendingVote(6, patient=True))
    run.say(b"2", m.Hurry(5))  # of a call that has been answered
    assert answers(run, b"1") == [False]
    run.say(b"2", m.Hurry(6))
    assert answers(run, b"1") == answers(run, b"2") == [False, False]
    run.say(b"2", m.Hurry(6))
    assert sorted(run.master.peers) == [1, 2]


def test_a_loss_does_not_end_patience() -> None:
    run = ManualRun(3)
    run.everyone(m.PendingVote(5, patient=True))
    run.say(b"3", m.Leave())
    assert answers(run, b"1") == []
    run.join(b"4")
    assert answers(run, b"1") == [True]


def test_another_order_of_the_ring_is_an_error_without_a_loss() -> None:
    """Their rows would lie in another order than those of the others."""
    for rings, cause in (((5, 6), m.Cause.REORDERED), ((5, 5), m.Cause.REORDERED)):
        run = ManualRun()
        for conn, ring in zip((b"1", b"2"), rings, strict=True):
            run.say(
                conn,
                m.StartVote(2, 0, m.Spec("all_gather", 0, 10, 4, members=2, ring=ring)),
            )
        for conn in (b"1", b"2"):
            error = run.last(conn)
            assert isinstance(error, m.CallError) and error.cause == cause
            assert error.result == Result.RANK_CONNECTION_LOST.value
    run = ManualRun()
    for conn, members in ((b"1", 2), (b"2", 3)):
        run.say(
            conn,
            m.StartVote(2, 0, m.Spec("all_gather", 0, 10, 4, members=members, ring=5)),
        )
    error = run.last(b"1")
    assert isinstance(error, m.CallError) and error.cause == m.Cause.OTHER


def test_a_peer_that_withdraws_from_one_of_two_calls_may_block_others() -> None:
    """While it stood in both, the others' call could end first."""
    run = ManualRun(2)
    run.say(b"1", m.PendingVote(2, patient=True))
    run.say(b"2", m.PendingVote(2, patient=True))
    run.say(b"2", m.OptimizeVote(3))

    run.say(b"2", m.Withdraw(2))
    for conn in (b"1", b"2"):
        error = run.last(conn)
        assert isinstance(error, m.CallError), error
        assert "calls that can never meet" in error.why
