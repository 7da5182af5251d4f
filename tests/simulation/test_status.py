"""The status of a run: each wait, the missing peers, the time; and no secrets."""

from __future__ import annotations

import msgspec
from simulation.manual import ENTRY, OTHER, RUN, SECRET, WORK, ManualRun, resume

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master, Status
from pccl.protocol.master.inputs import Disconnected, Resume
from pccl.protocol.master.status import (
    CALLS_MAX,
    MISSING_MAX,
    WAITS_MAX,
    GroupStatus,
    PeerStatus,
    Phase,
    WaitStatus,
    explain,
)
from pccl.protocol.master.tally import BOUNDS_S, Loss
from pccl.protocol.rounds import Kind
from pccl.runtime.inline_collectives import combine

CALL = "all_reduce(1000 elements of float32, sum) with tag 0"


def status(run: ManualRun) -> Status:
    """The status as a client decodes it."""
    encoded = msgspec.json.encode(run.master.status())
    assert msgspec.json.decode(encoded, type=Status) == run.master.status()
    return run.master.status()


def only_wait(run: ManualRun) -> WaitStatus:
    (wait,) = status(run).waits
    return wait


def at(run: ManualRun, now_s: float, conn: bytes, message: m.PeerMessage) -> None:
    run.master.now_s = now_s
    run.say(conn, message)


def start(tag: int = 0) -> m.StartVote:
    return m.StartVote(2 + tag, tag, WORK)


def test_an_idle_run() -> None:
    run = ManualRun(2)
    run.master.now_s = 7.5
    shown = status(run)
    assert not (shown.recovering or shown.awaited or shown.waits or shown.waits_left_out)
    assert shown.peers == tuple(
        PeerStatus(number, "10.0.0.1", 1, 0, True, 7.5, 7.5, False, ()) for number in (1, 2)
    )
    (group,) = shown.groups
    assert isinstance(group, GroupStatus)
    assert (group.size, group.running, group.revision, group.holders) == (2, 0, None, 0)
    assert [sorted(ring.order) for ring in group.rings] == [[1, 2]]
    assert group.epoch == run.master.run.groups[0].epoch
    assert shown.counts.joined == 2


def test_the_status_shows_missing_peers_and_since_when() -> None:
    run = ManualRun(3)
    at(run, 10.0, b"1", start())
    at(run, 12.0, b"2", start())
    run.master.now_s = 22.5
    why = "peer 3 (10.0.0.1:1) must enter it"
    assert only_wait(run) == WaitStatus(CALL, 0, Phase.ENTERING, 12.5, 2, (3,), 1, why)
    calls = {peer.peer: [(c.call, c.waited_s) for c in peer.calls] for peer in status(run).peers}
    assert calls == {1: [(CALL, 12.5)], 2: [(CALL, 10.5)], 3: []}
    assert [peer.silent_s for peer in status(run).peers] == [12.5, 10.5, 22.5]
    at(run, 22.5, b"3", m.PendingVote(9))
    first, second = status(run).waits
    assert first.why == why + "; peer 3 (10.0.0.1:1) is in are_peers_pending()"
    assert second.missing == (1, 2) and second.group is None and second.waited_s == 0.0


def test_each_call_of_a_peer_has_its_own_explanation() -> None:
    run = ManualRun(6)
    for tag, call in enumerate((2, 3, 4)):
        run.say(b"1", m.StartVote(call, tag, WORK))
    for tag in range(3):
        why = explain(run.master.run, 1, 2 + tag, 0)
        assert why.startswith(f"in all_reduce(1000 elements of float32, sum) with tag {tag}: ")
    assert explain(run.master.run, 1, 5, 0) == "", "its answer is on the way"
    other = m.Spec("all_reduce", 0, 10, 7)
    run.say(b"2", m.StartVote(2, 0, other))
    calls = {peer.peer: [call.call for call in peer.calls] for peer in status(run).peers}
    assert calls[1][0] == CALL and calls[2] == [CALL.replace("1000", "7")]
    for conn in (b"3", b"4", b"5"):
        run.say(conn, m.PendingVote(9))
    assert "are_peers_pending()" in explain(run.master.run, 1, 2, 0)
    run.say(b"3", m.StartVote(2, 7, WORK))
    assert explain(run.master.run, 1, 2, 0).count("; peer ") == 3, "of four"
    run.say(b"3", m.Withdraw(2))
    assert explain(run.master.run, 1, 2, 0).count(" is in are_peers_pending()") == 3


