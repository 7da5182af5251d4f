"""Strangers that send arbitrary messages harm only themselves; without sockets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.hostile import Blow, draw_script, hostile_run, pack, unpack
from simulation.manual import ENTRY, OTHER, RUN, WORK, ManualRun, resume
from simulation.run import remembered
from simulation.seeds import parts

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master
from pccl.protocol.master.inputs import Disconnected, Resume
from pccl.protocol.master.restart import BACKLOG_MAX
from pccl.protocol.master.voting import held
from pccl.protocol.rounds import HELD_MAX, OPEN_MAX
from pccl.runtime.inline_collectives import combine
from pccl.types import Result

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CORPUS = sorted((SUPPORT / "fuzz" / "corpus").iterdir())


@parts(600, 200, 50)
def test_no_siege_does_harm(part: range) -> None:
    for seed in part:
        try:
            hostile_run(draw_script(random.Random(seed)), seed)
        except BaseException:
            print(f"seed {seed}")
            raise


@settings(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(0, 1000))
def test_hypothesis_finds_no_harmful_siege(draw: random.Random, seed: int) -> None:
    hostile_run(draw_script(draw, blows=15), seed)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name[:8])
def test_an_input_of_the_fuzzer_stays_harmless(path: Path) -> None:
    hostile_run(unpack(path.read_bytes()))


def test_there_is_a_corpus() -> None:
    assert len(CORPUS) > 20
    assert sum(path.stat().st_size for path in CORPUS) < 200_000


@given(st.binary(max_size=300))
def test_any_bytes_are_a_script(data: bytes) -> None:
    unpack(data)


def test_a_script_survives_packing() -> None:
    script = draw_script(random.Random(1))
    assert unpack(pack(script)) == script
    assert unpack(pack([Blow(5, 200, b"x")])) == [Blow(5 % 3, 200 % 16, b"x")]


# ---- one rule at a time ----


def test_words_about_a_success_do_not_keep_a_failure_from_the_others() -> None:
    run = ManualRun(3)
    seq = run.start()
    run.say(b"1", m.FinishVote(seq, True, "by the way"))
    run.say(b"2", m.FinishVote(seq, False, "a stream was lost"))
    assert isinstance(run.last(b"3"), m.Interrupt)


@pytest.mark.parametrize("why", ["y" * 4096, "\U0010ffff" * 4096, "\x1b[31m\r\n" * 800])
def test_texts_of_peers_fit_the_messages_and_logs_that_quote_them(why: str) -> None:
    run = ManualRun(3)
    run.say(b"1", m.FinishVote(run.start(), False, why))
    interrupt = run.last(b"2")
    assert isinstance(interrupt, m.Interrupt)
    assert "peer 1 (10.0.0.1:1) could not complete" in interrupt.why
    assert interrupt.why.isprintable()
    assert len(interrupt.why) < 2100
    assert all(note.isprintable() for note in run.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "x" * 201},
        {"host": "10.0.0.1;10.0.0.2"},
        {"host": "a b"},
        {"host": "\U0010ffff"},
        {"ipc": "/" + "x" * 100},
        {"ipc": "a\0b"},
        {"machine": "\n"},
    ],
)
def test_an_invalid_address_is_refused(fields: dict[str, str]) -> None:
    run = ManualRun()
    run.join(b"stranger", **fields)
    refused = run.last(b"stranger")
    assert isinstance(refused, m.Refused)
    assert refused.result == Result.INVALID_USAGE.value
    assert b"stranger" in run.dropped
    assert len(run.master.peers) == 2


def test_one_peer_cannot_fill_the_master_with_rounds() -> None:
    run = ManualRun()
    for tag in range(OPEN_MAX + 1000):
        run.say(b"1", m.StartVote(tag, tag, WORK))
    assert remembered(run.master)["voting.open"] == OPEN_MAX
    refused = run.last(b"1")
    assert isinstance(refused, m.CallError)
    assert refused.result == Result.INVALID_USAGE.value
    run.say(b"2", m.StartVote(9, 0, WORK))  # other peers may still make calls
    assert isinstance(run.last(b"2"), m.Started)
    run.say(b"1", m.Leave())
    assert remembered(run.master)["voting.open"] == 0


def test_one_peer_cannot_fill_the_master_with_lists_of_tensors() -> None:
    run = ManualRun()
    parts = tuple(m.Part(10, index, "x" * 200) for index in range(20_000))
    work = m.Spec("all_reduce", 0, 0, 0, parts=parts)
    for tag in range(20):
        run.say(b"1", m.StartVote(tag, tag, work))
    rounds = run.master.run.voting.open
    assert len(rounds) == HELD_MAX // held(work) < 20
    refused = run.last(b"1")
    assert isinstance(refused, m.CallError)
    assert refused.result == Result.INVALID_USAGE.value
    assert "128 MiB" in refused.why
    run.say(b"2", m.StartVote(9, 0, work))  # one ends, so another one can start
    run.say(b"1", m.StartVote(99, 99, work))
    assert rounds.held(1) == len(rounds) * held(work) > HELD_MAX - held(work)
    run.say(b"1", m.Withdraw(99))
    run.say(b"1", m.Leave())
    assert rounds.held(1) == 0


def test_one_offer_cannot_fill_the_master() -> None:
    run = ManualRun()
    huge = m.Manifest(0, 0, (m.Entry("", 0, 0, False, b""),) * (HELD_MAX // 256 + 1))
    assert len(m.encode(m.SyncVote(2, huge))) < m.MESSAGE_BYTES_MAX
    run.say(b"1", m.SyncVote(2, huge))
    assert isinstance(run.last(b"1"), m.CallError)
    assert len(run.master.run.voting.open) == 0


def test_two_peers_cannot_fill_the_master_with_collectives() -> None:
    run = ManualRun()
    for tag in range(OPEN_MAX + 10):
        run.everyone(m.StartVote(tag + 9, tag, WORK))
    assert remembered(run.master)["table.running"] == OPEN_MAX
    seq = next(message.seq for message in run.told[b"1"] if isinstance(message, m.Started))
    run.everyone(m.FinishVote(seq, True))  # one ends, so another one can start
    run.everyone(m.StartVote(1 << 20, 1 << 20, WORK))
    assert isinstance(run.last(b"1"), m.Started)


def test_a_group_that_all_have_left_is_forgotten() -> None:
    run = ManualRun()
    for group in range(1, 100):
        run.join(b"stranger", group=group)
        run.everyone(m.TopologyVote(group))
        run.perform(run.master.feed(Disconnected((b"stranger",), "its connection broke")))
    assert remembered(run.master)["groups.groups"] == 1
    run.everyone(m.Leave())
    assert not any(remembered(run.master).values())


def test_epochs_are_not_used_twice_by_a_group_that_comes_again() -> None:
    epochs = []
    run = ManualRun(1)
    for _ in range(3):
        run.everyone(m.Leave())
        run.join(b"again")
        plans = [message for message in run.told[b"again"] if isinstance(message, m.Plan)]
        epochs.append(plans[-1].epoch)
    assert len(set(epochs)) == 3


def test_a_peer_in_a_synchronization_enters_no_other() -> None:
    run = ManualRun()
    run.say(b"1", m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    run.say(b"2", m.SyncVote(2, m.Manifest(0, 0, (OTHER,))))
    assert isinstance(run.last(b"2"), m.SyncPlan)
    run.say(b"2", m.SyncVote(3, m.Manifest(0, 0, (ENTRY,))))
    assert "out of turn" in run.dropped[b"2"]
    assert isinstance(run.last(b"1"), m.SyncResult)


def test_a_holder_that_serves_no_peer_is_dropped_before_its_receivers() -> None:
    run = ManualRun(4)
    for conn in (b"1", b"2", b"3"):
        run.say(conn, m.SyncVote(2, m.Manifest(1, 0, (ENTRY,))))
    run.say(b"4", m.SyncVote(2, m.Manifest(9, 0, (OTHER,))))
    while b"4" not in run.dropped:
        for conn in (b"1", b"2", b"3"):
            plan = run.last(conn)
            if isinstance(plan, m.SyncPlan) and plan.fetch:
                run.say(conn, m.FetchedVote(plan.seq, False, "wrong digest"))
        assert not run.dropped.keys() & {b"1", b"2", b"3"}
    assert isinstance(run.last(b"1"), m.SyncResult)


def test_many_different_peers_are_dropped_at_once() -> None:
    run = ManualRun(1000)
    for number, peer in list(run.master.peers.items()):
        entries = (ENTRY,) if number <= 501 else (ENTRY, OTHER)
        run.say(peer.conn, m.SyncVote(2, m.Manifest(0, 0, entries)))
    assert len(run.dropped) == 499
    assert isinstance(run.last(b"1"), m.SyncResult)


def test_an_error_that_names_a_thousand_peers_can_still_be_sent() -> None:
    run = ManualRun(1000)
    for i in range(1, 1000):
        run.say(b"%d" % i, m.StartVote(2, 0, WORK))
    run.say(b"1000", m.StartVote(2, 0, m.Spec("all_reduce", 0, 10, 7)))
    error = run.last(b"1000")
    assert isinstance(error, m.Kicked)
    assert "peer 1 (10.0.0.1:1) called all_reduce(1000 elements" in error.why
    assert "peer 1000 (10.0.0.1:1) called all_reduce(7 elements" in error.why
    run.say(b"1", m.StartVote(3, 0, WORK))
    run.say(b"1", m.Withdraw(3))
    error = run.last(b"1")
    assert isinstance(error, m.CallError)
    assert error.why.endswith("990 more")


# ---- while the master comes back ----


def test_messages_kept_during_a_recovery_are_limited() -> None:
    run = ManualRun()
    run.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))), secret=b"s")
    run.dropped.clear()
    kept = 0
    for i in range(100):
        run.say(b"stranger", m.SyncVote(i, m.Manifest(0, 0, (ENTRY,) * 1000)))
        kept += b"stranger" not in run.dropped
    assert run.master.recovering and kept == BACKLOG_MAX
    known = tuple(m.PeerInfo(number, 0, "10.0.0.1", 1, "", "x") for number in (1, 2))
    for number in (1, 2):
        back = resume(number, known=known)
        run.perform(run.master.feed(Resume(b"%d" % number, back, "10.0.0.1")))
    assert not run.master.recovering
    assert sorted(run.master.peers) == [1, 2]


def test_a_second_resume_on_one_connection_is_refused() -> None:
    run = ManualRun()
    run.perform(run.master.feed(Resume(b"2", resume(9, run=RUN), "10.0.0.1")))
    assert "came back twice" in run.dropped[b"2"]
    assert len(run.master.peers) == 1
    run.master = Master(1, combine, journal=Journal(5, 1, 3, frozenset((1, 2))), secret=b"s")
    for number in (1, 2):
        run.perform(run.master.feed(Resume(b"both", resume(number), "10.0.0.1")))
    assert isinstance(run.last(b"both"), m.Refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": (1 << 32) - 1},
        {"last_seq": (1 << 64) - 1},
        {"done": m.Done(topology=(1 << 64) - 1)},
        {"known": (m.PeerInfo((1 << 64) - 1, 0, "h", 1, "", "x"),)},
    ],
)
def test_a_resume_with_numbers_that_would_overflow_is_refused(fields: dict[str, object]) -> None:
    run = ManualRun(0)
    run.master = Master(1, combine, secret=b"s")
    run.perform(run.master.feed(Resume(b"stranger", resume(1, **fields), "10.0.0.1")))  # type: ignore[arg-type]
    assert "impossible numbers" in run.dropped[b"stranger"]
    assert not run.master.recovering
