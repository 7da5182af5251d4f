"""`pccl run`: several copies of a program on this machine, restarted when they die.

Each copy is a peer for itself: it joins the run of the master that PCCL_MASTER names. One that dies
is started again, and joins again; the others go on meanwhile. Signals are passed on to all copies.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, TextIO

from pccl.cli import program
from pccl.cli.arguments import master, whole_number
from pccl.errors import PCCLError
from pccl.master_node import MasterNode
from pccl.runtime.signals import ended_by

GRACE_S = 10.0  # from a signal until a copy that has not ended is killed
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0  # before a restart; twice as long each time, up to this
STEADY_S = 60.0  # a copy that has run for so long has recovered from what failed before
NOT_STARTED = 127  # status of a program that cannot be started, as shells have it
LOOPBACK = "127.0.0.1:0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl run`."""
    epilog = (
        "The program finds the master's address in PCCL_MASTER, and its number among the copies,\n"
        "which chooses a GPU for instance, in LOCAL_RANK, of LOCAL_WORLD_SIZE. The exit status is\n"
        "0 if all copies have ended with 0.\n\n"
        "    pccl run -n 4 -- python train.py\n"
        "    pccl run -n 8 --master the-masters-host -- python train.py"
    )
    program.add_arguments(parser, "pccl run", epilog)
    parser.add_argument(
        "-n",
        type=whole_number(1, 4096),
        default=1,
        metavar="COPIES",
        help="how many copies (default: %(default)s)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--master",
        type=master,
        metavar="HOST[:PORT]",
        help="the master of the run (default: PCCL_MASTER; if that is unset, one is started here)",
    )
    where.add_argument(
        "--with-master",
        nargs="?",
        const=LOOPBACK,
        metavar="HOST:PORT",
        help="start a master here, at this address (default: a free port, for this machine only)",
    )
    parser.add_argument(
        "--restarts",
        type=whole_number(0),
        default=3,
        metavar="N",
        help="how often in a row a copy that fails is started again; one that has run for "
        f"{STEADY_S:.0f} s counts from the beginning (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """`pccl run`: returns when all copies have ended."""
    command = program.words(args, "pccl run")
    if not command:
        return 2
    address = args.master or (None if args.with_master else os.environ.get("PCCL_MASTER"))
    with ExitStack() as stack:
        if address is None:
            try:
                node = stack.enter_context(MasterNode(args.with_master or LOOPBACK))
            except (PCCLError, ValueError, AssertionError) as error:  # the last two: malformed
                print(f"pccl run: {error}", file=sys.stderr)
                return 1
            address = node.address
        environment = {**os.environ, "PCCL_MASTER": address, "LOCAL_WORLD_SIZE": str(args.n)}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        copies = Copies(command, environment, args.n, args.restarts)
        stack.callback(copies.kill)
        with ended_by(lambda number, _: copies.stop(number)):
            return copies.wait()


class Printer:
    """Prints lines of several processes whole, with the number of each in front."""

    def __init__(self) -> None:
        self._printing = threading.Lock()

    def copy(self, number: int, lines: IO[bytes], to: TextIO) -> None:
        """Prints all that a process writes, until it has closed its end."""
        for line in lines:
            text = line.decode(errors="replace")
            self.say(number, text if text.endswith("\n") else text + "\n", to)

    def say(self, number: int, text: str, to: TextIO) -> None:
        """Prints one line."""
        with self._printing, suppress(OSError):  # nobody reads any more
            to.write(f"[{number}] {text}")
            to.flush()


class Copy(threading.Thread):
    """One copy of the program, and its restarts.

    Args:
        number: among the copies.
        command: the program and its arguments.
        environment: of its processes.
        restarts: how often it may fail in a row and be started again.
        stopping: set when the copies are to end.
        printer: prints what they write.

    Attributes:
        status: with which it ended: of a process that a signal killed, 128 and its number.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        restarts: int,
        stopping: threading.Event,
        printer: Printer,
    ) -> None:
        super().__init__(name=f"pccl-run-{number}", daemon=True)
        self.status = 0
        self._number, self._command, self._restarts = number, command, restarts
        self._environment = {**environment, "LOCAL_RANK": str(number)}
        self._stopping, self._printer = stopping, printer
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.RLock()  # a signal may come while one is passed on

    def run(self) -> None:
        """Runs the program until it succeeds, has failed too often, or is to end."""
        failures = 0
        while True:
            began_s = time.monotonic()
            self.status = self._once()
            if self.status == 0 or self._stopping.is_set():
                return
            failures = 1 if time.monotonic() - began_s >= STEADY_S else failures + 1
            if failures > self._restarts or self.status == NOT_STARTED:
                self._say(f"ended with {self._told()}; it is not started again")
                return
            pause_s = min(PAUSE_S * 2 ** (failures - 1), PAUSE_MAX_S)
            self._say(f"ended with {self._told()}; it is started again in {pause_s:.0f} s")
            if self._stopping.wait(pause_s):
                return

    def signal(self, number: int) -> None:
        """Passes a signal on, as a terminal would: to the program and the processes it has made."""
        with self._starting, suppress(ProcessLookupError):
            if self._process is None or not self.is_alive():
                return
            if sys.platform == "win32":
                self._process.terminate()
            else:
                os.killpg(self._process.pid, number)

    def _once(self) -> int:
        with self._starting:
            if self._stopping.is_set():
                return self.status
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C reaches it by way of us
                )
            except OSError as error:
                self._say(f"{self._command[0]} cannot be started: {error.strerror or error}")
                return NOT_STARTED
        process = self._process
        assert process.stdout is not None and process.stderr is not None
        with process, process.stdout as out, process.stderr as err:
            printers = [
                threading.Thread(target=self._printer.copy, args=(self._number, lines, to))
                for lines, to in ((out, sys.stdout), (err, sys.stderr))
            ]
            for printer in printers:
                printer.start()
            status = process.wait()
            self._kill_what_is_left(process.pid)
            for printer in printers:
                printer.join()
        return status if status >= 0 else 128 - status

    @staticmethod
    def _kill_what_is_left(group: int) -> None:
        """Workers that a dead program leaves behind keep its GPU, its ports, and our pipes."""
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):  # none is left, as macOS has it
                os.killpg(group, signal.SIGKILL)

    def _told(self) -> str:
        return f"signal {self.status - 128}" if self.status > 128 else f"status {self.status}"

    def _say(self, text: str) -> None:
        self._printer.say(self._number, f"pccl run: {text}\n", sys.stderr)


