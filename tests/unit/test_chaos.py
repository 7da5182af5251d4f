"""The parts of `pccl chaos` that start no process: schedules, moments, reports, shrinking."""

from __future__ import annotations

import argparse
import time
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from pccl.cli.chaos import Harness, Program, kinds, report, watch
from pccl.cli.chaos.director import Chronicle, Done
from pccl.cli.chaos.kinds import Fault, Schedule, draw, shrink
from pccl.cli.chaos.report import page
from pccl.cli.chaos.watch import Follower, Metrics, Watch, measure, moments
from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.eventlog import Line, Told
from pccl.runtime.server.eventlog import EventFile

MOMENTS = sorted(watch.MOMENTS)


# ---- schedules ----


def test_a_seed_decides_all_faults() -> None:
    once = draw(7, 60.0, 1.0, kinds.KINDS, MOMENTS)
    assert once == draw(7, 60.0, 1.0, kinds.KINDS, MOMENTS)
    assert once != draw(8, 60.0, 1.0, kinds.KINDS, MOMENTS)
    assert 30 < len(once) < 120
    times = [fault.at_s for fault in once]
    assert times == sorted(times) and times[-1] < 60
    for fault in once:
        low, high = kinds.KINDS[fault.what].lasts_s
        assert low <= fault.lasts_s <= high and 0 <= fault.whom < 1
        assert fault.moment in ("", *MOMENTS)


def test_all_kinds_and_moments_are_drawn() -> None:
    faults = draw(1, 3000.0, 1.0, kinds.KINDS, MOMENTS)
    assert {fault.what for fault in faults} == kinds.KINDS.keys()
    assert {fault.moment for fault in faults} == {"", *MOMENTS}


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw(1, 60.0, 1.0, {}, MOMENTS) == ()


def test_a_schedule_is_read_from_its_file(tmp_path: Path) -> None:
    faults = draw(3, 20.0, 1.0, kinds.KINDS, MOMENTS)
    plan = Schedule(3, 4, 20.0, faults, {"programs": "loop"})
    plan.save(tmp_path / "chaos-3.json")
    assert kinds.load(tmp_path / "chaos-3.json") == plan
    assert plan.only(faults[:2]).faults == faults[:2]
    (tmp_path / "other").write_text("{}")
    with pytest.raises(OSError, match="other is not a schedule of faults"):
        kinds.load(tmp_path / "other")


# ---- the event log, while it is written ----


def received(said: m.PeerMessage, at_s: float = 1.0, told: tuple[Told, ...] = ()) -> Line:
    return Line(at_s, inputs.Received(b"c", said), 1, told=told)


VOTE = m.PendingVote(1)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (received(VOTE), {"between-votes"}),
        (received(VOTE, told=(Told("PendingResult", (1,)),)), set()),
        (received(VOTE, told=(Told("Started", (1, 2), seq=4),)), {"collective"}),
        (received(VOTE, told=(Told("Started", (1, 2), seq=4, final=True),)), set()),
        (received(VOTE, told=(Told("SyncPlan", (1, 2), fetches=2),)), {"transfer"}),
        (received(VOTE, told=(Told("SyncPlan", (1, 2)),)), set()),
        (received(VOTE, told=(Told("Probe", (1,)),)), {"optimization"}),
        (Line(1.0, inputs.Farewell(), told=(Told("Welcome", (3,)),)), {"admission"}),
        (received(m.Leave()), set()),
    ],
)
def test_moments_are_found_from_the_event_log(line: Line, names: set[str]) -> None:
    assert moments(line) == names
    assert names <= watch.MOMENTS.keys()


def test_a_run_is_known_by_its_log() -> None:
    watch = Watch()
    watch.feed(Line(1.0, inputs.Farewell(), told=(Told("Admitted", (1, 2, 3)),)))
    watch.feed(received(VOTE, 2.0, (Told("Finished", (1, 2), 1), Told("Finished", (3,), 1))))
    watch.feed(received(VOTE, 3.0, (Told("Finished", (1,), ok=False),)))
    watch.feed(received(VOTE, 4.0, (Told("PendingResult", (1,), ok=False),)))
    watch.feed(msgspec.structs.replace(received(VOTE, 5.0), gone=(2,), failed="KeyError: 2"))
    assert (watch.accepted, watch.collectives_s, watch.rounds) == ({1, 3}, [2.0], 2)
    assert watch.last_s == 4.0 and watch.failures == ["the master failed: KeyError: 2"]
    watch.feed(Line(6.0, inputs.Began(1, None, None)))
    assert watch.accepted == set()
    watch.feed(received(VOTE, 7.0, (Told("Resumed", (3,)),)))
    assert watch.accepted == {3}


