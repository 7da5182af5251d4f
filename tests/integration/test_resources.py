"""Processes that may have too few descriptors or threads: an error that says so, and no abort."""

from __future__ import annotations

import _thread
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

import pccl
from pccl.ext import ffi, tables
from pccl.runtime import resources

resource = pytest.importorskip("resource", reason="limits of a process are a thing of POSIX")
HERE = Path(__file__).parent

# A master and a peer of one process, whose limit leaves it so many descriptors. It says how that
# ended; libzmq's abort would end it before it can.
PROGRAM = """
import os, resource, sys
import pccl
free, what = int(sys.argv[1]), sys.argv[2]
with pccl.MasterNode("127.0.0.1:0") as master:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    while os.open(os.devnull, os.O_RDONLY) < used:
        pass  # there may be gaps
    node = pccl.MasterNode("127.0.0.1:0")
    comm = pccl.Communicator(master.address)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + free, hard))
    try:
        comm.connect() if what == "peer" else node.run()
        print("connected" if what == "peer" else "serves")
        comm.close() if what == "peer" else node.interrupt()
    except pccl.PCCLError as error:
        print(error)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc to count descriptors in")
@pytest.mark.parametrize("what", ["peer", "master"])
@pytest.mark.parametrize("free", [0, 40, resources.DESCRIPTORS + 2])
def test_too_few_descriptors_are_an_error(what: str, free: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(free), what], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stderr
    if free < resources.DESCRIPTORS:
        assert "INTERNAL_ERROR: it needs 64 descriptors for its sockets" in ended.stdout
        assert "ulimit -n" in ended.stdout
    else:
        assert ended.stdout in ("connected\n", "serves\n")


@pytest.mark.parametrize("what", ["peer", "master"])
def test_descriptors_that_are_taken_after_it_has_looked_are_an_error_of_the_system(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with pccl.MasterNode("127.0.0.1:0") as master:
        comm, node = pccl.Communicator(master.address), pccl.MasterNode("127.0.0.1:0")
        with monkeypatch.context() as patched, pytest.raises(pccl.PCCLError) as raised:
            patched.setattr(zmq.Context, "socket", none)
            comm.connect() if what == "peer" else node.run()
        assert raised.value.result == pccl.Result.INTERNAL_ERROR
        assert "Too many open files: raise this process's limits" in str(raised.value)
        comm.connect()  # it has left nothing behind
        comm.close()


def test_descriptors_that_are_taken_before_the_engine_has_its_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, for the sockets that the C core makes."""
    backend = tables.load()
    table = ffi.new("pccl_zmq *", backend.table[0])
    table.socket = none = ffi.callback("void *(void *, int)", lambda context, kind: ffi.NULL)
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        with monkeypatch.context() as patched, pytest.raises(pccl.PCCLError) as raised:
            patched.setattr(tables, "load", lambda: replace(backend, table=table))
            comm.connect()
        assert raised.value.result == pccl.Result.INTERNAL_ERROR, none
        assert "lane engine: raise this process's limits" in str(raised.value)
        comm.connect()
        comm.close()


def test_too_few_threads_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    really_start = _thread.start_new_thread

    def start(function: Callable[[], object], args: tuple[()]) -> int:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(function)
        return really_start(function, args)

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with pytest.raises(pccl.PCCLError, match=r"INTERNAL_ERROR: it needs 8 threads, and .* 3 more"):
        pccl.Communicator("127.0.0.1:1").connect()


# As above, with so many bytes of address space more than it has.
BOUNDED = """
import resource, sys
import pccl
with pccl.MasterNode("127.0.0.1:0") as master:
    comm = pccl.Communicator(master.address)
    with open("/proc/self/statm") as pages:
        limit = int(pages.read().split()[0]) * resource.getpagesize() + (int(sys.argv[1]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        comm.connect()
        print("connected")
        comm.close()
    except (pccl.PCCLError, MemoryError) as error:
        print(repr(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound address space")
@pytest.mark.parametrize(
    "mib",
    [
        *(5, 60, 150, 232, 238, 600),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 400, 8)),
    ],
)
def test_too_little_address_space_is_an_error(mib: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(mib)], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stderr
    if mib < 600:
        words = ("it needs 8 threads", "it needs the memory of 8 threads", "MemoryError")
        assert ended.stdout == "connected\n" or any(word in ended.stdout for word in words)
    else:
        assert ended.stdout == "connected\n"
