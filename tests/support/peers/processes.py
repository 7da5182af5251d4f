"""Processes for end-to-end tests: masters, scripts that report as JSON lines, and peers.

A `Worker` (worker.py) makes collectives without end, a `Puppet` (puppet.py) the calls of a test.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import scripts
from peers.waiting import PATIENCE_S

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
Report = dict[str, Any]


def stop(process: subprocess.Popen[str]) -> None:
    """SIGSTOP; returns when a child stands still: before that, some of its threads may go on."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


class Reporter:
    """A script in a process of its own, and what it has reported."""

    def __init__(self, script: Path, *words: object, patience_s: float) -> None:
        self.reports: list[Report] = []
        self._patience_s = patience_s
        self.news: queue.Queue[Report | None] = queue.Queue()
        self.process = scripts.start(script, *words)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.news.put(json.loads(line))
        self.news.put(None)

    def wait_for(self, wanted: Callable[[Report], bool]) -> Report:
        """The next report that is wanted."""
        deadline = time.monotonic() + self._patience_s
        while True:
            report = self.news.get(timeout=max(0.0, deadline - time.monotonic()))
            assert report is not None, f"{self.process.args} ended ({self.process.wait()})"
            self.reports.append(report)
            if wanted(report):
                return report

    def kill(self) -> None:
        """SIGKILL; what it had reported until then is taken in. Once is enough."""
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            return
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        while (report := self.news.get_nowait()) is not None:
            self.reports.append(report)


class Master:
    """`python -m pccl.master`, at an address that stays the same when it is started again."""

    def __init__(self, *options: str, **env: str) -> None:
        self.address = "127.0.0.1:0"
        self._options, self._env = options, {**os.environ, **env}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pccl.master", "--listen-address", self.address, *self._options],
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


WORKER = PROGRAMS / "worker.py"


class Worker(Reporter):
    """A peer process and what it has reported."""

    def __init__(self, master: str, slot: int, count: int, what: str = "all_reduce") -> None:
        self.slot = slot
        super().__init__(WORKER, master, slot, count, what, patience_s=PATIENCE_S)


def agree(workers: list[Worker]) -> None:
    """All peers that reported a step reported the same outcome: the sum of its contributions."""
    outcomes: dict[int, tuple[int, int]] = {}
    for worker in workers:
        for report in worker.reports:
            if "step" not in report:
                continue
            outcome = report["world"], report["value"]
            assert outcomes.setdefault(report["step"], outcome) == outcome
            if report["what"] == "broadcast":
                assert report["value"].bit_count() == 1, report
                continue
            assert report["value"].bit_count() == report["world"], report
            assert report["value"] >> worker.slot & 1, "its own contribution is missing"


PUPPET = PROGRAMS / "puppet.py"
Start = Callable[..., "Puppet"]
Answer = dict[str, Any]


class Puppet:
    """A peer process that makes the calls it is told to (puppet.py)."""

    def __init__(self, master: str, group: int = 0, pool_size: int = 0, **env: str) -> None:
        self.process = scripts.start(PUPPET, master, group, pool_size, env=env)
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))

    def begin(self, what: str, **arguments: object) -> None:
        """Makes it call; `end` has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def end(self) -> Answer:
        return self._answers.get(timeout=PATIENCE_S)

    def value(self) -> Any:
        answer = self.end()
        assert "value" in answer, answer
        return answer["value"]

    def call(self, what: str, **arguments: object) -> Any:
        self.begin(what, **arguments)
        return self.value()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def together(puppets: list[Puppet], what: str, **arguments: object) -> list[Any]:
    """All make the same call at the same time."""
    for puppet in puppets:
        puppet.begin(what, **arguments)
    return [puppet.value() for puppet in puppets]


def gathered(start: Start, groups: list[int], **options: object) -> list[Puppet]:
    """Puppets that are all accepted, in this order."""
    puppets = [start(group, **options) for group in groups]
    for size, newcomer in enumerate(puppets, 1):
        newcomer.begin("connect")
        for other in puppets[: size - 1]:
            other.begin("gather", size=size)
        assert [puppet.value() for puppet in puppets[:size]] == [None] * size
    return puppets