class Copies:
    """All copies of the program.

    Args:
        command: the program and its arguments.
        environment: of all of them.
        n: how many.
        restarts: how often each may fail in a row and be started again.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], n: int, restarts: int
    ) -> None:
        self._stopping = threading.Event()
        self._stopped_s = 0.0
        self._number = 0  # of the signal that ends it all
        printer = Printer()
        self._copies = [
            Copy(i, command, environment, restarts, self._stopping, printer) for i in range(n)
        ]
        for copy in self._copies:
            copy.start()

    def wait(self) -> int:
        """Returns when all have ended, with the status for this program."""
        while running := [copy for copy in self._copies if copy.is_alive()]:
            running[0].join(0.2)
            if self._number and time.monotonic() - self._stopped_s > GRACE_S:
                self.kill()
        if self._number:
            return 128 + self._number
        return next((copy.status for copy in self._copies if copy.status), 0)

    def stop(self, number: int) -> None:
        """Passes a signal on, and starts nothing again. A second one kills."""
        again = self._stopping.is_set()
        self._stopping.set()
        if again:
            self.kill()
            return
        self._number, self._stopped_s = number, time.monotonic()
        for copy in self._copies:
            copy.signal(number)

    def kill(self) -> None:
        """Ends whatever still runs."""
        self._stopping.set()
        for copy in self._copies:
            copy.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
