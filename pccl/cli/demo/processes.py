"""Processes of one run: a master, and a peer for each training process. None outlives this one.

Each has a pipe as stdin and ends when the pipe closes, so all end even if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO

from pccl.support.closing import Closing

_START_TIMEOUT_S = 60.0
_ERROR_LINES = 15  # of a failed process's stderr that are shown


class Fleet(Closing):
    """Starts processes, reads what they print, and ends them all in `close`.

    Attributes:
        heard: (number of the peer, line of its stdout), and (number, exit status) when it has
            ended.
    """

    def __init__(self, peer: str, path: str = "") -> None:
        """`peer` is the module that a training process runs, and is looked for in `path` first."""
        self._peer = peer
        paths = [each for each in (path, os.environ.get("PYTHONPATH")) if each]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.heard: queue.Queue[tuple[int, str | int]] = queue.Queue()
        self._processes: dict[int | str, subprocess.Popen[str]] = {}
        self._errors: dict[int | str, IO[str]] = {}
        self._readers: list[threading.Thread] = []

    def close(self) -> None:
        """Ends them all."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for reader in self._readers:
            reader.join()  # at once, for what it reads has ended
        for stream in self._errors.values():
            stream.close()

    def start_master(self) -> str:
        """Starts the master.

        Returns:
            Its address, host:port.

        Raises:
            RuntimeError: it did not start; with what it said.
        """
        answer: queue.Queue[str] = queue.Queue()
        self._start("master", "pccl.cli.demo.master", [], lambda said: answer.put(said.readline()))
        try:
            address = answer.get(timeout=_START_TIMEOUT_S).strip()
        except queue.Empty:
            address = ""
        if not address:
            raise RuntimeError(f"the master did not start\n{self.errors('master')}")
        return address

    def start_peer(self, number: int, options: dict[str, object]) -> None:
        """Starts a training process with `options` as its command line."""
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]

        def read(said: IO[str]) -> None:
            for line in said:
                self.heard.put((number, line))
            self.heard.put((number, self._processes[number].wait()))

        self._start(number, self._peer, ["--number", str(number), *words], read)

    def go(self, number: int) -> None:
        """Lets a peer join the run. If it is gone, that will be heard."""
        self.say(number, "go")

    def say(self, number: int, line: str) -> None:
        """Writes a line to the stdin of a peer. If it is gone, that will be heard."""
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{line}\n")
            stdin.flush()

    def kill(self, number: int) -> None:
        """Ends a peer as a power cut would: SIGKILL, or TerminateProcess on Windows."""
        self._processes[number].kill()

    def errors(self, who: int | str) -> str:
        """The end of what a process has written to stderr."""
        stream = self._errors[who]
        stream.seek(0)
        return "".join(stream.readlines()[-_ERROR_LINES:])

    def _start(
        self, who: int | str, module: str, words: list[str], read: Callable[[IO[str]], None]
    ) -> None:
        """Starts `python -m module`; `read` gets its stdout, in a thread."""
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._errors[who] = errors
        process = self._processes[who] = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],  # -P: not what lies in this directory
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )

        def read_all() -> None:
            assert process.stdout is not None
            with process.stdout as said:
                read(said)

        reader = threading.Thread(target=read_all, daemon=True)
        self._readers.append(reader)
        reader.start()
