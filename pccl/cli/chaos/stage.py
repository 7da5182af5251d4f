"""The processes of a run under faults: a master and copies of a program, and what harms them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pccl.cli.chaos import kinds
from pccl.cli.chaos.network import Network, NetworkError, Undo
from pccl.cli.processes import Process, tail

if sys.platform == "linux":
    import resource

TERMINATED_S = 10.0  # after SIGTERM until the master is killed
STARVED_S = 0.09, 0.01  # stopped and running, in turns
FREE_FILES = 2  # descriptors that are left
FULL_BYTES = 1  # the size to which files can grow on a full disk
SPIN = "while True: pass"
Command = Callable[
    [int, Sequence["Copy"]], Sequence[str]
]  # of a copy, given its number and the living copies


def nothing() -> None:
    """The undo of a fault that needs none."""


@dataclass(eq=False)
class Copy:
    number: int  # in the order of their starts
    host: int  # its number among those of the network, if there is one
    process: Process  # that runs it
    log: Path  # the file that has what it prints
    began_s: float  # when it was started
    befell: list[tuple[float, str]] = field(default_factory=list)  # when each fault hit it
    stopped: bool = False  # whether it is frozen at this moment
    settled: bool = False  # whether it has been in the run together with all others
    ended_s: float | None = None  # when it had ended
    by_us: bool = False  # whether it was killed

    def tail(self) -> str:
        return tail(self.log)


class Stage:
    """A master and copies of a program."""

    def __init__(
        self,
        command: Command,  # of each copy
        directory: Path,  # for the master's files, and for what the copies print
        environment: Mapping[str, str],  # of all
        *,
        steered: bool = False,  # whether the copies read orders from their stdin
        network: Network | None = None,  # the hosts on which they run; None: on this one
        curve_dir: str = "",  # keys, for an encrypted run
    ) -> None:
        self.copies: list[Copy] = []  # all that were ever started
        self.directory = directory
        self.event_log = directory / "master.jsonl"  # the master's
        self.network = network
        self.master: Process | None = None  # its process
        self.master_starts = 0  # how often the master was started
        self._command = command
        self._steered = steered
        self._curve_dir = curve_dir
        host = "127.0.0.1" if network is None else network.addresses[0]
        with socket.create_server(("127.0.0.1", 0)) as server:  # finds a free port
            self.address = f"{host}:{server.getsockname()[1]}"  # of the master
        self._environment = {**environment, "PCCL_MASTER": self.address, "PYTHONUNBUFFERED": "1"}
        if network is not None:
            self._environment["PCCL_TRANSPORT"] = "tcp"

    def alive(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.ended_s is None]

    def start_master(self) -> None:
        command = [sys.executable, "-P", "-m", "pccl.cli.chaos.steered"]
        command += ["--listen-address", self.address]
        command += ["--state", str(self.directory / "journal"), "--event-log", str(self.event_log)]
        if self._curve_dir:
            command += ["--curve-dir", self._curve_dir]
        self.master_starts += 1
        self.master = self._start(0, command, self.directory / "master.log", "ab", {}, stdin=True)

    def kill_master(self) -> None:
        if self.master is not None:
            self.master.close()

    def start(self) -> Copy:
        number = len(self.copies)
        taken = {copy.host for copy in self.alive()}
        host = next(i for i in range(1, len(taken) + 2) if i not in taken)
        log = self.directory / f"copy-{number}.log"
        command = self._command(number, self.alive())
        mine = {"LOCAL_RANK": str(number)}
        process = self._start(host, command, log, "wb", mine, stdin=self._steered)
        copy = Copy(number, host, process, log, time.monotonic())
        self.copies.append(copy)
        return copy

    def kill(self, copy: Copy) -> None:
        """Ends it at once, with all that it has started."""
        copy.by_us = True
        copy.process.close()
        copy.process.kill_strays()
        self.reap()

    def reap(self) -> list[Copy]:
        """The copies that have ended since the last call."""
        ended = [copy for copy in self.alive() if copy.process.poll() is not None]
        for copy in ended:
            copy.ended_s = time.monotonic()
        return ended

    def close(self) -> None:
        for copy in self.alive():
            self.kill(copy)
        if self.master is not None:
            self.master.signal(signal.SIGTERM)
            self.master.wait(TERMINATED_S)
        self.kill_master()

    def _start(
        self,
        host: int,
        command: Sequence[str],
        log: Path,
        mode: str,
        environment: Mapping[str, str],
        *,
        stdin: bool,
    ) -> Process:
        if self.network is not None:
            command = self.network.command(host, command)
        with log.open(mode) as file:
            return Process(
                command,
                {**self._environment, **environment},
                stdin=stdin,
                stdout=file,
                stderr=file,
            )

    # ---- harm; each returns what takes it back ----

    def harm(self, what: str, copy: Copy) -> Undo:
        """Inflicts a fault on a copy. Faults of the program's own are left to the copy."""
        match what:
            case kinds.FREEZE:
                return self._freeze(copy)
            case kinds.STARVE:
                return _starve(copy)
            case kinds.NO_FILES:
                return _exhaust(copy)
            case kinds.KILL:
                self.kill(copy)
            case kinds.RESET if self.network is not None:
                self.network.reset(copy.host)
            case _ if self.network is not None and what in kinds.KINDS:
                try:
                    return self.network.harm(what, copy.host)
                except NetworkError:
                    return nothing  # two faults of one host at once
            case _:
                copy.process.say(what)  # one of the program's own faults
        return nothing

    def harm_master(self, what: str) -> Undo:
        master = self.master
        assert master is not None
        match what:
            case kinds.RESTART:
                self.kill_master()
                return self.start_master
            case kinds.FULL_DISK:
                return self._limit_master("fsize", FULL_BYTES)
            case kinds.NO_FILES_MASTER:
                return self._limit_master("nofile", FREE_FILES)
            case kinds.FREEZE_MASTER if sys.platform != "win32":
                master.signal(signal.SIGSTOP)
                return lambda: master.signal(signal.SIGCONT)
        return nothing

    def burn(self, processors: int) -> Undo:
        command = [sys.executable, "-S", "-E", "-c", SPIN]
        burners = [Process(command, os.environ) for _ in range(processors)]

        def end() -> None:
            for burner in burners:
                burner.close()

        return end

    @staticmethod
    def _freeze(copy: Copy) -> Undo:
        if sys.platform == "win32":
            return nothing
        copy.stopped = True
        copy.process.signal(signal.SIGSTOP)

        def thaw() -> None:
            copy.stopped = False
            copy.process.signal(signal.SIGCONT)

        return thaw

    def _limit_master(self, what: str, number: int) -> Undo:
        master = self.master
        assert master is not None
        master.say(f"{what} {number}")  # see steered.py

        def lift() -> None:
            if self.master is master:  # another one was started without the limit
                master.say(what)

        return lift


def _starve(copy: Copy) -> Undo:
    over = threading.Event()

    def starve() -> None:
        if sys.platform == "win32":
            return
        while not over.is_set():
            copy.process.signal(signal.SIGSTOP)
            over.wait(STARVED_S[0])
            copy.process.signal(signal.SIGCONT)
            over.wait(STARVED_S[1])

    thread = threading.Thread(target=starve, daemon=True)
    thread.start()

    def feed() -> None:
        over.set()
        thread.join()

    return feed


def _exhaust(copy: Copy) -> Undo:
    """Limits a process to a few more descriptors than it has open."""
    if sys.platform != "linux":
        return nothing
    pid, which = copy.process.pid, resource.RLIMIT_NOFILE
    try:
        before = resource.prlimit(pid, which)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, which, (min(used + FREE_FILES, before[1]), before[1]))
    except OSError:
        return nothing  # it has ended just now

    def lift() -> None:
        try:
            resource.prlimit(pid, which, before)
        except OSError:
            pass

    return lift
