"""An event log is enough to replay a master, and tells no secrets."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable

import msgspec
import pytest
from simulation import programs, recorded

from pccl.protocol import messages as m
from pccl.protocol.master import Journal, inputs
from pccl.protocol.master.effects import Adopt, Dial, Effect, Note, Remember, Send
from pccl.protocol.master.eventlog import (
    Differs,
    Gap,
    Line,
    Recorder,
    Replay,
    Told,
    difference,
    refill,
)
from pccl.types import CollectiveKind

SEEDS = 20
DIALS = 52  # a seed whose master dials a peer
CURVE = "k" * 40


def feed(lines: Iterable[Line]) -> list[bool]:
    again = Replay()
    return [again.feed(line) for line in lines]


def test_a_recorded_run_has_the_same_effects_again() -> None:
    kinds: set[str] = set()
    for seed in (*range(SEEDS), DIALS):
        run = recorded.play(programs.draw(seed))
        try:
            assert all(feed(run.record))
        except Differs as error:
            raise AssertionError(f"seed {seed}") from error
        kinds |= {type(line.input).__name__ for line in run.record}
    assert kinds >= {"Began", "Hello", "Resume", "Received", "Disconnected", "Dialled", "Tick"}


def test_another_master_does_not_do_the_same() -> None:
    """It has not heard the first peer."""
    for seed in range(20):
        lines = _record(seed)
        first = next(i for i, line in enumerate(lines) if isinstance(line.input, inputs.Hello))
        with pytest.raises(Differs):
            feed(lines[:first] + lines[first + 1 :])


def test_what_differs_is_told() -> None:
    master = Recorder(b"key")
    line = master.line(1.0, inputs.Tick(1.0), [Note("one"), Note("two")])
    again = master.line(1.0, inputs.Tick(1.0), [Note("one"), Note("three")])
    assert line.effects != again.effects and len(line.effects) == 16
    assert difference(line, again) == "before: two; now: three"
    more = msgspec.structs.replace(line, notes=("one", "two", "three"))
    assert difference(line, more).startswith("notes before: ('one', 'two'); now: ('one', 'two', 't")
    digest = msgspec.structs.replace(line, effects="0" * 16)
    told = f"the effects had the digest {line.effects}, and now 0000000000000000"
    assert difference(line, digest) == told
    sent = [Told("Kicked", (1,)), Told("Kicked", (2,)), Told("Kicked", (3,))]
    told = [msgspec.structs.replace(line, told=(Told("Kicked", (1,)), one)) for one in sent[1:]]
    assert difference(*told) == f"before: {sent[1]}; now: {sent[2]}"
    for before, now in (("", "KeyError: 7"), ("KeyError: 7", "")):
        said = [msgspec.structs.replace(line, failed=failed) for failed in (before, now)]
        assert difference(*said) == f"it failed with {before or 'nothing'!r}, and now with {now!r}"


def test_the_next_master_of_a_process_begins_with_the_journal_of_the_last() -> None:
    replay, master = Replay(), Recorder(None)
    assert replay.feed(master.line(0.0, inputs.Began(7, None, None), []))
    wrong = Journal(7, 1, 9, frozenset())
    with pytest.raises(Differs, match=r"the next master began with Journal.* and now with"):
        replay.feed(master.line(0.0, inputs.Began(7, None, wrong, "it has lost its peers"), []))


def test_a_line_as_it_is_written() -> None:
    recorder = Recorder(None)
    sent = [Note("x"), Send(b"?", m.Kicked(4, "out of turn")), Send(b"?", m.Kicked(5, "late"))]
    line = recorder.line(1.5, inputs.Received(b"1", m.Leave()), [*sent[:2]])
    what = '"input":{"type":"received","conn":"MQ==","message":[8]},"notes":["x"]'
    told = '"told":[{"say":"Kicked","to":[0],"ok":false,"why":"out of turn"}]'
    assert msgspec.json.encode(line).decode() == (
        f'{{"type":"event","at_s":1.5,{what},{told},"effects":"{line.effects}"}}'
    )
    other = recorder.line(1.5, inputs.Received(b"1", m.Leave()), [sent[0], sent[2]])
    assert other.effects != line.effects, "messages count"


def test_a_lost_connection_that_is_no_peers() -> None:
    line = Recorder(None).line(0.0, inputs.Disconnected((b"?",), "it broke"), [])
    assert (line.peer, line.gone, line.effects) == (0, (), "")


@pytest.mark.parametrize("change", ["effects", "input", "missing"])
def test_a_line_that_is_not_true_is_noticed(change: str) -> None:
    lines = recorded.play(programs.draw(3)).record
    index = next(i for i, line in enumerate(lines) if line.told and line.peer and i > 5)
    line = lines[index]
    if change == "effects":
        lines[index] = msgspec.structs.replace(line, effects="0" * 16)
    elif change == "input":
        why = inputs.Rejected(line.input.conn, "no")  # type: ignore[union-attr]
        lines[index] = msgspec.structs.replace(line, input=why)
    else:
        del lines[index]
    with pytest.raises(Differs):
        feed(lines)


def test_lines_after_a_gap_wait_for_the_next_master() -> None:
    seed = next(
        seed
        for seed in itertools.count()
        if sum(isinstance(line.input, inputs.Began) for line in _record(seed)) > 1
    )
    lines = _record(seed)
    later = [i for i, line in enumerate(lines) if isinstance(line.input, inputs.Began)][1]
    fed = feed(lines[2:])
    assert fed == [False] * (later - 2) + [True] * (len(lines) - later)


def _record(seed: int) -> list[Line]:
    return recorded.play(programs.draw(seed)).record


# ---- secrets, and what is left out ----


def test_only_ticks_that_change_something_are_recorded() -> None:
    vote, tick = inputs.Received(b"1", m.TopologyVote(1)), inputs.Tick(1.0)
    unlimited, limited = Recorder(b"key"), Recorder(b"key")
    limited.line(0.0, inputs.Began(7, 30.0, None), [])
    assert limited.matters(tick, False, [])
    assert [unlimited.matters(each, False, []) for each in (vote, tick, tick)] == [
        True,
        False,
        False,
    ]
    assert [unlimited.matters(each, True, []) for each in (vote, tick, tick)] == [True, True, False]
    assert [limited.matters(each, False, []) for each in (vote, tick, tick)] == [True, True, False]
    assert unlimited.matters(tick, False, [Note("somebody was late")])


def test_every_secret_of_a_message_is_known() -> None:
    """The fields that must be redacted: a new one of such a name or type comes here, too."""
    secret = {"run", "nonce", "curve", "dial", "password", "data", "small", "info", "known"}
    secret |= {"token", "sender", "receiver", "relay"}
    found = {
        (message.__name__, field.name)
        for union in (m.PeerMessage, m.MasterMessage)
        for message in typing.get_args(union)
        for field in msgspec.structs.fields(message)
        if field.name in secret or field.type in (m.Data, m.PeerInfo)
    }
    assert found == {
        ("Hello", "curve"),
        ("Hello", "dial"),
        ("StartVote", "data"),
        ("Examine", "curve"),  # which is no input of the state machine
        ("Examine", "dial"),
        ("Resume", "run"),
        ("Resume", "info"),
        ("Resume", "known"),
        ("Resume", "small"),
        ("Resume", "dial"),
        ("Welcome", "nonce"),
        ("Source", "holder"),
        ("Source", "nonce"),
        ("Serve", "receiver"),
        ("Serve", "nonce"),
        ("Plan", "nonce"),
        ("Admitted", "run"),
        ("Started", "data"),
        ("Started", "nonce"),
        ("SyncPlan", "nonce"),
        ("Missed", "small"),
        ("Probe", "nonce"),
        ("Hello", "relay"),  # a port
        ("RendezvousRequest", "token"),
        ("RendezvousJoin", "sender"),
        ("RendezvousJoin", "token"),
        ("RendezvousResult", "token"),
        ("RendezvousResult", "relay"),
        ("RendezvousRelay", "token"),
        ("RendezvousRelay", "sender"),
        ("RendezvousRelay", "receiver"),
        ("Served", "receiver"),  # a number
    }


def test_a_record_has_no_payload_no_key_and_no_number_of_the_run() -> None:
    run, secret = 0x1234567890ABCDE, b"PAYLOAD."
    info = m.PeerInfo(1, 0, "h", 7, "", "m", CURVE)
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 7, "", "m", b"", CURVE, "PASSWORD")
    small = (m.Small(5, 0, (1, 2), secret),)
    work = m.Spec(CollectiveKind.ALL_REDUCE, 0, 10, 2)
    resume = m.Resume(
        3, "1", b"", run, info, (info,), 1, 1, m.Done(), (), (), small, (), "PASSWORD"
    )
    events: list[inputs.Input] = [
        inputs.Began(run, None, None),
        inputs.Hello(b"a", hello, "h"),
        inputs.Resume(b"b", resume, "h"),
        inputs.Received(b"a", m.StartVote(1, 0, work, secret)),
    ]
    effects: list[Effect] = [
        Remember(info),
        Dial(info, "PASSWORD"),
        Adopt(run, 1),
        Send(b"a", m.Plan(1, (info,), (), 0, 987654321)),
        Send(b"a", m.Started(1, 1, 1, secret, True, 0, 987654321)),
        Send(b"a", m.Missed(small[0])),
        Send(b"a", m.Admitted(run, m.Done())),
    ]
    recorder = Recorder(b"key")
    lines = [recorder.line(0.0, event, effects) for event in events]
    text = msgspec.json.encode(lines).decode()
    base64_of_secret = msgspec.json.encode(secret).decode().strip('"').rstrip("=")
    for each in (CURVE, "PASSWORD", str(run), base64_of_secret, "987654321"):
        assert each not in text
    # a replay from the log, with zeros for payloads, gives the same digests
    decoded = msgspec.json.decode(text, type=list[Line])
    assert refill(decoded[3].input, decoded[3].sizes) == inputs.Received(
        b"a", m.StartVote(1, 0, work, bytes(8))
    )
    assert [line.sizes for line in decoded] == [(), (), (8,), (8,)]


@pytest.mark.parametrize("size", [-1, 1 << 40])
def test_a_size_that_no_payload_has_is_no_line(size: int) -> None:
    line = Recorder(b"key").line(0.0, inputs.Tick(1.0), [])
    empty = msgspec.structs.replace(line, sizes=(0,))
    assert msgspec.json.decode(msgspec.json.encode(empty), type=Line | Gap) == empty
    text = msgspec.json.encode(msgspec.structs.replace(line, sizes=(size,)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Line | Gap)
