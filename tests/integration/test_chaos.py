"""`pccl chaos`: a program that holds, one that does not, and a fault that ends it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pccl.cli import main as cli
from pccl.cli.chaos import kinds
from pccl.cli.chaos.director import Director, Done, Program
from pccl.cli.chaos.network import Network, NetworkError
from pccl.cli.chaos.report import line_of, picture
from pccl.cli.chaos.stage import Copy, Stage

TRAINS = """
import os
import numpy as np
import pccl
with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
    while True:
        try:
            comm.all_reduce(np.ones(1000))
        except (pccl.PeerLostError, pccl.TooFewPeersError):
            pass
        if comm.are_peers_pending():
            comm.update_topology()
"""
CARELESS = TRAINS.replace("(pccl.PeerLostError, pccl.TooFewPeersError)", "ZeroDivisionError")
CARELESS = CARELESS.replace("    while True", "    comm.wait_for_peers(2)\n    while True")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chaos(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit status, and what is printed."""
    status = cli.main(["chaos", "--plain", *words])
    return status, capfd.readouterr().out


def saved(path: Path, *faults: kinds.Fault, seconds: float = 1.0) -> str:
    """A schedule of these faults; its file."""
    kinds.Schedule(1, 2, seconds, faults).save(path)
    return str(path)


