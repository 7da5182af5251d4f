"""The processes of a run under faults: a master, and copies of a program. All end with this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pccl.cli.chaos.network import Network

EVENT_LOG = "master.jsonl"
TAIL_BYTES = 4000  # of what a copy has printed, to find why it failed
TAIL_LINES = 12
Command = Callable[[int, Sequence["Copy"]], Sequence[str]]  # of a copy: its number, who lives


@dataclass(eq=False)
class Copy:
    """One copy of the program.

    Attributes:
        number: in the order of their starts.
        host: of those of the network, if there is one.
        process: that runs it.
        log: the file that has what it prints.
        began_s: when it was started.
        befell: when what befell it.
        stopped: whether it is frozen at this moment.
        settled: whether it has been in the run together with all others.
        ended_s: when it had ended.
        by_us: whether it was killed.
    """

    number: int
    host: int
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    befell: list[tuple[float, str]] = field(default_factory=list)
    stopped: bool = False
    settled: bool = False
    ended_s: float | None = None
    by_us: bool = False

    @property
    def status(self) -> int | None:
        """With which it has ended."""
        return self.process.returncode

    def tail(self) -> str:
        """The end of what it has printed."""
        data = self.log.read_bytes()[-TAIL_BYTES:]
        return "\n".join(data.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def say(self, line: str) -> None:
        """Writes a line to its stdin, if that is ours. If it is gone, that will be noticed."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.process.stdin.write(f"{line}\n".encode())
                self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal to it and to the processes that it has made."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self.process.terminate()
            else:
                os.killpg(self.process.pid, number)


class Stage:
    """A master and copies of a program.

    Args:
        command: of each copy.
        directory: for the master's files, and for what the copies print.
        environment: of all.
        steered: whether the copies read orders from their stdin.
        network: the hosts on which they run; None: on this one.
        curve_dir: keys, for an encrypted run.

    Attributes:
        copies: all that were ever started.
        address: of the master.
        master_starts: how often the master was started.
    """

    def __init__(
        self,
        command: Command,
        directory: Path,
        environment: Mapping[str, str],
        *,
        steered: bool = False,
        network: Network | None = None,
        curve_dir: str = "",
    ) -> None:
        self.copies: list[Copy] = []
        self.directory = directory
        self.network = network
        self.master: subprocess.Popen[bytes] | None = None
        self.master_starts = 0
        self._command = command
        self._steered = steered
        self._curve_dir = curve_dir
        host = "127.0.0.1" if network is None else network.addresses[0]
        with socket.create_server(("127.0.0.1", 0)) as server:  # finds a free port
            self.address = f"{host}:{server.getsockname()[1]}"
        self._environment = {**environment, "PCCL_MASTER": self.address, "PYTHONUNBUFFERED": "1"}
        if network is not None:
            self._environment["PCCL_TRANSPORT"] = "tcp"

    @property
    def event_log(self) -> Path:
        """The master's event log."""
        return self.directory / EVENT_LOG

    def alive(self) -> list[Copy]:
        """The copies that run."""
        return [copy for copy in self.copies if copy.ended_s is None]

    def start_master(self) -> None:
        """Starts it, for the first time or again."""
        command = [sys.executable, "-P", "-m", "pccl.cli.chaos.steered"]
        command += ["--listen-address", self.address]
        command += ["--state", str(self.directory / "journal"), "--event-log", str(self.event_log)]
        if self._curve_dir:
            command += ["--curve-dir", self._curve_dir]
        self.master_starts += 1
        with (self.directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                self._at(0, command),
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=os.name == "posix",
            )

    def kill_master(self) -> None:
        """Kills it."""
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            assert self.master.stdin is not None
            with contextlib.suppress(OSError):  # what it had not read
                self.master.stdin.close()

    def tell_master(self, order: str) -> None:
        """Gives it an order, see steered.py."""
        assert self.master is not None and self.master.stdin is not None
        with contextlib.suppress(OSError):  # it has died, which will be noticed
            self.master.stdin.write(f"{order}\n".encode())
            self.master.stdin.flush()

    def start(self) -> Copy:
        """Starts one more copy."""
        number = len(self.copies)
        taken = {copy.host for copy in self.alive()}
        host = next(i for i in range(1, len(taken) + 2) if i not in taken)
        path = self.directory / f"copy-{number}.log"
        environment = {**self._environment, "LOCAL_RANK": str(number)}
        with path.open("wb") as log:
            process = subprocess.Popen(
                self._at(host, self._command(number, self.alive())),
                env=environment,
                stdin=subprocess.PIPE if self._steered else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=os.name == "posix",  # Ctrl-C reaches it by way of us
            )
        copy = Copy(number, host, process, path, time.monotonic())
        self.copies.append(copy)
        return copy

    def kill(self, copy: Copy) -> None:
        """SIGKILL, or TerminateProcess."""
        copy.by_us = True
        copy.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        copy.process.wait()
        self.reap()

    def reap(self) -> list[Copy]:
        """The copies that have ended since the last call."""
        ended = [copy for copy in self.alive() if copy.process.poll() is not None]
        for copy in ended:
            copy.ended_s = time.monotonic()
            copy.signal(getattr(signal, "SIGKILL", signal.SIGTERM))  # what it leaves behind
            if copy.process.stdin is not None:
                with contextlib.suppress(OSError):
                    copy.process.stdin.close()
        return ended

    def close(self) -> None:
        """Ends all that still runs."""
        for copy in self.alive():
            self.kill(copy)
        if self.master is not None and self.master.poll() is None:
            self.master.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.master.wait(10)
        self.kill_master()

    def _at(self, host: int, command: Sequence[str]) -> list[str]:
        return [*command] if self.network is None else self.network.command(host, command)
