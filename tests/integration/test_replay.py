"""`pccl replay`: what it tells of an event log, checks, and exports."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.waiting import a_line_more

from pccl.cli.main import main
from pccl.protocol import messages as m
from pccl.protocol.master import Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.runtime import limits
from pccl.runtime.inline_collectives import combine
from pccl.runtime.server.eventlog import EventLog, read
from pccl.types import CollectiveKind

WORK = m.Spec(CollectiveKind.ALL_REDUCE, 0, 10, 1000)
BEGAN = inputs.Began(7, None, None)
CALL = "all_reduce(1000 elements of float32, sum) with tag 3"


class LoggedRun:
    """A master that keeps an event log, and its peers by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = EventLog(path)
        self.master: Master = Master.began(BEGAN, combine, b"secret")
        self.log.note(0.0, BEGAN, [])
        self._calls = 0

    def joins(self, peer: int, group: int = 0) -> None:
        hello = m.Hello(m.PROTOCOL_VERSION, "1", group, "", 1000 + peer, "", "m", b"")
        self.log.feed(self.master, inputs.Hello(b"%d" % peer, hello, "10.0.0.1"))

    def says(self, at_s: float, peer: int, message: m.PeerMessage) -> None:
        self.master.now_s = at_s
        self.log.feed(self.master, inputs.Received(b"%d" % peer, message))

    def dies(self, at_s: float, peer: int) -> None:
        self.master.now_s = at_s
        self.log.feed(self.master, inputs.Disconnected((b"%d" % peer,), "its connection broke"))

    def starts(self, at_s: float, peer: int) -> None:
        self._calls += 1
        self.says(at_s, peer, m.StartVote(self._calls, 3, WORK))

    def finishes(self, at_s: float, peer: int) -> None:
        seq = self.master.run.numbers.next_seq - 1
        self.says(at_s, peer, m.FinishVote(seq, True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events"


@pytest.fixture
def logged(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoggedRun]:
    monkeypatch.setattr(limits, "EVENT_LOG_PAUSE_S", 0.0)
    logged = LoggedRun(path)
    yield logged
    logged.log.close()


Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(path: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    def run(*options: str) -> tuple[int, str, str]:
        status = main(["replay", str(path), *options])
        return status, *capsys.readouterr()

    return run


def play(logged: LoggedRun) -> None:
    """Three peers; peer 3 is late, then peer 2 is slow, then peer 3 dies while others wait."""
    for peer in (1, 2, 3):
        logged.joins(peer)
    logged.says(0.5, 1, m.TopologyVote(100))
    for at_s, peer in ((1.0, 1), (1.5, 2), (4.0, 3)):
        logged.starts(at_s, peer)
    for at_s, peer in ((5.0, 1), (5.0, 3), (7.25, 2)):
        logged.finishes(at_s, peer)
    for at_s, peer in ((8.0, 1), (8.0, 2)):
        logged.starts(at_s, peer)
    logged.dies(20.0, 3)
    logged.says(21.0, 1, m.TopologyVote(101))
    logged.log.close()


def test_it_prints_the_waits(logged: LoggedRun, replay: Replay) -> None:
    play(logged)
    status, out, err = replay()
    assert (status, err) == (0, "")
    lines = [line.partition("  ")[2] for line in out.splitlines()]
    wanted = [
        "the master begins",
        "joined: peer 1 (10.0.0.1:1001); 1 peer now",
        "peer 2 (10.0.0.1:1002) of group 0 registered",
        f"{CALL}: peers 1, 2, 3 have entered it; others waited up to 3.000 s for peer 3",
        f"{CALL}: peers 1, 2, 3 have finished it; others waited up to 2.250 s for peer 2",
        f"{CALL}: peers 1, 2 have entered it; others waited up to 12.000 s for peer 3",
        "for peer 3: 29.500 s, 12.000 s; 2 times it came last",
        "for peer 2: 4.500 s, 2.250 s; 1 times it came last",
    ]
    at = [lines.index(line) for line in wanted]
    assert at == sorted(at)
    assert any("peer 3 (10.0.0.1:1003): its connection broke" in line for line in lines)
    assert "at the end peer 1 had entered update_topology(), and waited for peer 2\n" in out
    assert CALL not in replay("--longer-than", "100")[1]


def test_its_state_machine_does_the_same_again(
    logged: LoggedRun, replay: Replay, path: Path
) -> None:
    play(logged)
    status, out, err = replay("--check")
    assert (status, out, err) == (0, "15 inputs have the same effects again\n", "")
    text = path.read_text(encoding="utf-8")
    changed = text.replace("its connection broke", "it was struck by lightning", 1)
    path.write_text(changed, encoding="utf-8")
    status, out, _ = replay("--check")
    assert status == 1
    assert f"the master does something else at {path}:" in out
    assert "struck by lightning" in out


def test_a_line_that_is_none_is_named(logged: LoggedRun, replay: Replay, path: Path) -> None:
    play(logged)
    data = path.read_bytes().splitlines(keepends=True)
    data[6] = data[6].replace(b":", b"", 1)
    path.write_bytes(b"".join(data))
    status, out, err = replay()
    assert status == 1
    assert f"{path}:7: this is not an event (" in err
    assert "have finished it" in out, "what follows is told"
    status, out, _ = replay("--check")
    assert status == 1
    assert "5 inputs have the same effects again" in out
    assert "could not be fed, because events before them are missing" in out


@pytest.mark.parametrize("number", ["1e300", "-1e300", "1e18", "-1"])
@pytest.mark.parametrize("field_of", [b'"unix_s":', b'"at_s":'], ids=["the head", "a line"])
def test_a_time_that_is_none_is_named(
    logged: LoggedRun, replay: Replay, path: Path, number: str, field_of: bytes
) -> None:
    play(logged)
    at = re.escape(field_of) + rb"[0-9.e+-]+"
    path.write_bytes(re.sub(at, field_of + number.encode(), path.read_bytes(), count=1))
    for options in ([], ["--trace", str(path.with_name("trace.json"))]):
        status, out, err = replay(*options)
        if field_of == b'"at_s":' and number == "-1":  # early, but a time
            assert status in (0, 1)
            continue
        assert (status, err.count("s since 1970: the file was changed or damaged")) == (1, 1)
        assert "have finished it" in out, "what follows is told"


def test_a_file_without_end_is_no_log(
    replay: Replay, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_LOG_LINE_BYTES", 1 << 20)
    path.symlink_to("/dev/zero")
    status, out, err = replay()
    assert (status, out) == (2, "")
    assert err.endswith("has more than 1048576 bytes: it is not an event log\n")


def test_a_torn_line_at_the_end_is_no_damage(logged: LoggedRun, replay: Replay, path: Path) -> None:
    play(logged)
    path.write_bytes(path.read_bytes()[:-9])
    status, _, err = replay("--check")
    assert status == 0
    assert err.endswith("the master has ended within this line\n")


def test_it_reports_lines_removed_by_rotation(
    logged: LoggedRun, replay: Replay, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_LOG_BYTES", 1000)
    monkeypatch.setattr(limits, "EVENT_LOG_FILES", 2)
    for peer in range(1, 5):
        for _ in range(3):
            with a_line_more(path):
                logged.joins(peer)
    logged.log.close()
    _, head = next(read(path.with_name("events.1")))
    status, _, err = replay("--check")
    assert status == 1, "nothing could be fed"
    missing = getattr(head, "line", 0)
    assert missing > 0
    assert f"events.1:1: {missing} events before that are missing, in files that were rem" in err


def test_a_failure_becomes_a_test(
    logged: LoggedRun, replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = tmp_path / "test_made.py"

    feed = Master.feed

    def fail(master: Master, event: inputs.Event) -> list[Effect]:
        if isinstance(event, inputs.Disconnected):
            raise ZeroDivisionError("a bug")
        return feed(master, event)

    for peer in (1, 2):
        logged.joins(peer)
    with monkeypatch.context() as bug:
        bug.setattr(Master, "feed", fail)
        with pytest.raises(ZeroDivisionError):
            logged.dies(3.0, 2)
        logged.log.close()
        status, out, _ = replay("--check", "--to-test", str(test))
        assert status == 0
        assert "it fails again with ZeroDivisionError: a bug" in out
        made = runpy.run_path(str(test))["test_the_master_does_what_is_right"]
        with pytest.raises(ZeroDivisionError):
            made()
    made()  # the bug is repaired


def test_a_trace_has_each_call_and_each_wait(
    logged: LoggedRun, replay: Replay, tmp_path: Path
) -> None:
    play(logged)
    file = tmp_path / "trace.json"
    assert replay("--trace", str(file))[0] == 0
    events = json.loads(file.read_bytes())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "master", 1: "peer 1", 2: "peer 2", 3: "peer 3"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    begin = min(e["ts"] for e in slices if e["name"] == CALL)
    first = {e["name"]: (e["ts"] - begin, e["dur"]) for e in slices if e["ts"] < begin + 6.1e6}
    s = 1_000_000
    assert first["enters"] == (0, 3 * s)
    assert first["runs"] == (3 * s, s)
    assert first["waits for others"] == (4 * s, 9 * s // 4)
    assert first[CALL] == (0, 25 * s // 4)
    assert any(e["ph"] == "i" and "its connection broke" in e["name"] for e in events)
    for one in slices:  # those of a thread lie within each other, or behind each other
        for other in (o for o in slices if o["tid"] == one["tid"]):
            begin, end = one["ts"], one["ts"] + one["dur"]
            inside = begin <= other["ts"] and other["ts"] + other["dur"] <= end
            around = other["ts"] <= begin and end <= other["ts"] + other["dur"]
            assert inside or around or other["ts"] >= end or other["ts"] + other["dur"] <= begin


def test_other_files_are_refused(replay: Replay, path: Path) -> None:
    assert replay() == (2, "", f"pccl replay: there is no event log {path}\n")
    path.write_text("something else\n", encoding="utf-8")
    status, _, err = replay()
    assert status == 2
    assert err.endswith("is not an event log of a master: it begins with no head\n")
    head = '{"type":"pccl event log","version":9,"pccl":"9.1","process":1,"unix_s":1.0,'
    path.write_text(head + '"monotonic_s":1.0,"line":0,"missing":0}\n', encoding="utf-8")
    assert (
        "is of version 9 of event logs, and this pccl reads version 2: take pccl 9.1"
        in (replay()[2])
    )
