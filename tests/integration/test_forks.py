"""A program forks: in the child, calls of the communicator raise at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pccl

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
SUPPORT = Path(__file__).resolve().parents[1] / "support"

# Two peers of one process. Each child does one thing with a communicator of its parent, while other
# threads of the parent are in calls and stand where they hold a lock.
USES = """
import contextlib, gc, linecache, os, signal, sys, threading, time
import numpy as np
import pccl
from peers.cluster import Cluster

def told(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except pccl.PCCLError as error:
        assert error.result is pccl.Result.INVALID_USAGE, error
        assert "forked" in str(error), error
        return
    raise AssertionError(f"{call} was not refused")

@contextlib.contextmanager
def holding_a_lock(call):
    stands, free, last = threading.Event(), threading.Event(), {}

    def trace(frame, event, argument):
        if event == "line":
            if "lock:" in last.get(frame, ""):
                stands.set()
                free.wait()
            last[frame] = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return trace if "pccl" in frame.f_code.co_filename else None

    def run():
        sys.settrace(trace)
        call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert stands.wait(20), "it holds no lock"
    yield
    free.set()
    thread.join()

def wait(handle, comm):
    ok, status, _ = handle.wait()
    assert (ok, status) == (False, pccl.Result.INVALID_USAGE.value)
    assert "forked" in str(handle.error)

USES = {
    "all_reduce": lambda: told(comm.all_reduce, np.zeros(9)),
    "all_reduce_async": lambda: told(comm.all_reduce_async, np.zeros(9)),
    "update_topology": lambda: told(comm.update_topology),
    "are_peers_pending": lambda: told(comm.are_peers_pending, timeout=1),
    "sync": lambda: told(comm.sync_shared_state, pccl.SharedState.from_tensors({"x": np.zeros(2)})),
    "rank": lambda: told(lambda: comm.rank),
    "connect": lambda: told(comm.connect),
    "wait": lambda: wait(handle, comm),
    "close": lambda: comm.close(),
    "exit": lambda: sys.exit(0),
}
with Cluster(2) as cluster:
    comm, other = cluster.comms
    pending = comm.all_reduce_async(np.ones(50_000), op="sum", tag=5)
    for name, use in USES.items():
        handle = comm.all_reduce_async(np.ones(9), op="sum", tag=6)
        ending = lambda handle=handle: handle.wait(timeout=0.01)
        with holding_a_lock(ending), holding_a_lock(lambda: comm.rank):
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                use()
                comm = handle = ending = pending = cluster = None
                gc.collect()
                sys.stderr.flush()
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"{name}: {status}"
    x = np.ones(50_000)
    other.all_reduce(x, op="sum", tag=5)
    assert pending.wait()[0] and (x == 2).all()
    sums = cluster.each(lambda _, each: each.all_reduce(np.ones(50_000), op="sum").world_size)
    assert sums == [2, 2]
"""


def test_a_communicator_is_dead_in_a_child_and_unharmed_in_its_parent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", USES], cwd=SUPPORT, capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stderr


# A peer whose child lives longer than it does, as a worker of a data loader may.
PARENT = """
import os, sys, threading
import numpy as np
import pccl
with pccl.Communicator(sys.argv[1]) as comm:
    comm.all_reduce(np.ones(50_000))
    child = os.fork()
    if child == 0:
        threading.Event().wait(60)  # until it is killed
        os._exit(0)
    print(child, flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="descriptors cannot be listed here")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_child_does_not_keep_its_parents_connections(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", transport)
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", "3600000")  # it is not missed by heartbeats
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        command = [sys.executable, "-c", PARENT, master.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            while not comm.are_peers_pending():
                pass
            comm.update_topology()
            comm.all_reduce(np.ones(50_000))
            child, port = int(parent.stdout.readline()), master.status().peers[1].port
            try:
                parent.kill()
                parent.wait()
                with pytest.raises((pccl.PeerLostError, pccl.TooFewPeersError)):
                    comm.all_reduce(np.ones(50_000))
                with socket.create_server(("0.0.0.0", port)):
                    pass
            finally:
                os.kill(child, signal.SIGKILL)


# A member of a group of torch, with idle threads and a collective in progress, forks two children,
# which make a group of their own.
GROUPS = """
import os, signal, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
import pccl.torch
from pccl.torch.work import in_pool

def child(rank):
    signal.alarm(20)  # kills it, if no thread ends a collective
    dist.destroy_process_group()
    url = f"pccl://{sys.argv[2]}?world_size=2&rank={rank}"
    dist.init_process_group("pccl", init_method=url)
    for seconds in (20, 0.1):
        ours = dist.all_reduce(torch.ones(9), async_op=True).get_future()
        assert ours.wait()[0].tolist() == [2.0] * 9
    if rank == 0:  # its time is up, because the other child does not make this call
        dist.group.WORLD.set_timeout(timedelta(seconds=0.1))
        late = dist.all_reduce(torch.ones(9), async_op=True).get_future()
        try:
            late.wait()
        except RuntimeError as error:
            assert "Timed out" in str(error), error
        else:
            raise AssertionError("it has not failed")
        os.write(done[1], b".")
    else:
        os.read(done[0], 1)

url = f"pccl://{sys.argv[1]}?world_size=2&rank={sys.argv[3]}"
dist.init_process_group("pccl", init_method=url)
if dist.get_rank() == 0:
    in_pool(dist.get_rank).result()  # leaves an idle thread
    pending = dist.all_reduce(torch.ones(9), async_op=True)
    children, done = [], os.pipe()
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                child(rank)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(each, 0)[1] for each in children] == [0, 0]
else:
    sys.stdin.read()
"""


def test_children_of_a_member_make_a_group_of_their_own() -> None:
    pytest.importorskip("torch")
    with pccl.MasterNode("127.0.0.1:0") as theirs, pccl.MasterNode("127.0.0.1:0") as own:
        command = [sys.executable, "-c", GROUPS, theirs.address, own.address]
        with (
            subprocess.Popen([*command, "1"], stdin=subprocess.PIPE) as other,
            subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True) as parent,
        ):
            _, told = parent.communicate()
            assert parent.returncode == 0, told
            assert other.stdin is not None
            other.stdin.close()
    assert other.returncode == 0
