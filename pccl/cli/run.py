"""`pccl run`: runs copies of a program on this machine, and restarts those that die.

Each copy is a separate peer. No copy is restarted if another one has ended with 0, because the
training is over, or if all copies soon fail alike, because the program is wrong. A copy that was
restarted too late to take part would wait for other peers for ever: a master that serves only these
copies ends then. When a copy fails or is told to end, all processes that it has started are killed.
A process that survives and holds the copy's output does not delay the end.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO, TextIO

from pccl.cli.arguments import add_program, master, option, program, whole_number
from pccl.cli.processes import Process
from pccl.cli.terminal import Refused, painted
from pccl.errors import PCCLTimeoutError
from pccl.master_node import MasterNode
from pccl.runtime.signals import ended_by, handled

GRACE_S = 10.0  # a copy that has not ended this long after a signal is killed
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0  # pause before a restart: first and longest; it doubles each time
STEADY_S = 60.0  # earlier failures of a copy that has run this long do not count
KILLED = 128 + 9  # status of a program killed by SIGKILL
NOT_STARTED = 127  # status of a program that cannot be started, as in shells
ALIKE_S = 20.0  # if all copies fail alike this soon after their start, the program is wrong
LOOPBACK = "127.0.0.1:0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    epilog = (
        "The program finds the master's address in PCCL_MASTER, and its number among the copies,\n"
        "which chooses a GPU for instance, in LOCAL_RANK, of LOCAL_WORLD_SIZE. The exit status is\n"
        "0 if all copies have ended with 0. SIGUSR1 and SIGUSR2 are passed on to them; SIGINT,\n"
        "SIGTERM, SIGHUP and SIGQUIT end them, after 10 s at the latest, a second one at once.\n\n"
        "    pccl run -n 4 -- python train.py\n"
        "    pccl run -n 8 --master the-masters-host -- python train.py"
    )
    add_program(parser, epilog)
    option(parser, "-n COPIES", "how many copies", 1, whole_number(1, 4096))
    where = parser.add_mutually_exclusive_group()
    text = "the master of the run (default: PCCL_MASTER; if that is unset, a new master here)"
    option(where, "--master HOST[:PORT]", text, kind=master)
    text = "start a master here, at this address (default: a free port, for this machine only)"
    option(where, "--with-master HOST:PORT", text, nargs="?", const=LOOPBACK)
    text = (
        "how often in a row a failing copy is restarted; the count starts over when it has run for "
        f"{STEADY_S:.0f} s. No copy is restarted once another one has ended with 0, or if all "
        "soon fail alike"
    )
    option(parser, "--restarts N", text, 3, whole_number(0))


def run(args: argparse.Namespace) -> int:
    """`pccl run`: returns when all copies have ended."""
    command = program(args)
    given = None if args.with_master else os.environ.get("PCCL_MASTER")
    try:
        address = args.master or (master(given) if given else None)
    except argparse.ArgumentTypeError as error:
        raise Refused(f"PCCL_MASTER: {error}") from None
    own = None  # a master that serves only these copies
    with ExitStack() as stack:
        if address is None:
            listen = args.with_master or LOOPBACK
            try:
                node = stack.enter_context(MasterNode(listen))
            except ValueError as error:  # the address is malformed
                raise OSError(error) from None
            own, address = node if listen == LOOPBACK else None, node.address
            print(f"pccl run: has started a master at {address}", file=sys.stderr, flush=True)
        environment = {**os.environ, "PCCL_MASTER": address, "LOCAL_WORLD_SIZE": str(args.n)}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        copies = Copies(command, environment, args.n, args.restarts, own)
        stack.callback(copies.kill)

        def end(number: int, _: object) -> None:
            copies.stop(number)

        def pass_on(number: int, _: object) -> None:
            copies.signal(number)

        with ended_by(end), handled({"SIGQUIT": end, "SIGUSR1": pass_on, "SIGUSR2": pass_on}):
            copies.start()
            return copies.wait()


class Printer:
    """Prints the output of several processes, each line with the number of its process in front."""

    def __init__(self) -> None:
        self._printing = threading.Lock()
        self._begun: tuple[int, TextIO] | None = None  # an incomplete line: its process and stream
        self._returned = False  # whether that line ends with \r, to be overwritten

    def print(self, number: int, lines: Sequence[bytes], to: TextIO) -> None:
        """Prints lines, with their ends; the last one may be incomplete."""
        mark, text = painted(f"[{number}]", "cyan", to).encode() + b" ", bytearray()
        with self._printing:
            if self._begun is not None and self._begun != (number, to):
                self._write(b"\n", self._begun[1])
                self._begun = None
            for line in lines:
                if self._begun is None or self._returned:
                    text += mark
                text += line
                self._begun = None if line.endswith(b"\n") else (number, to)
                self._returned = line.endswith(b"\r")
            self._write(text, to)

    @staticmethod
    def _write(data: bytes | bytearray, to: TextIO) -> None:
        raw: BinaryIO | None = getattr(to, "buffer", None)
        with suppress(OSError, ValueError):  # its reader has ended, or the stream is closed
            if raw is None:
                to.write(data.decode(errors="replace"))
            else:
                raw.write(data)
            to.flush()


class Copy(threading.Thread):
    def __init__(
        self,
        number: int,  # its number among the copies
        command: Sequence[str],  # the program and its arguments
        environment: Mapping[str, str],  # variables of its processes
        restarts: int,  # how often in a row it may fail and be restarted
        copies: Copies,  # all of them
    ) -> None:
        super().__init__(name=f"pccl-run-{number}", daemon=True)
        self.status = 0
        self.lasted_s: float | None = None  # the running time of its first process
        self._number, self._command, self._restarts = number, command, restarts
        self._environment = {**environment, "LOCAL_RANK": str(number)}
        self._copies = copies
        self._process: Process | None = None
        self._starting = threading.RLock()  # a signal handler may interrupt `signal` and call it

    def run(self) -> None:
        """Runs the program until it succeeds, fails too often, or is told to end."""
        failures, copies = 0, self._copies
        while True:
            began_s = time.monotonic()
            self.status = self._once()
            lasted_s = time.monotonic() - began_s
            self.lasted_s = lasted_s if self.lasted_s is None else math.inf
            if self.status == 0:
                copies.succeeded = True
            if self.status == 0 or copies.stopping.is_set():
                return
            failures = 1 if lasted_s >= STEADY_S else failures + 1
            pause_s = min(PAUSE_S * 2 ** (failures - 1), PAUSE_MAX_S)
            then = f"it is started again in {pause_s:.0f} s"
            if over := failures > self._restarts or self.status == NOT_STARTED:
                then = "it is not started again"
            elif over := copies.succeeded:
                then = "it is not started again, because another copy has ended with status 0"
            status = self.status
            ended = f"signal {status - 128}" if status > 128 else f"status {status}"
            self.note(f"ended with {ended}; {then}")
            if over or copies.stopping.wait(pause_s):
                return
            if copies.failed_alike():
                self.note("all copies have failed alike at once: it is not started again")
                return

    def signal(self, number: int) -> None:
        """Signals the program and its process group, as a terminal would."""
        with self._starting:
            if self._process is not None:
                self._process.signal(number)

    def flush(self) -> None:
        """Prints lines that have been incomplete for a while."""
        if self._process is not None:
            for output in self._process.outputs:
                output.flush()

    def kill(self) -> None:
        with self._starting:
            if self._process is not None and self._process.status is None:
                self._process.kill()
                self._process.kill_strays()

    def _once(self) -> int:
        with self._starting:
            if self._copies.stopping.is_set():
                return self.status
            try:
                process = self._process = Process(
                    self._command,
                    self._environment,
                    stdout=lambda lines: self._print(lines, sys.stdout),
                    stderr=lambda lines: self._print(lines, sys.stderr),
                )
            except OSError as error:
                self.note(f"{self._command[0]} cannot be started: {error.strerror or error}")
                return NOT_STARTED
        status = process.wait()
        assert status is not None
        if status or self._copies.stopping.is_set():
            process.kill_strays()
        process.finish(GRACE_S)
        return status if status >= 0 else 128 - status

    def note(self, text: str) -> None:
        line = painted(f"pccl run: {text}", "yellow", sys.stderr)
        self._print([f"{line}\n".encode()], sys.stderr)

    def _print(self, lines: Sequence[bytes], to: TextIO) -> None:
        self._copies.printer.print(self._number, lines, to)


class Copies:
    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        n: int,
        restarts: int,
        own: MasterNode | None = None,  # a master that serves only these copies
    ) -> None:
        self.printer = Printer()  # prints their output
        self.stopping = threading.Event()  # set when they are to end
        self.succeeded = False  # whether one of them has ended with 0
        self._own = own
        self._stopped_s = 0.0
        self._number = 0  # the signal that ends all copies; 0: none
        self._all = [Copy(i, command, environment, restarts, self) for i in range(n)]

    def start(self) -> None:
        for copy in self._all:
            copy.start()

    def failed_alike(self) -> bool:
        """True if all failed soon after their start with the same status, except by a kill."""
        soon = all(copy.lasted_s is not None and copy.lasted_s < ALIKE_S for copy in self._all)
        statuses = {copy.status for copy in self._all}
        return soon and len(self._all) > 1 and len(statuses) == 1 and statuses != {KILLED}

    def wait(self) -> int:
        """Waits until all have ended. Returns the exit status of `pccl run`."""
        while running := [copy for copy in self._all if copy.is_alive()]:
            running[0].join(0.2)
            for copy in running:
                copy.flush()
            if self._number and time.monotonic() - self._stopped_s > GRACE_S:
                self.kill()
            if self._own is not None and self.succeeded and self._are_too_late(running, self._own):
                for copy in running:
                    copy.note("the run is over, so its master ends, and nobody can join any more")
                self._own.interrupt()
                self._own = None
        if self._number:
            return 128 + self._number
        return next((copy.status for copy in self._all if copy.status), 0)

    @staticmethod
    def _are_too_late(running: Sequence[Copy], own: MasterNode) -> bool:
        """True if only restarted copies are left, and all peers of the run wait for others."""
        if any(copy.lasted_s is None for copy in running):
            return False
        try:
            status = own.status(1.0)
        except PCCLTimeoutError:
            return False
        waiting = sum(wait.entered for wait in status.waits if not wait.missing_count)
        return status.weights is None and 0 < waiting == len(status.peers)

    def signal(self, number: int) -> None:
        for copy in self._all:
            copy.signal(number)

    def stop(self, number: int) -> None:
        """Passes on a signal, and restarts no more copies. A second call kills all copies."""
        again = self.stopping.is_set()
        self.stopping.set()
        if again:
            self.kill()
            return
        self._number, self._stopped_s = number, time.monotonic()
        self.signal(number)

    def kill(self) -> None:
        self.stopping.set()
        for copy in self._all:
            copy.kill()