def test_a_log_is_followed_over_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    tail = Follower(path)
    assert list(tail.lines()) == []
    file = EventFile(path)
    monkeypatch.setattr("pccl.runtime.limits.EVENT_LOG_BYTES", 600)
    seen: list[float] = []
    for number in range(40):
        line = msgspec.json.encode(received(VOTE, float(number))) + b"\n"
        file.write(line, number, 0)
        if number % 2:
            seen += [one.at_s for one in tail.lines()]
    seen += [one.at_s for one in tail.lines()]
    assert seen == [float(number) for number in range(40)]
    assert (tmp_path / "log.3").exists()
    with path.open("ab") as torn:
        torn.write(b'{"type":"event","at_')
    assert list(tail.lines()) == []
    tail.close()
    file.close()


# ---- shrinking ----


@pytest.mark.parametrize("needed", [{3}, {0, 19}, {4, 5, 6}, {1, 7, 11, 18}])
def test_shrinking_keeps_only_the_needed_faults(needed: set[int]) -> None:
    tried: list[list[int]] = []

    def fails(some: list[int]) -> bool:
        tried.append(some)
        return needed <= set(some)

    found = shrink(range(20), fails, time.monotonic() + 60)
    assert found == sorted(needed)
    assert len(tried) < 200


def test_shrinking_ends_when_its_time_is_over() -> None:
    assert shrink(range(20), lambda some: True, time.monotonic() - 1) == list(range(20))


def test_a_failure_without_faults_needs_none() -> None:
    assert shrink(range(8), lambda some: True, time.monotonic() + 60) == []


# ---- reports ----


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_escaped_and_needs_nothing_else() -> None:
    evil = '<script>alert("x")</script>'
    chronicle = Chronicle(began_s=0.0, faults_s=1.0, ended_s=10.0)
    chronicle.done += [
        Done(Fault(0.5, evil, lasts_s=2.0), 1.5, 3.5, 0, "transfer"),
        Done(Fault(1.0, "kill"), 2.0, skipped=evil),
    ]
    figures = Metrics(100, 0.75, [0.01, 0.3, 99.0])
    chronicle.violations.append(evil)
    text = page(evil, evil, chronicle, [], figures)
    read = Tags()
    read.feed(text)
    assert read.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in read.tags}
    assert not any(name in ("src", "href") for _, attrs in read.tags for name in attrs)
    assert not any(name.startswith("on") for _, attrs in read.tags for name in attrs)
    assert ("http" not in text.replace("http-equiv", "")) and "default-src 'none'" in text
    assert evil in read.text and "1 violations" in read.text
    assert "100 steps; goodput 75%; 3 recoveries: median 0.30 s, p95 99.00 s" in read.text


def test_figures_of_a_run() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 13.0, 14.0]
    figures = measure(steps, [3.5, 20.0])
    assert figures.recoveries_s == [pytest.approx(9.5)]
    assert figures.goodput == pytest.approx(5 / 14)
    assert measure([], [1.0]).words() == "0 steps; goodput 0%"


def test_a_master_that_grows_is_found() -> None:
    steady = [(50, 9, 100)] * 40
    assert list(report.growth("the master", steady, report.GROWTH_MAX, 20)) == []
    leaking = [(50 + 3 * number, 9, 100) for number in range(40)]
    assert "the master has grown from (107, 9, 100)" in next(
        report.growth("the master", leaking, report.GROWTH_MAX, 20)
    )
    assert list(report.growth("the master", leaking, report.GROWTH_MAX, 41)) == []


# ---- what cannot be ----


def harness(**given: object) -> Harness:
    defaults = {"faults": (), "network": False, "replay": None, "keep": None, "seed": 1}
    args = argparse.Namespace(**{**defaults, **given})
    return Harness(args, Program("x", 2, ([], []), ["true"]))


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(OSError, match="there is no fault 'flood'; there are burn, "):
        harness(faults=("flood",)).run()


def test_a_schedule_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        harness(replay=str(tmp_path / "nowhere")).run()


def test_faults_that_are_not_possible_here_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, kept = tmp_path / "plan", tmp_path / "kept"
    Schedule(1, 2, 9.0, (Fault(1.0, "cut"), Fault(2.0, "kill"))).save(plan)
    kept.mkdir()
    (kept / "of another run").touch()
    for faults, first in (((), ""), (("cut", "kill"), "left out: cut: without --network")):
        with pytest.raises(OSError, match="is not empty"):
            harness(faults=faults, replay=str(plan), keep=kept).run()
        told = capsys.readouterr().out
        assert told.startswith(first)
        assert told.endswith("left out, as they are not possible here: cut\n")