def test_a_question_for_newcomers_that_all_have_asked() -> None:
    run = ManualRun(2)
    run.say(b"1", m.PendingVote(9, patient=True))
    assert only_wait(run).why == "peer 2 (10.0.0.1:1) must enter it"
    run.say(b"2", m.PendingVote(9, patient=True))
    assert only_wait(run).why == "another peer must join the run, which has 2"
    run.say(b"2", m.Leave())
    why = "another peer must join the run, which has 1 and had 1 more: if the training is over, "
    assert only_wait(run).why == why + "end this program"


def test_a_collective_that_has_started_and_its_outcome() -> None:
    run = ManualRun(3)
    for conn, now_s in ((b"1", 1.0), (b"3", 2.0), (b"2", 5.0)):
        at(run, now_s, conn, start())
    run.master.now_s = 6.0
    wait = only_wait(run)
    assert (wait.call, wait.phase, wait.waited_s, wait.entered) == (CALL, Phase.RUNNING, 1.0, 3)
    assert wait.missing == (1, 2, 3) and wait.missing_count == 3
    (one,) = {peer.calls for peer in status(run).peers}
    assert [(call.phase, call.waited_s) for call in one] == [(Phase.RUNNING, 1.0)]
    assert status(run).groups[0].running == 1
    seq = run.master.run.numbers.next_seq - 1
    run.say(b"1", m.FinishVote(seq, True))
    run.say(b"3", m.FinishVote(seq, True))
    assert only_wait(run).why == "peer 2 (10.0.0.1:1) must finish it"
    assert (status(run).counts.committed, status(run).counts.aborted) == (0, 0)
    run.say(b"2", m.FinishVote(seq, True))
    assert not status(run).waits and status(run).counts.committed == 1
    seq = run.start()
    run.everyone(m.FinishVote(seq, False, "no memory"))
    assert (status(run).counts.committed, status(run).counts.aborted) == (1, 1)
    small = m.Spec("all_reduce", 0, 0, 4)
    run.everyone(m.StartVote(9, 0, small, b"\1\2\3\4"))  # it is over when all have voted
    assert not status(run).waits and status(run).counts.committed == 2


def test_progress_of_the_missing_peers() -> None:
    run = ManualRun(4)
    seq = run.start()
    assert only_wait(run).done is None and only_wait(run).why.endswith(" must finish it")
    for conn, done in ((b"1", 990), (b"2", 120), (b"3", 125), (b"2", 130), (b"4", 500)):
        run.say(conn, m.Progress(seq, done))
    wait = only_wait(run)
    told = "peer 3 has 12.5 % of it; peer 2 has 13 % of it; peer 4 has 50 % of it"
    assert wait.done == 0.125 and wait.why.endswith(f" must finish it; {told}")
    calls = {peer.peer: peer.calls[0].done for peer in status(run).peers}
    assert calls == {1: 0.99, 2: 0.13, 3: 0.125, 4: 0.5}
    run.say(b"3", m.FinishVote(seq, True))
    run.say(b"3", m.Progress(seq, 700))  # it has crossed its own vote
    assert only_wait(run).done == 0.13 and status(run).peers[2].calls[0].done is None
    assert not run.dropped
    for conn in (b"1", b"2", b"4"):
        run.say(conn, m.FinishVote(seq, True))
    run.say(b"1", m.Progress(seq, 999))
    assert not status(run).waits and not run.dropped
    run.say(b"1", m.Progress(seq + 1, 1))
    assert "Progress out of turn" in run.dropped[b"1"]


