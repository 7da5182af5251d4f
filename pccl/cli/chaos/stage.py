"""The processes of a run under faults: a master and copies of a program; and the faults."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pccl.cli.chaos import kinds
from pccl.cli.chaos.network import Network, NetworkError, Undo
from pccl.cli.processes import Process, free_address, tail
from pccl.master import main

if sys.platform != "win32":
    import resource

    LIMITS = {"fsize": resource.RLIMIT_FSIZE, "nofile": resource.RLIMIT_NOFILE}

TERMINATED_S = 10.0  # from SIGTERM until the master is killed
STARVED_S = 0.09, 0.01  # stopped and running, in turns
FREE_FILES = 2  # descriptors that remain free
FULL_BYTES = 1  # the size to which files can grow on a full disk
SPIN = "while True: pass"
STEERED = f"import {__name__} as stage; stage.serve_steered()"
STOP, CONTINUE = getattr(signal, "SIGSTOP", 0), getattr(signal, "SIGCONT", 0)  # not on Windows


@dataclass(eq=False)
class Copy:
    number: int  # in the order of their starts
    host: int  # its number among those of the network, if there is one
    process: Process  # the process that runs it
    log: Path  # the file with its output
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
        directory: Path,  # for the master's files and the copies' output
        environment: Mapping[str, str],  # variables of all processes
        *,
        steered: bool = False,  # whether the copies read orders from their stdin
        network: Network | None = None,  # the hosts on which they run; None: on this one
        curve_dir: str = "",  # keys, for an encrypted run
    ) -> None:
        self.copies: list[Copy] = []  # all that were ever started
        self.directory = directory
        self.event_log = directory / "master.jsonl"  # the master's
        self.network = network
        self.master: Process | None = None
        self.master_starts = 0
        self._steered = steered
        self._curve_dir = curve_dir
        address = free_address() if network is None else free_address(network.addresses[0])
        more = {"PCCL_MASTER": address, "PYTHONUNBUFFERED": "1"}
        more |= {} if network is None else {"PCCL_TRANSPORT": "tcp"}
        self._environment = {**environment, **more}

    def alive(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.ended_s is None]

    def start_master(self) -> None:
        options = {
            "--listen-address": self._environment["PCCL_MASTER"],
            "--state": str(self.directory / "journal"),
            "--event-log": str(self.event_log),
        } | ({"--curve-dir": self._curve_dir} if self._curve_dir else {})
        command = [sys.executable, "-P", "-c", STEERED]
        command += [word for option in options.items() for word in option]
        self.master_starts += 1
        self.master = self._start(0, command, self.directory / "master.log", {}, stdin=True)

    def start(self, command: Sequence[str]) -> Copy:
        """Starts the next copy, by this command."""
        number = len(self.copies)
        taken = {copy.host for copy in self.alive()}
        host = next(i for i in range(1, len(taken) + 2) if i not in taken)
        log = self.directory / f"copy-{number}.log"
        mine = {"LOCAL_RANK": str(number)}
        process = self._start(host, command, log, mine, stdin=self._steered)
        self.copies.append(Copy(number, host, process, log, time.monotonic()))
        return self.copies[-1]

    def kill(self, copy: Copy) -> None:
        """Ends a copy at once, with all processes that it has started."""
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
            self.master.close()

    def _start(
        self,
        host: int,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        stdin: bool,
    ) -> Process:
        if self.network is not None:
            command = self.network.command(host, command)
        environment = {**self._environment, **environment}
        with log.open("ab") as file:
            return Process(command, environment, stdin=stdin, stdout=file, stderr=file)

    # ---- harm; each function returns the undo function, if there is one ----

    def harm(self, what: str, copy: Copy) -> Undo | None:
        """Inflicts a fault on a copy. The copy itself inflicts the program's own faults."""
        match what:
            case kinds.KILL:
                self.kill(copy)
            case kinds.FREEZE:
                return _freeze(copy)
            case kinds.STARVE:
                return _starve(copy.process)
            case kinds.NO_FILES:
                return _exhaust(copy.process.pid)
            case _ if self.network is not None and what in kinds.KINDS:
                try:
                    return self.network.harm(what, copy.host)
                except NetworkError:
                    return None  # two faults of one host at once
            case _:
                copy.process.say(what)
        return None

    def harm_master(self, what: str) -> Undo | None:
        master = self.master
        assert master is not None
        match what:
            case kinds.RESTART:
                master.close()
                return self.start_master
            case kinds.FREEZE_MASTER:
                master.signal(STOP)
                return partial(master.signal, CONTINUE)
            case kinds.FULL_DISK:
                return _limit(master, "fsize", FULL_BYTES)
            case kinds.NO_FILES_MASTER:
                return _limit(master, "nofile", FREE_FILES)
        return None


def burn() -> Undo:
    """Other programs use all processors."""
    burners = ExitStack()
    for _ in range(os.cpu_count() or 1):
        command = [sys.executable, "-S", "-E", "-c", SPIN]
        burners.enter_context(Process(command, os.environ))
    return burners.close


def _freeze(copy: Copy) -> Undo:
    def set_stopped(stopped: bool) -> None:
        copy.stopped = stopped
        copy.process.signal(STOP if stopped else CONTINUE)

    set_stopped(True)
    return partial(set_stopped, False)


def _starve(process: Process) -> Undo:
    over = threading.Event()

    def starve() -> None:
        while not over.is_set():
            process.signal(STOP)
            over.wait(STARVED_S[0])
            process.signal(CONTINUE)
            over.wait(STARVED_S[1])

    thread = threading.Thread(target=starve, daemon=True)
    thread.start()

    def feed() -> None:
        over.set()
        thread.join()

    return feed


def _exhaust(pid: int) -> Undo | None:
    """Limits a process to a few more descriptors than it has open."""
    if sys.platform != "linux":
        return None

    def limit(soft: int) -> None:
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, hard), hard))
        except OSError:
            pass  # it has ended just now

    try:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    limit(used + FREE_FILES)
    return partial(limit, before)


def _limit(master: Process, what: str, number: int) -> Undo:
    """Limits a resource of the master, which `serve_steered` runs."""
    master.say(f"{what} {number}")
    return partial(master.say, what)  # a master that was restarted meanwhile has no limit


def serve_steered() -> None:
    """Runs `pccl master` with limits that can be changed from outside, by lines on its stdin.

    "fsize N" and "nofile N" set a limit, as if the disk were full or no descriptors were left;
    without N they lift it. The master sets its own limits, because only Linux lets another process
    do that.
    """
    threading.Thread(target=_apply_limits, daemon=True).start()
    sys.exit(main())


def _apply_limits() -> None:
    """Sets limits as the lines on stdin say. Ends when stdin does, because the parent has ended."""
    rest = b""
    while data := os.read(0, 4096):  # not sys.stdin, whose lock could block the exit
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, *numbers = line.decode().split()
            if sys.platform != "win32":
                hard = resource.getrlimit(LIMITS[name])[1]
                resource.setrlimit(LIMITS[name], (int(numbers[0]) if numbers else hard, hard))
    os._exit(0)
