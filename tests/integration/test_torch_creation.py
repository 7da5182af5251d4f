"""How groups of torch.distributed begin and end, where their master is one of the processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import listed
from peers.cluster import Cluster, in_threads
from peers.ports import unused_port
from peers.waiting import PATIENCE_S, wait_until
from torch.distributed import distributed_c10d as c10d

import pccl
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.connect import RetryPolicy
from pccl.torch import ProcessGroup, creation, hosted
from pccl.torch.hosted import KEY, HostedMaster


def nobody() -> str:
    """An address where nothing listens."""
    return f"127.0.0.1:{unused_port()}"


def begin(store: dist.Store, rank: int, size: int = 2) -> ProcessGroup:
    """As init_process_group does."""
    options = SimpleNamespace(
        store=store,
        group_rank=rank,
        group_size=size,
        global_ranks_in_group=list(range(size)),
        timeout=timedelta(seconds=30),
    )
    group = creation.create(options)
    assert isinstance(group, ProcessGroup)
    return group


class Reread(dist.HashStore):
    """A store that tells when the address of the master has been read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.again = 0, threading.Event()

    def get(self, key: str) -> bytes:
        if key == KEY:
            self.reads += 1
            if self.reads > 1:
                self.again.set()
        return super().get(key)


def test_the_address_of_a_master_that_is_no_more_is_read_again() -> None:
    """torchrun keeps its store, with what is in it, when it starts its processes again."""
    store = Reread()
    store.set(KEY, nobody())

    def member(rank: int) -> tuple[int, int]:
        if rank == 0:
            assert store.again.wait(PATIENCE_S)
        group = begin(store, rank)
        found = group.getRank(), group.getSize()
        group.barrier().wait()
        group.shutdown()
        return found

    assert in_threads([lambda: member(0), lambda: member(1)]) == [(0, 2), (1, 2)]


def test_a_group_is_created_again_before_rank_0_has_left_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its master would take the others in; and its end waited for them to leave, 30 s long."""
    monkeypatch.setattr(hosted, "FAREWELL_S", 3600.0)
    store = dist.HashStore()

    def first() -> float:
        group = begin(store, 0)
        group.barrier().wait()
        wait_until(group.communicator.are_peers_pending)
        group.shutdown()
        return again(0)

    def second() -> float:
        group = begin(store, 1)
        group.barrier().wait()
        group.shutdown()
        return again(1)

    def again(rank: int) -> float:
        group, one = begin(store, rank), torch.ones(1)
        group.allreduce([one]).wait()
        group.shutdown()
        return one.item()

    assert in_threads([first, second]) == [2.0, 2.0]


def test_without_a_first_member_the_address_is_not_read_for_ever() -> None:
    store = dist.HashStore()
    for address in (nobody(), ""):
        store.set(KEY, address)
        with pytest.raises(pccl.PCCLError, match="no pccl master"):
            creation.by_store(store, 1, 2, timedelta(seconds=0.1))


ENDED = """
import os
import signal
import time
from datetime import timedelta

import torch.distributed as dist

from pccl.torch.creation import by_store

group = by_store(dist.HashStore(), 0, 1, timedelta(seconds=30))
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
finally:
    began = time.monotonic()
    group.shutdown()
    print(time.monotonic() - began)
"""


def test_a_hosted_master_that_a_signal_ends_is_not_waited_for() -> None:
    """SIGTERM ends the master before the program's own end does."""
    ended = subprocess.run([sys.executable, "-c", ENDED], stdout=subprocess.PIPE, check=True)
    assert float(ended.stdout) < 1


FIRST = """
import sys
from datetime import timedelta

import torch.distributed as dist

from pccl.torch.creation import by_store

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group = by_store(store, 0, 2, timedelta(seconds=30))
group.barrier().wait()
sys.stdin.read()
"""


def test_the_master_of_a_killed_process_is_given_up_at_once() -> None:
    """By default, a peer waits a minute for its master, which may be started again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", FIRST, str(store.port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as first:
        try:
            store.get(creation.KEY)  # its process may take long to begin
            group = creation.by_store(store, 1, 2, timedelta(seconds=30))
            group.barrier().wait()
        finally:
            first.kill()
        with pytest.raises(pccl.MasterLostError, match="broke, and it has ended") as lost:
            group.barrier().wait()
        listed(f"MasterLostError: {lost.value}")
        group.shutdown()


def test_all_hosted_masters_of_a_program_have_one_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted, "FAREWELL_S", 1.0)
    masters = [HostedMaster("127.0.0.1", dist.HashStore()) for _ in range(4)]
    members = [pccl.Communicator(master.address) for master in masters]
    for member in members:
        member.connect()
    began = time.monotonic()
    hosted.end_all()
    assert time.monotonic() - began < 4 * hosted.FAREWELL_S
    for member in members:
        member.close()


@pytest.mark.parametrize("end", [ProcessGroup.shutdown, ProcessGroup.abort])
def test_cycles_of_a_group_leave_nothing_behind(end: Callable[[ProcessGroup], None]) -> None:
    store, met = dist.HashStore(), threading.Barrier(2)

    def cycle(rank: int) -> None:
        group, one = begin(store, rank), torch.ones(1)
        group.allreduce([one]).wait()
        assert one.item() == 2
        met.wait()
        end(group)
        met.wait()

    def cycles(number: int) -> tuple[int, int]:
        for _ in range(number):
            in_threads([lambda: cycle(0), lambda: cycle(1)])
        pool = [each for each in threading.enumerate() if each.name == "pccl-torch"]  # may grow
        return len(os.listdir("/proc/self/fd")), threading.active_count() - len(pool)

    before = cycles(2)
    wait_until(lambda: all(a <= b for a, b in zip(cycles(3), before, strict=True)))


CYCLES = """
import json, os, sys
import torch
import torch.distributed as dist