def test_a_program_that_survives_its_faults_passes(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [kinds.Fault(0.1, "restart-master", lasts_s=0.1)]
    faults += [kinds.Fault(0.2, "starve", lasts_s=0.3, moment="between-votes")]
    plan = saved(here / "plan.json", *faults)
    options = ["-n", "2", "--replay", plan, "--report", "report.html", "--keep", "kept"]
    status, out = chaos(capfd, *options, "--", sys.executable, "-c", TRAINS)
    assert status == 0, out
    assert "everything held (seed 1)" in out
    assert "restart-master for 0.1 s " in out and "starve: copy" in out
    assert "everything held" in (here / "report.html").read_text(encoding="utf-8")
    assert {"copy-0.log", "copy-1.log", "master.jsonl", "master.log"} <= {
        path.name for path in (here / "kept").iterdir()
    }
    assert not list(here.glob("chaos-*.json"))


def test_a_program_that_fails_is_named_and_its_faults_are_kept(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = [sys.executable, "-S", "-c", "print('woe'); raise SystemExit(3)"]
    options = ["-n", "2", "--seed", "5", "--minutes", "0.1", "--shrink", "5"]
    status, out = chaos(capfd, *options, "--", *program)
    assert status == 1
    assert re.search("VIOLATION: copy [01] ended with status 3, and nothing had befallen it", out)
    assert "\nwoe\n" in out
    assert "once more: pccl chaos -n 2 --replay 5 -- " in out
    assert " faults are in chaos-5.json now, and fail" in out.splitlines()[-1]
    assert kinds.load(here / "chaos-5.json").faults == ()


class Rehearsal(Stage):
    """Copies without processes. A script, if there is one, goes on whenever the director looks
    which have ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, {})
        self.killed: list[Copy] = []
        self.script: Iterator[None] = iter(())

    def start_master(self) -> None:
        pass

    def start(self, command: Sequence[str]) -> Copy:
        copy = Copy(len(self.copies), 1, None, self.directory, time.monotonic())  # type: ignore[arg-type]
        self.copies.append(copy)
        return copy

    def kill(self, copy: Copy) -> None:
        self.killed.append(copy)

    def reap(self) -> list[Copy]:
        next(self.script, None)
        return []


def staged(path: Path) -> Director:
    """A run of three copies that are not started."""
    program = Program("x", 3, ([], []), ["true"])
    plan = kinds.Schedule(7, 3, 60.0, (kinds.Fault(1.0, "freeze", lasts_s=2.0),))
    stage = Rehearsal(path)
    director = Director(stage, plan, kinds.KINDS, program, 40.0, 5.0, lambda _: None)
    now_s = time.monotonic()
    director.chronicle.faults_s = now_s - 10
    for number, stopped, settled in ((0, False, True), (1, True, False), (2, False, False)):
        copy = Copy(number, 1, None, path, now_s - 20, stopped=stopped, settled=settled)  # type: ignore[arg-type]
        copy.befell += [(now_s - 3, "freeze")] if stopped else []
        stage.copies.append(copy)
    return director


def test_a_run_is_shown_on_a_terminal_and_in_lines(tmp_path: Path) -> None:
    director = staged(tmp_path)
    done = Done(director.schedule.faults[0], time.monotonic() - 3, copy=1, moment="transfer")
    director.chronicle.done.append(done)
    director.watch.accepted = {1, 2}
    shown = "\n".join(picture(director))
    assert "10 of 60 s, seed 7" in shown and "1 of 1 faults" in shown
    for words in ("in the run", "frozen", "coming", "freeze 3.0 s ago"):
        assert words in shown
    line = line_of(done, director)
    assert "7.0 s  freeze: copy 1 for 2.0 s (transfer)" in line
    assert line.endswith("0 calls, 2 peers, 3 copies, 1 frozen")


def test_another_copy_takes_the_place_of_one_that_has_ended(tmp_path: Path) -> None:
    """After 100 s, and where no fault has started one already."""
    stage, program = Rehearsal(tmp_path), Program("x", 3, ([], []), ["true"])
    plan = kinds.Schedule(7, 3, 1000.0, ())
    director = Director(stage, plan, kinds.KINDS, program, 1000.0, 100.0, lambda _: None)
    director.watch.accepted = {1, 2, 3}
    program.begin(tmp_path)

    def script() -> Iterator[None]:
        copies, now_s = stage.copies, time.monotonic()
        copies[0].ended_s, copies[2].ended_s = now_s - 50, now_s
        yield
        assert len(copies) == 3
        copies[0].ended_s -= 100
        for _ in range(3):
            yield
            assert len(copies) == 4
        copies[2].ended_s -= 150
        for _ in range(3):
            yield
            assert len(copies) == 5
        copies[4].ended_s = now_s - 150
        stage.start([])
        for _ in range(3):
            yield
            assert len(copies) == 6
        for copy in stage.alive():
            copy.ended_s = now_s
        told.append("all have ended")

    told: list[str] = []
    stage.script = script()
    director.run(0.0)
    assert told and not director.chronicle.violations and len(stage.copies) == 6


def test_one_is_spared_that_could_go_on_alone(tmp_path: Path) -> None:
    director = staged(tmp_path)
    assert isinstance(director.stage, Rehearsal)
    (first, frozen, last), killed = director.stage.copies, director.stage.killed
    kill = Done(kinds.Fault(1.0, "kill"), 1.0)
    assert not director.can_spare([first]) and director.can_spare([last])
    director.perform(kill)
    assert kill.copy == 2 and killed == [last], "the only one that is no loss"
    last.settled = True
    assert director.can_spare([first]) and director.can_spare([last])
    killed.clear()
    frozen.stopped = False
    director.perform(Done(kinds.Fault(1.0, "kill-all-but-one"), 1.0))
    assert killed == [frozen, last]
    first.settled = last.settled = False
    nobody = Done(kinds.Fault(1.0, "kill-all-but-one"), 1.0)
    director.perform(nobody)
    assert nobody.skipped and len(killed) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--faults", "flood", "--", "true"], "there is no fault 'flood'"),
        (["--replay", "nowhere", "--", "true"], "nowhere"),
        (["--keep", ".", "--", "true"], ". is not empty"),
        (["-n", "2"], "which program? pccl chaos [options] -- COMMAND ..."),
    ],
)
def test_impossible_options_are_refused(
    here: Path, words: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "something").touch()
    assert cli.main(["chaos", *words]) != 0
    assert why in capfd.readouterr().err


@pytest.mark.slow
def test_a_program_that_does_not_survive_a_kill_is_found(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = saved(here / "plan.json", kinds.Fault(8.0, "kill", moment="collective"), seconds=9.0)
    command = [sys.executable, "-c", CARELESS]
    status, out = chaos(capfd, "-n", "2", "--replay", plan, "--restart", "0.5", "--", *command)
    assert status == 1
    assert "kill: copy" in out
    assert "ended with status 1, and nothing had befallen it" in out
    assert "PeerLostError" in out or "TooFewPeersError" in out


@pytest.mark.slow
def test_hosts_are_cut_off_and_come_back(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        Network(1).close()
    except NetworkError as error:
        pytest.skip(str(error))
    cuts = ("cut", "cut-out", "cut-in", "slow-link", "reset")
    faults = [kinds.Fault(8.0 + 4.0 * i, what, 0.5, 1.0) for i, what in enumerate(cuts)]
    plan = saved(here / "plan.json", *faults, seconds=30.0)
    options = ["-n", "3", "--network", "--replay", plan]
    status, out = chaos(capfd, *options, "--", sys.executable, "-c", TRAINS)
    assert status == 0, out
    assert "cut: copy" in out and "reset: copy" in out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_all_faults_are_survived(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "3", "--minutes", "0.5", "--calm", "0.5", "--seed", str(seed)]
    status, out = chaos(capfd, *options, "--", sys.executable, "-c", TRAINS)
    assert status == 0, out
