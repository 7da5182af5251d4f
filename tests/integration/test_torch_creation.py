"""How groups of torch.distributed begin and end, where their master is one of the processes."""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, in_threads
from torch.distributed import distributed_c10d as c10d

import pccl
from pccl.support.logs import configure_logging
from pccl.torch import ProcessGroup, creation
from pccl.torch.group import HostedMaster


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_the_address_of_a_master_that_is_no_more_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store, with what is in it, when it starts its processes again."""
    monkeypatch.setattr(creation, "PATIENCE_S", 0.01)
    store, disappointed = dist.HashStore(), threading.Event()
    store.set(creation.KEY, nobody())
    join = creation.join

    def watched(*arguments: Any, **more: Any) -> ProcessGroup:
        try:
            return join(*arguments, **more)
        except pccl.MasterLostError:
            disappointed.set()
            raise

    monkeypatch.setattr(creation, "join", watched)

    def member(rank: int) -> tuple[int, int]:
        if rank == 0:
            assert disappointed.wait(20)
        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=2,
            global_ranks_in_group=[0, 1],
            timeout=timedelta(seconds=30),
        )
        group = creation.create(options)
        found = group.getRank(), group.getSize()
        group.barrier().wait()
        group.shutdown()
        return found

    assert in_threads([lambda: member(0), lambda: member(1)]) == [(0, 2), (1, 2)]


def test_without_a_first_member_the_address_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creation, "PATIENCE_S", 0.01)
    store = dist.HashStore()
    store.set(creation.KEY, nobody())
    with pytest.raises(pccl.MasterLostError, match="no pccl master answers"):
        creation._join_the_first(store, 2, timeout=timedelta(seconds=0.1), rank=1)


def test_a_hosted_master_that_has_ended_is_not_waited_for() -> None:
    """SIGTERM ends it before the program's own end does."""
    master = HostedMaster("127.0.0.1")
    master._node.interrupt()
    master.end()


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


def test_a_group_that_is_not_complete_in_time_says_so() -> None:
    with (
        pccl.MasterNode("127.0.0.1:0") as master,
        pytest.raises(pccl.PCCLTimeoutError, match="1 of 2 members are there in time"),
    ):
        creation.join(master.address, 2, timeout=timedelta(seconds=0.3))


def test_who_comes_to_a_group_that_admits_nobody_is_told_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a copy that was started again and whose others go on with torch's own classes."""
    configure_logging()
    monkeypatch.setattr(logging.getLogger("pccl"), "propagate", True)
    monkeypatch.setattr(creation, "HINT_S", 0.1)
    with pccl.MasterNode("127.0.0.1:0") as master:
        group = creation.join(master.address, 1, timeout=timedelta(seconds=20))
        said = r"did not admit this one within 0\.5 s.* torch's own DistributedDataParallel admits"
        with pytest.raises(pccl.PCCLTimeoutError, match=said):
            creation.join(master.address, 1, timeout=timedelta(seconds=0.5))
        assert "this process still waits: if the group has begun without it" in caplog.text
        group.shutdown()
