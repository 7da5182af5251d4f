"""torch's reconfiguration of groups: members, ranks and newcomers by handles. Threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peers.cluster import Cluster, in_threads

import pccl
from pccl.torch import ProcessGroup
from pccl.torch.creation import meet


def options(uuid: int, *handles: str, seconds: float = 20) -> SimpleNamespace:
    """As torch gives them."""
    timeout = timedelta(seconds=seconds)
    return SimpleNamespace(uuid=uuid, handles=list(handles), timeout=timeout, hints={})


def seen(group: ProcessGroup) -> tuple[int, list[float]]:
    """The rank, and all ranks by a collective that depends on them."""
    whole = torch.empty(group.size())
    group.all_gather_single(whole, torch.tensor([float(group.rank())])).wait()
    return group.rank(), whole.tolist()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


def test_members_and_ranks_can_be_reconfigured(cluster: Cluster) -> None:
    """A failure leaves the group as it was."""
    groups = cluster.each(lambda i, comm: ProcessGroup(comm, rank=i))
    handles = [group.get_reconfigure_handle() for group in groups]
    assert len(set(handles)) == 3 and groups[0].supports_reconfigure

    def turned(i: int, _: pccl.Communicator) -> tuple[int, list[float]]:
        assert groups[i].reconfigure(options(1, *handles[1:], handles[0])).wait()
        return seen(groups[i])

    assert cluster.each(turned) == [(rank, [0.0, 1.0, 2.0]) for rank in (2, 0, 1)]

    def failing(i: int, _: pccl.Communicator) -> None:
        group = groups[i]
        with pytest.raises(pccl.PCCLTimeoutError, match="3 peers are in the group, not the 2"):
            group.reconfigure(options(2, *handles[:2], seconds=0.3)).wait()
        with pytest.raises(pccl.PCCLError, match="different uuids"):
            group.reconfigure(options(3 + (i == 0), *handles)).wait()
        with pytest.raises(ValueError, match="is not a handle of a process of the run"):
            group.reconfigure(options(5, "7@elsewhere:1")).wait()
        with pytest.raises(ValueError, match="two of the handles are equal"):
            group.reconfigure(options(5, handles[0], handles[0])).wait()
        stranger = f"0@{group.communicator.address}"
        with pytest.raises(pccl.PCCLError, match="that the handles do not name is in the group"):
            group.reconfigure(options(6, stranger, *handles[1:])).wait()
        group.barrier().wait()

    cluster.each(failing)
    assert [group.rank() for group in groups] == [2, 0, 1]
    groups[2].communicator.close()

    def without(i: int, _: pccl.Communicator) -> tuple[int, int] | None:
        if i == 2:
            return None
        groups[i].reconfigure(options(7, *handles[:2])).wait()
        groups[i].barrier().wait()
        return groups[i].rank(), groups[i].size()

    assert cluster.each(without) == [(0, 2), (1, 2), None]


def newcomer(address: str) -> ProcessGroup:
    """As `init_process_group` makes it; its handle is there at once."""
    meeting = meet(f"pccl://{address}?reconfigure=1", timeout=timedelta(seconds=20))
    _, rank, size = next(meeting)
    assert (rank, size) == (0, 1)
    from pccl.torch.creation import joined

    return joined.pop()


def test_newcomers_are_named_by_handles_while_a_member_is_lost(cluster: Cluster) -> None:
    """They are not admitted before, and get the ranks that the handles give them."""
    groups = cluster.each(lambda i, comm: ProcessGroup(comm, rank=i))
    late = [newcomer(cluster.master.address) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in (late[0], *groups[:2], late[1])]
    groups[2].shutdown()
    members = [late[0], *groups[:2], late[1]]

    def job(group: ProcessGroup) -> tuple[int, list[float]]:
        assert group.reconfigure(options(1, *handles)).wait()
        return seen(group)

    try:
        found = in_threads([lambda g=g: job(g) for g in members])  # type: ignore[misc]
        assert found == [(rank, [0.0, 1.0, 2.0, 3.0]) for rank in range(4)]
        late[1].get_group_store().set("key", "value")
        assert groups[0].get_group_store().get("key") == b"value"
    finally:
        for group in late:
            group.shutdown()


def test_a_run_can_begin_by_a_reconfiguration() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        groups = [newcomer(master.address) for _ in range(3)]
        handles = {group.get_reconfigure_handle() for group in groups}
        begun = threading.Barrier(3)

        def job(group: ProcessGroup) -> tuple[int, list[float]]:
            asked = options(1)
            asked.handles = handles  # a set: in the order of joining
            group.reconfigure(asked).wait()
            found = seen(group)
            begun.wait(20)
            group.shutdown()
            return found

        found = in_threads([lambda g=g: job(g) for g in groups])  # type: ignore[misc]
        assert sorted(found) == [(rank, [0.0, 1.0, 2.0]) for rank in range(3)]


def test_a_newcomer_without_an_invitation_times_out(cluster: Cluster) -> None:
    late = newcomer(cluster.master.address)
    with pytest.raises(pccl.PCCLTimeoutError, match="have not admitted this process in time"):
        late.reconfigure(options(1, late.get_reconfigure_handle(), seconds=0.2)).wait()
    with pytest.raises(pccl.PCCLError):
        late.allreduce([torch.ones(1)], dist.ReduceOp.SUM).wait()
    late.shutdown()
