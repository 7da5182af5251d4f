"""Faults that a worker inflicts on itself: it resets connections, forks, and runs programs.

Linux supports all of them; other systems only forks and programs, or only programs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import get_context

import numpy as np

import pccl

CHILD_S = 20.0  # a forked child ends in less, on a busy machine too
AF_UNSPEC = 0
PR_SET_PDEATHSIG = 1
LINK, LANE, ACCEPTED = "link", "lane", "accepted lane"
RESET_LINK = "reset-link"
RESETS = (RESET_LINK, "reset-lane", "reset-accepted-lane")
FORKS = ("fork-and-exit", "fork-and-use", "fork-and-collect", "fork-a-worker")
KINDS = (
    (RESETS if os.path.isdir("/proc/self/fd") else ())
    + (FORKS if hasattr(os, "fork") else ())
    + ("run-a-program",)
)


class Mischief:
    """Inflicts the faults that a worker is told to."""

    def __init__(self, master_port: int, fault: Callable[[str], None]) -> None:
        # whether a connection to the master was reset since `joined`: then the master may drop it
        self.cut_off = False
        self._comm: pccl.Communicator | None = None
        self._master_port = master_port
        self._fault = fault
        self._rng = random.Random(os.getpid())

    def joined(self, comm: pccl.Communicator) -> None:
        """Sets the communicator that the children use from now on."""
        self._comm, self.cut_off = comm, False

    def do(self, what: str) -> None:
        if what.startswith("reset"):
            self._reset(what.removeprefix("reset-").replace("-", " "))
        elif what == "run-a-program":
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, timeout=CHILD_S)
        elif what == "fork-a-worker":
            self._fork_worker()
        else:
            self._fork(what)

    # ---- connections ----

    def _reset(self, kind: str) -> None:
        """Ends one connection of that kind: with an RST, or as a proxy ends it."""
        found = [fd for fd, each in connections(self._master_port) if each == kind]
        if not found:
            return
        self.cut_off |= kind == LINK  # before: the answer may come at once
        reset(self._rng.choice(found), abruptly=self._rng.random() < 0.5)

    # ---- children ----

    def _fork_worker(self) -> None:
        """Forks by multiprocessing, as a data loader does."""
        worker = get_context("fork").Process(target=end_with_parent)
        worker.start()
        worker.join(CHILD_S)
        if worker.is_alive():
            worker.kill()
            self._fault("a worker made by multiprocessing's fork does not end")

    def _fork(self, what: str) -> None:
        ends, alive = os.pipe()  # the child's copy closes when the child ends
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                end_with_parent()
                faulthandler.dump_traceback_later(CHILD_S / 2)
                status = self._in_child(what)
            finally:
                os._exit(status)
        os.close(alive)
        in_time = bool(select.select([ends], [], [], CHILD_S)[0])
        os.close(ends)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not in_time:
            self._fault(f"the child of {what!r} does not end")
        elif status:
            self._fault(f"the child of {what!r} ended with {status}")

    def _in_child(self, what: str) -> int:
        """Exit status of a forked child: 0 if its communicator is dead, and says so."""
        if what == "fork-and-use" and self._comm is not None:
            try:
                self._comm.all_reduce(np.zeros(3))
            except pccl.PCCLError:
                self._comm.close()
                return 0
            return 3
        if what == "fork-and-collect":
            self._comm = None
            gc.collect()
        return 0


def end_with_parent() -> None:
    """For a child: ends it with its parent, because a killed parent cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def connections(master_port: int) -> list[tuple[int, str]]:
    """The connections of this process, by descriptor, with their purpose."""
    with ExitStack() as stack:
        twins = {}
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it is no socket, or closed by now
                twins[int(name)] = stack.enter_context(_twin(int(name)))
        listening = [twin for twin in twins.values() if _listens(twin)]
        listened = {twin.getsockname()[1] for twin in listening if twin.family != socket.AF_UNIX}
        kinds = {
            fd: _kind(twin, master_port, listened)
            for fd, twin in twins.items()
            if twin not in listening
        }
    return [(fd, kind) for fd, kind in kinds.items() if kind]


def _twin(fd: int) -> socket.socket:
    """The socket of a descriptor that belongs to other code. Raises OSError: there is none."""
    twin = os.dup(fd)
    try:
        return socket.socket(fileno=twin)
    except OSError:
        os.close(twin)
        raise


def _listens(twin: socket.socket) -> bool:
    return bool(twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _kind(twin: socket.socket, master_port: int, listened: set[int]) -> str:
    try:
        here, there = twin.getsockname(), twin.getpeername()
    except OSError:
        return ""
    if twin.family == socket.AF_UNIX:  # those of a pair have no names
        return ACCEPTED if here else LANE if there else ""
    if there[1] == master_port:
        return LINK
    return ACCEPTED if here[1] in listened else LANE


def reset(fd: int, abruptly: bool) -> None:
    """Ends a connection of other code: by an RST, which loses data in flight, or by a FIN."""
    with suppress(OSError), _twin(fd) as twin:  # it may be closed just now
        if abruptly and twin.family != socket.AF_UNIX:
            nowhere = ctypes.create_string_buffer(AF_UNSPEC.to_bytes(2, sys.byteorder), 16)
            ctypes.CDLL(None).connect(twin.fileno(), nowhere, len(nowhere))
        else:
            twin.shutdown(socket.SHUT_RDWR)
