"""`pccl demo`: its plot without processes, and a short run with them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peers.waiting import PATIENCE_S

for package in ("torch", "matplotlib"):
    pytest.importorskip(package)

from pccl.cli import main as cli  # noqa: E402
from pccl.cli.demo.director import (  # noqa: E402
    Averaged,
    Director,
    Finished,
    Joined,
    Loaded,
    Report,
    State,
    Trained,
    decode,
    encode,
)

COMMAND = [sys.executable, "-m", "pccl", "demo"]
PARAMETER_BYTES = 1200


class DirectorHarness:
    """A director of three founders and ten steps; the test plays the clock and the peers."""

    def __init__(self, *, chaos: bool = True) -> None:
        self.orders: list[tuple[str, int]] = []
        self.director = Director(
            peers=3,
            steps=10,
            inner_steps=5,
            chaos=chaos,
            say=lambda text: None,
            kill=lambda number: self.orders.append(("kill", number)),
            go=lambda number: self.orders.append(("go", number)),
        )
        self.now_s = 0.0

    def hear(self, number: int, report: Report) -> None:
        self.now_s += 1.0
        self.director.receive(number, report, self.now_s)

    def begin(self) -> None:
        for peer in self.director.peers:
            self.hear(peer.number, Loaded())
        for number in range(3):
            self.hear(number, Joined(outer_step=0, validation_loss=5.5))

    def play_round(self, step: int, *numbers: int, loss: float = 3.0) -> None:
        for number in numbers:
            self.hear(number, Trained(outer_step=step - 1, loss=loss, tokens_per_s=1e4))
        alive = [n for n in numbers if self.director.peers[n].state is State.TRAINING]
        for number in alive:
            tx_bytes = step * PARAMETER_BYTES
            self.hear(number, Averaged(step, len(alive), 0, 0.5, PARAMETER_BYTES, tx_bytes, loss))

    def finish(self, *numbers: int, digest: str = "d") -> None:
        for number in numbers:
            self.hear(number, Finished(outer_step=10, digest=digest))
            self.director.exited(number, 0)


def test_reports_survive_the_wire() -> None:
    for report in (Loaded(), Joined(1, 2.5), Averaged(1, 2, 3, 0.5, 4, 5, 6.5), Finished(9, "ab")):
        assert decode(encode(report)) == report


def test_a_founder_is_killed_and_the_understudy_joins() -> None:
    harness = DirectorHarness()
    harness.begin()
    assert harness.orders == [("go", 0), ("go", 1), ("go", 2)]
    for step in range(1, 5):
        harness.play_round(step, 0, 1, 2)
    assert len(harness.orders) == 3
    harness.play_round(5, 0, 1, 2)
    assert harness.orders[3:] == [("kill", 2)]
    harness.director.exited(2, -9)
    harness.play_round(6, 0, 1)
    assert harness.orders[4:] == [("go", 3)]
    harness.hear(3, Joined(outer_step=6, validation_loss=3.0))
    for step in range(7, 11):
        harness.play_round(step, 0, 1, 3)
    assert not harness.director.over
    harness.finish(0, 1, 3)
    assert harness.director.over and harness.director.verdict() is None
    assert harness.director.validation_losses() == (5.5, 3.0)


def test_data_parallel_bytes_count_a_ring_all_reduce_per_inner_step() -> None:
    harness = DirectorHarness(chaos=False)
    harness.begin()
    harness.play_round(1, 0, 1, 2)
    harness.play_round(2, 0, 1)
    expected = 5 * PARAMETER_BYTES * (2 * 2 / 3 + 2 * 1 / 2)
    assert harness.director.peers[0].data_parallel_bytes == pytest.approx(expected)


def test_differing_digests_are_a_failure() -> None:
    harness = DirectorHarness(chaos=False)
    harness.begin()
    harness.play_round(1, 0, 1, 2)
    harness.finish(0, 1)
    harness.finish(2, digest="other")
    assert "digests differ" in (harness.director.verdict() or "")


def test_a_loss_that_does_not_fall_is_a_failure() -> None:
    harness = DirectorHarness(chaos=False)
    harness.begin()
    harness.play_round(1, 0, 1, 2, loss=5.4)
    harness.finish(0, 1, 2)
    assert "did not fall: 5.500 at first, 5.400" in (harness.director.verdict() or "")


def test_a_survivor_that_ends_early_is_a_failure() -> None:
    harness = DirectorHarness(chaos=False)
    harness.begin()
    harness.director.exited(1, 1)
    assert harness.director.over
    assert harness.director.verdict() == "peer 1, training, ended with exit status 1"


def test_an_understudy_that_comes_too_late_is_a_failure() -> None:
    harness = DirectorHarness()
    harness.begin()
    harness.hear(3, Joined(outer_step=0, validation_loss=5.5))
    assert "too late" in (harness.director.verdict() or "")


def test_a_missing_package_is_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    absent = lambda name, *of: None if name == "matplotlib" else find(name, *of)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert cli.main(["demo"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "matplotlib not found" in message and 'pip install -e ".[demo]"' in message


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--peers", "1"], "at least 2 peers"),
        (["--peers", "100000"], "100000 peers are too many for this machine"),
        (["--steps", "5"], "or use --no-chaos"),
        (["--output", "no/such/place.png"], "cannot write no/such/place.png: No such file"),
        (["--output", "/proc/place.png"], "cannot write /proc/place.png"),
        (["--output", "."], "cannot write .: Is a directory"),
        (["--output", "place.docx"], "a chart can be .*png.*, not docx"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *words]) == 2
    assert re.match(f"pccl demo: .*{why}", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_had_no_time_to_fall_is_no_failure() -> None:
    harness = DirectorHarness(chaos=False)
    harness.director.steps = 1
    harness.begin()
    harness.play_round(1, 0, 1, 2, loss=5.4)
    harness.finish(0, 1, 2)
    assert harness.director.verdict() is None


def test_as_many_peers_as_the_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for cores, least, most in ((1, 3, 4), (1000, 3, 3999)):
        monkeypatch.setattr("os.cpu_count", lambda n=cores: n)
        assert cli.main(["demo", "--peers", "1000000"]) == 2
        told = re.search(r"which has room for (\d+)", capsys.readouterr().err)
        assert told is not None and least <= int(told[1]) <= most


@pytest.mark.slow  # .ci/run has the whole demo
def test_a_short_run_with_a_kill_and_a_join(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    done = subprocess.run(
        [*COMMAND, "--steps", "7", "--inner-steps", "2", "--output", str(chart)],
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer 2 was killed amid outer step" in done.stdout
    assert "peer 3 has joined at outer step" in done.stdout
    assert "outer step 7/7" in done.stdout
    digests = re.findall(r"\b[0-9a-f]{8}\b", done.stdout)
    assert len(digests) == 3 and len(set(digests)) == 1
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "wire"), [("delayed", "int4"), ("streaming", "e3m0")])
def test_a_short_run_in_another_mode(tmp_path: Path, mode: str, wire: str) -> None:
    words = ["--steps", "7", "--inner-steps", "4", "--output", str(tmp_path / "chart.png")]
    done = subprocess.run(
        [*COMMAND, *words, "--mode", mode, "--wire", wire],
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer 3 has joined at outer step" in done.stdout
    digests = re.findall(r"\b[0-9a-f]{8}\b", done.stdout)
    assert len(digests) == 3 and len(set(digests)) == 1


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal and asks for a process group")
def test_ctrl_c_leaves_no_process_behind() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--no-chaos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "processes are loading" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the children too
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and errors == "pccl demo: interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
