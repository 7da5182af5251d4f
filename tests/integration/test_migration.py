"""The examples behind the pages in docs/howto/migrate, run by real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pccl

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Process:
    """A peer that runs an example, and what it has printed."""

    def __init__(self, example: str, master: pccl.MasterNode, *words: str) -> None:
        command = [sys.executable, EXAMPLES / example, "--master-address", master.address, *words]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Reads on until a line matches; the test's time limit is that of the wait."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)
            found = re.match(pattern, line)
            if found:
                return found
        raise AssertionError(f"no {pattern!r} in {''.join(self.lines)}")


@contextmanager
def peers_of(example: str, *words: str) -> Iterator[Callable[..., Process]]:
    """A master, and what starts a peer of it: an example with these and further arguments."""
    started: list[Process] = []

    def start(*more: str) -> Process:
        started.append(Process(example, master, *words, *more))
        return started[-1]

    with pccl.MasterNode("127.0.0.1:0") as master:
        try:
            yield start
        finally:
            for process in started:
                process.popen.kill()
                process.popen.communicate()


def test_a_script_of_pypccl() -> None:
    with peers_of("from_pypccl.py") as start:
        for peer in [start("--target", "1"), start("--target", "2")]:
            assert peer.until("weights (.*)")[1] == "1.5000"
            assert "step 20, 2 peers\n" in peer.lines


@pytest.mark.slow
def test_a_script_of_torch_distributed() -> None:
    pytest.importorskip("torch")
    with peers_of("from_torch_distributed.py") as start:
        peers = [start("--seed", "1"), start("--seed", "2")]
        ends = [peer.until("weights (.*)")[1] for peer in peers]
        assert ends[0] == ends[1]
        assert any(line.startswith("step 20: loss") for line in peers[0].lines)


@pytest.mark.slow  # three processes that load torch
def test_a_script_of_torchft() -> None:
    """A peer joins and another one is killed; those who live go on with equal weights."""
    pytest.importorskip("torch")
    with peers_of("from_torchft.py", "--steps", "1000000") as start:
        founder, victim = start("--seed", "1"), start("--seed", "2")
        founder.until("step 10: 2 peers")
        newcomer = start("--seed", "3")
        newcomer.until("step .*: 3 peers")
        victim.popen.kill()
        theirs = newcomer.until("step (.*): 2 peers, weights (.*)")
        ours = founder.until(rf"step {theirs[1]}: 2 peers, weights (.*)")
        assert ours[1] == theirs[2]