port, rank, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
for cycle in range(1, 201):
    dist.init_process_group("pccl", store=store, rank=rank, world_size=2)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 2
    if end == "abort":
        dist.group.WORLD.abort()
    dist.destroy_process_group()
    if cycle in (50, 200):
        pages = int(open("/proc/self/statm").read().split()[1])
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        print(json.dumps([threads, files, pages * os.sysconf("SC_PAGE_SIZE") / 2**20]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_200_groups_with_the_store_of_a_launcher_leave_nothing_behind(end: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", CYCLES, str(store.port)]
    processes = [
        subprocess.Popen([*words, str(rank), end], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        text, _ = process.communicate()
        assert process.returncode == 0
        (threads, files, mib), last = map(json.loads, text.splitlines())
        assert last[0] <= threads + 4  # idle threads of the pool come and go
        assert last[1] <= files + 4  # of these threads' groups, until they have closed them
        assert last[2] <= mib + 8


def test_torch_knows_which_tensors_a_group_takes() -> None:
    with Cluster(1) as cluster:
        group = ProcessGroup(cluster.comms[0])
        assert c10d._device_capability(group)[0] == "cpu"
        cpu = group._get_backend(torch.device("cpu"))
        assert not cpu.supports_time_estimate
        assert not cpu.supports_tensor_alloc(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="has no backend for meta"):
            group._get_backend(torch.device("meta"))


def test_members_begin_together_and_one_that_comes_later_does_not_wait_for_as_many() -> None:
    """The others have begun, and would not wait with it: in all_reduce, they waited for ever."""
    patience = timedelta(seconds=20)
    with pccl.MasterNode("127.0.0.1:0") as master:
        groups: list[ProcessGroup] = []

        def begin() -> int:
            groups.append(creation.join(master.address, 3, timeout=patience))
            return groups[-1].getSize()

        assert in_threads([begin] * 3) == [3, 3, 3]
        first, *others = groups
        for other in others:
            other.shutdown()
        first.allreduce([torch.ones(1)]).wait()
        assert first.getSize() == 1

        def go_on() -> int:
            while first.getSize() == 1:
                if first.communicator.are_peers_pending():
                    first.admit()
            one = torch.ones(1)
            first.allreduce([one]).wait()
            return int(one)

        def come() -> int:
            late = creation.join(master.address, 3, timeout=patience)
            one = torch.ones(1)
            late.allreduce([one]).wait()
            return int(one)

        assert in_threads([go_on, come]) == [2, 2]


def test_an_incomplete_group_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = pccl.Communicator.connect  # takes its time on a busy machine
    monkeypatch.setattr(pccl.Communicator, "connect", lambda its, timeout: connect(its))
    with (
        pccl.MasterNode("127.0.0.1:0") as master,
        pytest.raises(pccl.PCCLTimeoutError, match="1 of 2 members are there in time"),
    ):
        creation.join(master.address, 2, timeout=timedelta(seconds=0.3), patience_s=PATIENCE_S)


def test_a_timeout_at_a_group_without_admission_explains_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So does a restarted copy when the others use torch's own classes."""
    admission = RetryPolicy.admission

    def too_late(policy: RetryPolicy, client: Any, call: Any) -> Any:
        wait_until(lambda: "still waits: if the group has begun without it" in caplog.text)
        policy._call = Deadline(0.0)
        return admission(policy, client, call)

    monkeypatch.setattr(creation, "HINT_S", 0.1)
    with pccl.MasterNode("127.0.0.1:0") as master:
        group = creation.join(master.address, 1, timeout=timedelta(seconds=PATIENCE_S))
        monkeypatch.setattr(RetryPolicy, "admission", too_late)
        said = r"did not admit this one within 120 s.* torch's own DistributedDataParallel admits"
        with pytest.raises(pccl.PCCLTimeoutError, match=said):
            creation.join(master.address, 1, timeout=timedelta(seconds=PATIENCE_S))
        group.shutdown()


LAZY = """
import sys
import torch
import torch.distributed as dist

assert "_pccl_torch" in sys.modules and "pccl" not in sys.modules
assert dist.is_backend_available("pccl") and dist.get_default_backend_for_device("cpu") == "gloo"
dist.init_process_group("pccl", store=dist.HashStore(), rank=0, world_size=1)
one = torch.ones(1)
dist.all_reduce(one)
dist.monitored_barrier()
assert type(dist.group.WORLD).__module__ == "pccl.torch.group"
dist.destroy_process_group()
assert "torch.distributed.tensor" not in sys.modules, "half a second that only sharded models need"
"""
BROKEN = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch.distributed as dist
import _pccl_torch

del dist.Backend.register_backend
_pccl_torch.register()
"""


@pytest.mark.parametrize("program", [LAZY, BROKEN], ids=["lazy", "broken"])
def test_torch_knows_the_name_without_an_import(program: str, tmp_path: Path) -> None:
    # elsewhere than in a checkout, whose metadata may be old
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S, cwd=tmp_path)
