"""Processes for end-to-end tests: scripts that report as JSON lines, and masters."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts

Report = dict[str, Any]


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
