"""The processes of a run under faults, and what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from pccl.cli.chaos.kinds import Network
from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.record import Gap, Line, Told
from pccl.runtime.server.eventlog import Head

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


READ_BYTES = 1 << 20
VOTES = (
    m.TopologyVote,
    m.PendingVote,
    m.OptimizeVote,
    m.StartVote,
    m.SyncVote,
    m.FinishVote,
    m.FetchedVote,
)
ANSWERS = ("SyncResult", "TopologyResult", "OptimizeResult")
MOMENTS = {
    "between-votes": "some have entered a call, and others have not",
    "admission": "a newcomer waits",
    "collective": "a collective is under way",
    "transfer": "shared state is under way",
    "optimization": "links are measured",
}


class Follower:
    """Reads an event log as it grows, over all its files.

    Args:
        path: of the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._rest = b""
        self._decoder: msgspec.json.Decoder[Head | Line | Gap] = msgspec.json.Decoder(
            Head | Line | Gap
        )

    def lines(self) -> Iterator[Line]:
        """What was written since the last call."""
        while data := self._read():
            *whole, self._rest = (self._rest + data).split(b"\n")
            for text in whole:
                with contextlib.suppress(msgspec.DecodeError):  # torn; `pccl replay` says so
                    if text and isinstance(item := self._decoder.decode(text), Line):
                        yield item

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> bytes:
        if self._file is None and not self._open():
            return b""
        assert self._file is not None
        if data := os.read(self._file, READ_BYTES):
            return data
        try:  # at its end: has the next one begun?
            now, mine = os.stat(self._path), os.fstat(self._file)
        except FileNotFoundError:
            return b""
        if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
            return b""
        rest = os.read(self._file, READ_BYTES)  # what came before it was renamed
        if not rest:
            self.close()
            self._rest = b""
            return self._read()
        return rest

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            return False
        return True


def moments(line: Line) -> set[str]:
    """The names of the moments that a line begins."""
    found = set()
    said = getattr(line.input, "message", None)
    if isinstance(line.input, inputs.Received) and isinstance(said, VOTES) and not line.told:
        found.add("between-votes")
    for told in line.told:
        if told.say == "Welcome":
            found.add("admission")
        elif told.say == "Started" and not told.final:
            found.add("collective")
        elif told.say == "SyncPlan" and told.fetches:
            found.add("transfer")
        elif told.say == "Probe":
            found.add("optimization")
    return found


class Watch:
    """What is known of a run from its master's event log.

    Attributes:
        masters: how many have begun.
        accepted: the numbers of the accepted peers.
        collectives_s: when collectives were committed, by the monotonic clock.
        rounds: how many calls were answered, of any kind.
        last_s: when the last one was.
        moments: the last time of each moment.
        failures: what has made the master fail.
    """

    def __init__(self) -> None:
        self.masters = 0
        self.accepted: set[int] = set()
        self.collectives_s: list[float] = []
        self.rounds = 0
        self.last_s = float("-inf")
        self.moments: dict[str, float] = {}
        self.failures: list[str] = []

    def feed(self, line: Line) -> None:
        """Takes in a line."""
        if isinstance(line.input, inputs.Began):
            self.masters += not line.input.why
            self.accepted.clear()  # those of before come back
        if line.failed:
            self.failures.append(f"the master failed: {line.failed}")
        for moment in moments(line):
            self.moments[moment] = line.at_s
        for told in line.told:
            if told.say in ("Admitted", "Resumed"):
                self.accepted.update(told.to)
        if any(told.ok and _is_end(told) for told in line.told):
            self.collectives_s.append(line.at_s)
        if any(_is_answer(told) for told in line.told):
            self.rounds += 1
            self.last_s = line.at_s
        self.accepted.difference_update(line.gone)


def _is_end(told: Told) -> bool:
    """Whether a collective has ended."""
    return told.say == "Finished" or (told.say == "Started" and told.final)


def _is_answer(told: Told) -> bool:
    """Whether a call was answered."""
    return told.say == "PendingResult" or (told.ok and (_is_end(told) or told.say in ANSWERS))


SETTLE_S = 3.0  # a master knows in less whether a copy is still there


class Crew(Protocol):
    """What is known of the program whose copies are disturbed."""

    def command(self, number: int, alive: Sequence[Copy]) -> Sequence[str]:
        """How the copy of that number is started, beside those that live."""

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Marks the copies that could go on alone: they are in the run, and have its state."""

    def group(self, copy: Copy) -> int:
        """Which copies share a state."""

    def leave(self, copy: Copy) -> None:
        """Asks a copy to end."""


class Strangers:
    """Copies of a program of which nothing is known but what their master sees.

    Args:
        command: of each.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._alive: set[int] = set()
        self._changed_s = 0.0

    def command(self, number: int, alive: Sequence[Copy]) -> Sequence[str]:
        """All alike."""
        return self._command

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """All that live are in the run if it has as many peers for a while, and goes on."""
        now_s = time.monotonic()
        alive = {copy.number for copy in copies if copy.ended_s is None}
        disturbed = any(copy.stopped for copy in copies)
        if alive != self._alive or disturbed:
            self._alive, self._changed_s = alive, now_s
        if len(watch.accepted) == len(alive) and watch.last_s > self._changed_s + SETTLE_S:
            for copy in copies:
                if not copy.befell or copy.befell[-1][0] + SETTLE_S < watch.last_s:
                    copy.settled = True

    def group(self, copy: Copy) -> int:
        """All are one group, as far as is known."""
        return 0

    def leave(self, copy: Copy) -> None:
        """SIGTERM, or TerminateProcess."""
        copy.signal(signal.SIGTERM)
