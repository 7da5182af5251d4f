"""Whatever opens something, again and again: no descriptor, thread or memory is kept."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peers.cluster import in_threads
from peers.waiting import PATIENCE_S, wait_until
from training.small import Model, make

import pccl
from pccl import weights
from pccl.torch import ProcessGroup

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
pytestmark = pytest.mark.skipif(
    not hasattr(LIBC, "mallinfo2"), reason="reads /proc, and asks glibc 2.33 or later"
)

SIZE = 1 << 18  # elements: 1 MiB, so that an array that is kept in each cycle is seen
CYCLES = 20
ROOM = 4 << 20  # bytes, however many cycles: Python's table of interned strings may grow by 2 MB
BLOCKS = 20_000  # the caches of plans hold a third of this


class MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in bytes and numbers of blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


if hasattr(LIBC, "mallinfo2"):
    LIBC.mallinfo2.restype = MallocInfo


class Usage:
    """The resources of this process.

    Threads that begin and end leave free memory in malloc's arenas, and more in each of these: up
    to 74 MB after 200 cycles; 1 MB with MALLOC_ARENA_MAX=1. So memory counts until it is freed, and
    resident memory may grow by as much as malloc had free before: that is used again.

    Attributes:
        in_use: bytes that malloc has given out.
        free: bytes that it holds and has not given out, resident or not.
        blocks: number of small blocks that Python has given out.
        elsewhere: resident bytes less all that malloc holds: of mappings, stacks, Python.
    """

    def __init__(self) -> None:
        gc.collect()
        LIBC.malloc_trim(0)
        self.descriptors = len(list(Path("/proc/self/fd").iterdir()))
        self.threads = len(list(Path("/proc/self/task").iterdir()))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        info = LIBC.mallinfo2()
        self.in_use = info.uordblks + info.hblkhd
        self.free = info.fordblks
        self.blocks = sys.getallocatedblocks()
        self.elsewhere = pages * mmap.PAGESIZE - info.arena - info.hblkhd

    def no_more_than(self, before: Usage) -> bool:
        return self.descriptors <= before.descriptors and self.threads <= before.threads


def communicators(address: str) -> None:
    def peer() -> None:
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(2, timeout=20)
            comm.all_reduce(np.ones(SIZE, np.float32))
            handle = comm.all_reduce_async(np.ones(SIZE, np.float32), tag=1)
            handle.wait()

    in_threads([peer, peer])


def refused_communicators(_: str) -> None:
    with pytest.raises(pccl.MasterLostError):
        pccl.Communicator("127.0.0.1:1", connect_timeout=0.05).connect()


def handles_that_are_dropped(address: str) -> None:
    def peer() -> None:
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(2, timeout=20)
            comm.all_reduce_async(np.ones(SIZE, np.float32), tag=1)
            comm.all_reduce(np.ones(1, np.float32))

    in_threads([peer, peer])


def calls_that_time_out(address: str) -> None:
    met = threading.Barrier(2)

    def peer() -> None:
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(2, timeout=20)
            if comm.rank == 0:
                with pytest.raises(pccl.PCCLTimeoutError):
                    comm.all_reduce(np.ones(SIZE, np.float32), timeout=0.01)
            met.wait()

    in_threads([peer, peer])


def shared_states(address: str) -> None:
    def peer() -> None:
        state = pccl.SharedState([pccl.TensorInfo.from_numpy(np.ones(SIZE, np.float32), "x")])
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(2, timeout=20)
            comm.sync_shared_state(state)

    in_threads([peer, peer])


def masters(_: str) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        communicators(master.address)


def torch_groups(address: str) -> None:
    def member() -> None:
        comm = pccl.Communicator(address)
        comm.connect(timeout=20)
        group = ProcessGroup(comm, size=2)
        group.allreduce([torch.ones(SIZE)]).wait()
        group.recv_anysource([torch.ones(SIZE)], 1)
        group.barrier().wait()
        group.shutdown()

    in_threads([member, member])


def weights_of_models(address: str) -> None:
    values = {"x": np.ones(SIZE, np.float32)}
    with (
        weights.Publisher(address, values) as trainer,
        weights.Subscriber(address, {"x": np.zeros(SIZE, np.float32)}) as follower,
    ):
        trainer.publish(next(VERSIONS))
        follower.wait(timeout=PATIENCE_S)
        follower.swap()


def training(address: str) -> None:
    def peer() -> None:
        with pccl.Communicator(address) as comm:
            model = Model()
            diloco = make(comm, model, min_peers=2, mode="delayed", wire="int8")
            for _ in range(3):
                model.move(1.0)
                diloco.step()
            diloco.finish()

    in_threads([peer, peer])


VERSIONS = iter(range(1, 1 << 40))
KINDS = [
    *(communicators, refused_communicators, handles_that_are_dropped, calls_that_time_out),
    *(shared_states, masters, torch_groups, weights_of_models, training),
]


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


@pytest.mark.parametrize(
    "cycles", [CYCLES, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_kept(kind: Callable[[str], None], cycles: int, address: str) -> None:
    for _ in range(5):  # caches and pools fill
        kind(address)
    before = Usage()
    for _ in range(cycles):
        kind(address)
    wait_until(lambda: Usage().no_more_than(before))
    after = Usage()
    assert after.in_use - before.in_use < ROOM
    assert after.blocks - before.blocks < BLOCKS
    assert after.elsewhere - before.elsewhere < ROOM + before.free
