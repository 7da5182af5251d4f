"""The programs and commands of the README run as they stand there, and survive a kill."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:48148"


class Peers:
    """Processes that run a program, and what they print."""

    def __init__(self, program: str, master: str, folder: Path) -> None:
        assert ADDRESS in program
        self._words = [sys.executable, "-c", program.replace(ADDRESS, master)]
        self._folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        peer = subprocess.Popen(
            self._words,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(peer)
        return peer

    def kill(self) -> None:
        for peer in self.started:
            peer.kill()
            peer.communicate()


def wait_for(peer: subprocess.Popen[str], pattern: str) -> None:
    assert peer.stdout is not None
    for line in peer.stdout:
        if re.search(pattern, line):
            return
    raise AssertionError(f"it ended without {pattern}: {peer.communicate()}")


def end(peer: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> str:
    output, errors = peer.communicate(timeout=patience_s)
    assert peer.returncode == 0, errors
    return output


def program_of_the_readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return program


@pytest.mark.slow
def test_the_loop_survives_a_kill_and_a_peer_that_joins(tmp_path: Path) -> None:
    """All peers at the end hold the same weights."""
    program = program_of_the_readme()
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = Peers(program, master.address, tmp_path)
        try:
            first, second, dies = (peers.start() for _ in range(3))
            wait_for(first, r"^step \d+: 3 peers")
            dies.kill()
            wait_for(first, r"^step \d+: 2 peers")
            joins = peers.start()
            wait_for(first, r"^step \d+: 3 peers")
            ends = [end(peer, 180).splitlines()[-1] for peer in (first, second, joins)]
        finally:
            peers.kill()
    assert len(set(ends)) == 1 and ends[0].startswith("weights ")


def test_the_example_of_the_quick_start(tmp_path: Path) -> None:
    program = (ROOT / "examples" / "all_reduce.py").read_text(encoding="utf-8")
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = Peers(program, master.address, tmp_path)
        try:
            outputs = [end(peer) for peer in [peers.start(), peers.start()]]
        finally:
            peers.kill()
    assert all("the mean over 2 peers is 1.5" in output for output in outputs)


@pytest.mark.parametrize("command", ["pccl demo", "pytest"])
def test_each_of_the_two_commands_is_one_line(command: str) -> None:
    """.ci/run takes them from there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = rf"^python3 -m venv \.venv && .*{command}$"
    assert len(re.findall(pattern, text, re.MULTILINE)) == 1


@pytest.mark.parametrize("number", [2, 3])
def test_the_launcher_runs_as_many_as_it_is_told(
    number: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    program = [sys.executable, str(ROOT / "examples" / "all_reduce.py")]
    status = cli.main(["run", "-n", str(number), "--", *program])
    out, err = capfd.readouterr()
    assert status == 0, err
    assert out.count(f"the mean over {number} peers is {(1 + number) / 2}") == number
