"""Python scripts in processes of their own, which begin at once.

They are forked from a server that has imported what takes time: torch and its optimizers alone take
a new process two seconds. Windows cannot fork: there each script is a new process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from pccl.runtime.config import configure_logging

# Whichever are installed. The optimizers of torch import torch._dynamo.
SLOW = ["numpy", "torch", "torch._dynamo", "pccl", "pccl.diloco", "pytest"]


def start(
    path: str | Path, *words: object, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str] | Script:
    """Runs a script as `__main__`; its standard input and output are pipes.

    Args:
        path: of the script.
        words: its arguments.
        env: what its environment has beside that of this process.
    """
    command = [str(path), *map(str, words)]
    environment = {**os.environ, **(env or {})}
    if sys.platform == "win32":
        pipe = subprocess.PIPE
        python = [sys.executable, *command]
        return subprocess.Popen(python, stdin=pipe, stdout=pipe, text=True, env=environment)
    return Script(command, environment)


class Script:
    """A forked script, which `start` returns: the part of a Popen that tests use."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.args = command
        self.returncode: int | None = None  # until `wait` has returned
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(SLOW)
        theirs_in, ours_in = context.Pipe(duplex=False)
        ours_out, theirs_out = context.Pipe(duplex=False)
        arguments = (command, environment, theirs_in, theirs_out)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs_in.close()
        theirs_out.close()
        self.stdin = _file(ours_in, "w")
        self.stdout = _file(ours_out, "r")

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit status when it has ended: of a signal, the negated number.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        self._process.join(timeout)
        status: int | None = self._process.exitcode
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = status
        return status


def _file(connection: Connection, mode: str) -> IO[str]:
    """The pipe as a file of lines."""
    descriptor = os.dup(connection.fileno())
    connection.close()
    return os.fdopen(descriptor, mode)


def _run(
    command: list[str], environment: dict[str, str], stdin: Connection, stdout: Connection
) -> None:
    """In the process of the script."""
    os.environ.clear()
    os.environ.update(environment)
    for number, connection in enumerate((stdin, stdout)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.argv = command
    logging.getLogger("pccl").handlers.clear()  # those of the server's environment
    configure_logging()
    runpy.run_path(command[0], run_name="__main__")
