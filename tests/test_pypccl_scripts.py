"""Scripts written for pypccl 1.0 run unchanged, while peers of theirs are killed and others join.

They use the compatible names only, in the ways that pypccl's users have: see tests/pypccl. Each
reports, for each step that it takes, the digest of its weights, which must be the same on all.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pccl

SCRIPTS = Path(__file__).with_name("pypccl")
PATIENCE_S = 100.0
Report = dict[str, Any]


class Script:
    """A script in a process of its own, and what it has reported."""

    def __init__(self, name: str, *words: object) -> None:
        self.reports: list[Report] = []
        self._news: queue.Queue[Report | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(json.loads(line))
        self._news.put(None)

    def wait_for(self, wanted: Callable[[Report], bool]) -> None:
        """Until it has reported what is wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            report = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            assert report is not None, f"the script has ended ({self.process.wait()})"
            self.reports.append(report)
            if wanted(report):
                return

    def kill(self) -> None:
        if self.process.returncode is not None:
            return
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        while (report := self._news.get_nowait()) is not None:
            self.reports.append(report)


Start = Callable[..., Script]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(name, *words) starts a script at a fresh master; all are killed in the end."""
    started: list[Script] = []
    with pccl.MasterNode("127.0.0.1:0") as master:

        def one(name: str, *words: object) -> Script:
            started.append(Script(name, master.address, *words))
            return started[-1]

        yield one
        for script in started:
            script.kill()


def whole(world: int) -> Callable[[Report], bool]:
    return lambda report: report["world"] == world


def learnt(script: Script) -> None:
    """It goes on until its model is right."""
    script.wait_for(lambda report: report["loss"] < 0.05)


def agree(scripts: list[Script]) -> None:
    """Whoever of a group has reported a step had the same weights then."""
    digests: dict[tuple[int, int], str] = {}
    steps = 0
    for script in scripts:
        script.kill()
        for report in script.reports:
            steps += 1
            at = report["group"], report["step"]
            if report["digest"]:
                assert digests.setdefault(at, report["digest"]) == report["digest"], report
    assert steps > len(digests) > 0, "no step was reported by two peers"


@pytest.mark.timeout(150)  # to import torch takes its time on a busy machine
@pytest.mark.parametrize("name", ["ddp", "diloco", "async_diloco"])
def test_peers_are_killed_and_join(start: Start, name: str) -> None:
    if name == "diloco":
        pytest.importorskip("torch", reason="this script trains with it")
    scripts = [start(name, seed) for seed in range(3)]
    for script in scripts:
        script.wait_for(whole(3))
    scripts[0].kill()
    for script in scripts[1:]:
        script.wait_for(whole(2))
    late = start(name, 7)
    for script in (*scripts[1:], late):
        script.wait_for(whole(3))
    scripts[1].kill()
    for script in (scripts[2], late):
        script.wait_for(whole(2))
        learnt(script)
    agree([*scripts, late])


def test_a_peer_of_one_group_is_killed_and_another_joins(start: Start) -> None:
    scripts = [start("fsdp", seed, seed % 2) for seed in range(4)]  # two replicas of two shards
    for script in scripts:
        script.wait_for(whole(2))
    third = start("fsdp", 4, 0)
    for script in (scripts[0], scripts[2], third):
        script.wait_for(whole(3))
    scripts[0].kill()
    for script in (scripts[2], third):
        script.wait_for(whole(2))
    late = start("fsdp", 5, 0)
    for script in (scripts[2], third, late):
        script.wait_for(whole(3))
    for script in (*scripts[1:], third, late):
        learnt(script)
    agree([*scripts, third, late])
