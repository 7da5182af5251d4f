"""Does to processes and hosts what a fault says, and takes it back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

from pccl.cli.chaos import kinds
from pccl.cli.chaos.kinds import NetworkError, Undo
from pccl.cli.chaos.stage import Copy, Stage

STARVED_S = 0.09, 0.01  # stopped, running: again and again
FREE_FILES = 2  # descriptors that are left
FULL_BYTES = 1  # to which files may grow when the disk is full
SPIN = "while True: pass"


def nothing() -> None:
    """What a fault leaves that is over at once."""


class Hands:
    """Harms single copies, and the master.

    Args:
        stage: where they are.
        leave: asks a copy to end.
    """

    def __init__(self, stage: Stage, leave: Callable[[Copy], None]) -> None:
        self._stage = stage
        self._leave = leave
        self._acts: dict[str, Callable[[Copy], Undo]] = {
            kinds.KILL: self._kill,
            kinds.LEAVE: self._ask_to_end,
            kinds.FREEZE: self._freeze,
            kinds.STARVE: self._starve,
            kinds.NO_FILES: _exhaust,
            kinds.RESET: self._reset,
        }
        self._master_acts: dict[str, Callable[[], Undo]] = {
            kinds.RESTART: self._restart,
            kinds.FREEZE_MASTER: self._freeze_master,
            kinds.FULL_DISK: lambda: self._limit_master("fsize", FULL_BYTES),
            kinds.NO_FILES_MASTER: lambda: self._limit_master("nofile", FREE_FILES),
        }

    def harm(self, what: str, copy: Copy) -> Undo:
        """Does it to a copy. Returns what ends it."""
        if what in self._acts:
            return self._acts[what](copy)
        if self._stage.network is not None and what in kinds.KINDS:
            try:
                return self._stage.network.harm(what, copy.host)
            except NetworkError:
                return nothing  # two faults of one host at once
        copy.say(what)  # what it does to itself
        return nothing

    def harm_master(self, what: str) -> Undo:
        """Does it to the master."""
        return self._master_acts[what]()

    def burn(self, processors: int) -> Undo:
        """Uses all processors."""
        command = [sys.executable, "-S", "-E", "-c", SPIN]
        burners = [subprocess.Popen(command) for _ in range(processors)]
        return lambda: _end(burners)

    def _kill(self, copy: Copy) -> Undo:
        self._stage.kill(copy)
        return nothing

    def _ask_to_end(self, copy: Copy) -> Undo:
        self._leave(copy)
        return nothing

    def _freeze(self, copy: Copy) -> Undo:
        if sys.platform == "win32":
            return nothing
        copy.stopped = True
        copy.signal(signal.SIGSTOP)

        def thaw() -> None:
            copy.stopped = False
            copy.signal(signal.SIGCONT)

        return thaw

    def _starve(self, copy: Copy) -> Undo:
        over = threading.Event()

        def starve() -> None:
            if sys.platform == "win32":
                return
            while not over.is_set():
                copy.signal(signal.SIGSTOP)
                over.wait(STARVED_S[0])
                copy.signal(signal.SIGCONT)
                over.wait(STARVED_S[1])

        thread = threading.Thread(target=starve, daemon=True)
        thread.start()

        def feed() -> None:
            over.set()
            thread.join()

        return feed

    def _reset(self, copy: Copy) -> Undo:
        if self._stage.network is not None:
            self._stage.network.reset(copy.host)
        return nothing

    def _restart(self) -> Undo:
        self._stage.kill_master()
        return self._stage.start_master

    def _freeze_master(self) -> Undo:
        master = self._stage.master
        if sys.platform == "win32" or master is None:
            return nothing
        master.send_signal(signal.SIGSTOP)
        return lambda: master.send_signal(signal.SIGCONT)

    def _limit_master(self, what: str, number: int) -> Undo:
        master = self._stage.master
        self._stage.tell_master(f"{what} {number}")

        def lift() -> None:
            if self._stage.master is master:  # another one was started without the limit
                self._stage.tell_master(what)

        return lift


def _exhaust(copy: Copy) -> Undo:
    """Lets a process open no more descriptors than it has, but for a few."""
    if sys.platform != "linux":
        return nothing
    import os
    import resource

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


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