def test_how_far_receivers_of_shared_state_are() -> None:
    run = ManualRun(3)
    run.say(b"1", m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    run.say(b"2", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    run.say(b"3", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    seq = run.master.run.numbers.next_seq - 1
    run.say(b"2", m.Progress(seq, 400))
    run.say(b"1", m.Progress(seq, 400))  # which receives nothing
    wait = only_wait(run)
    assert wait.done == 0.4 and wait.why.endswith(" must receive it; peer 2 has 40 % of it")
    run.perform(run.master.feed(Disconnected((b"3",), "it broke")))
    assert only_wait(run).done is None, "the next plan begins anew"


def test_the_wait_of_a_newcomer_names_the_admitting_peers() -> None:
    run = ManualRun(3)
    run.master.now_s = 3.0
    run.join(b"4")
    at(run, 4.0, b"2", m.TopologyVote(5))
    run.master.now_s = 13.0
    update, admission = status(run).waits
    assert (update.call, update.missing, update.waited_s) == ("update_topology()", (1, 3), 9.0)
    assert (admission.call, admission.phase) == ("connect()", Phase.ADMISSION)
    assert (admission.entered, admission.missing, admission.waited_s) == (1, (1, 3), 10.0)
    must = "peer 1 (10.0.0.1:1), peer 3 (10.0.0.1:1) must call update_topology()"
    assert admission.why.startswith(must)
    (newcomer,) = (peer for peer in status(run).peers if not peer.accepted)
    assert newcomer.peer == 4 and newcomer.calls[0].waited_s == 10.0
    assert sum(group.size for group in status(run).groups) == 3
    at(run, 14.0, b"2", m.Withdraw(5))
    assert status(run).waits[0].missing == (1, 2, 3)  # no peer is in that round now


def test_shared_state() -> None:
    run = ManualRun(2)
    at(run, 1.0, b"1", m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    at(run, 3.0, b"2", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    run.master.now_s = 4.0
    wait = only_wait(run)
    assert (wait.call, wait.phase) == ("sync_shared_state()", Phase.RECEIVING)
    assert (wait.waited_s, wait.entered, wait.missing) == (3.0, 2, (2,))
    assert wait.why == "peer 2 (10.0.0.1:1) must receive it"
    assert status(run).groups[0].synchronizing
    run.say(b"2", m.FetchedVote(run.master.run.numbers.next_seq - 1, True))
    (group,) = status(run).groups
    assert (group.revision, group.holders, group.synchronizing) == (1, 2, False)
    assert all(peer.synchronized for peer in status(run).peers)
    run.join(b"3")
    run.everyone(m.TopologyVote(3))
    assert [peer.synchronized for peer in status(run).peers] == [True, True, False]


def test_links_that_are_measured() -> None:
    run = ManualRun(1)
    run.join(b"2", machine="y", host="10.0.0.2")
    run.say(b"1", m.TopologyVote(1))
    at(run, 2.0, b"1", m.OptimizeVote(2))
    at(run, 5.0, b"2", m.OptimizeVote(2))
    run.master.now_s = 6.0
    wait = only_wait(run)
    assert (wait.call, wait.phase, wait.waited_s) == ("optimize_topology()", Phase.MEASURING, 1.0)
    assert wait.missing == (1, 2) and wait.why.endswith("measure links")
    assert all(peer.calls[0].phase is Phase.MEASURING for peer in status(run).peers)
    assert [ring.rates for ring in status(run).groups[0].rings] == [(None, None)]
    seq = run.master.run.numbers.next_seq - 1
    run.say(b"1", m.Measured(seq, 10_000_000, 100))  # of what comes from 2
    run.say(b"2", m.Measured(seq, 20_000_000, 100))
    (ring,) = status(run).groups[0].rings
    assert (ring.order, ring.rates) == ((1, 2), (20_000_000, 10_000_000))
    run.join(b"3", machine="z", host="10.0.0.3")
    run.say(b"1", m.TopologyVote(3))
    run.say(b"2", m.TopologyVote(3))
    (ring,) = status(run).groups[0].rings
    assert sorted(map(str, ring.rates)) == ["20000000", "None", "None"]  # 1 -> 2 -> 3 -> 1


def test_counts_of_joins_and_losses() -> None:
    run = ManualRun(6)
    run.say(b"1", m.Leave())
    run.perform(run.master.feed(Disconnected((b"2", b"3"), "it broke")))
    run.say(b"4", m.FinishVote(999, True))  # out of turn
    counts = status(run).counts
    assert counts.joined == 6
    assert counts.lost == {Loss.LEFT: 1, Loss.DISCONNECTED: 2, Loss.DISMISSED: 1}


def test_how_long_the_first_voter_waited_for_the_last_one() -> None:
    run = ManualRun(2)
    for first_s, last_s in ((1.0, 1.0), (2.0, 2.25), (3.0, 1003.0)):
        at(run, first_s, b"1", m.TopologyVote(2))
        at(run, last_s, b"2", m.TopologyVote(2))
    waited = status(run).counts.votes[Kind.TOPOLOGY]
    assert waited.total_s == 1000.25
    assert len(waited.counts) == len(BOUNDS_S) + 1
    assert waited.counts[0] == 1 + 1  # that of the run, too
    assert waited.counts[BOUNDS_S.index(0.5)] == 1 and waited.counts[-1] == 1
    taken = status(run)
    run.everyone(m.TopologyVote(3))
    assert sum(taken.counts.votes[Kind.TOPOLOGY].counts) == 4, "a snapshot does not change"


def test_the_oldest_of_very_many_calls_are_shown() -> None:
    run = ManualRun(MISSING_MAX + 10)
    for tag in range(WAITS_MAX + 5):
        run.say(b"1", start(tag))
    shown = status(run)
    assert len(shown.waits) == WAITS_MAX and shown.waits_left_out == 5
    assert shown.waits[0].call.endswith("tag 0")
    assert len(shown.waits[0].missing) == MISSING_MAX
    assert shown.waits[0].missing_count == MISSING_MAX + 9
    assert len(shown.peers[0].calls) == CALLS_MAX


def test_secrets_are_not_shown_and_all_texts_can_be_printed() -> None:
    run = ManualRun(2)
    hidden = {"ipc": "a-socket-file", "machine": "its-machine", "curve": "", "dial": "its-password"}
    run.join(b"3", **hidden)
    run.say(b"1", m.TopologyVote(1))
    run.say(b"2", m.TopologyVote(1))
    run.start()
    odd = m.Spec("all_reduce", 0, 10, 1000, layout="\x1b[2J\r\n\u202e" + "x" * 4000)
    run.say(b"1", m.StartVote(3, 1, odd))
    text = msgspec.json.encode(run.master.status()).decode()
    numbers = run.master.run.numbers
    nonces = [numbers.nonce("call", seq) for seq in range(numbers.next_seq)]
    nonces += [numbers.nonce("epoch", epoch) for epoch in range(numbers.epoch + 1)]
    secrets = [RUN, SECRET.decode(), *hidden.values(), *nonces]
    assert [one for one in secrets if one != "" and str(one) in text] == []
    assert text.isprintable() and "\\u" not in text and len(text) < 12_000


def test_a_restarted_master_reports_the_peers_it_waits_for() -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))), secret=b"s")
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    open_ = (m.Open(3, (1, 2), None),)
    back = {number: resume(number, known=known, open=open_) for number in (1, 2)}
    run.perform(run.master.feed(Resume(b"1", back[1], "10.0.0.1")))
    assert status(run).recovering and status(run).awaited == (2,)
    run.master.now_s = 50.0
    run.perform(run.master.feed(Resume(b"2", back[2], "10.0.0.1")))
    run.master.now_s = 51.0
    shown = status(run)
    assert not shown.recovering
    assert [peer.here_s for peer in shown.peers] == [1.0, 1.0]
    (wait,) = shown.waits
    assert (wait.phase, wait.missing, wait.waited_s) == (Phase.RUNNING, (1, 2), 1.0)
