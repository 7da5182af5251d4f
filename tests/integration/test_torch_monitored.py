"""monitored_barrier of torch.distributed: it names the missing ranks, and the next one works."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from peers.cluster import Cluster

import pccl
from pccl.torch import ProcessGroup

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.2)


def test_rank_0_names_the_missing_and_the_next_barrier_is_whole_again() -> None:
    """Messages that were given up are taken back, on both ends."""
    with Cluster(3) as cluster:
        groups = cluster.each(lambda i, comm: ProcessGroup(comm, rank=i))

        def each(without: tuple[int, ...], timeout: timedelta, all_ranks: bool) -> list[str]:
            def job(i: int, _: pccl.Communicator) -> str:
                if i in without:
                    return ""
                try:
                    dist.monitored_barrier(groups[i], timeout, all_ranks)
                except RuntimeError as error:
                    return str(error).partition(":")[0]
                return "passed"

            return cluster.each(job)

        waited = "successfully reached monitoredBarrier, but received errors while waiting for "
        waited += "send/recv from rank 0"
        assert each((), LONG, False) == ["passed"] * 3
        found = each((1,), SHORT, False)
        assert found == ["Rank 1 failed to pass monitoredBarrier in 200 ms", "", f"Rank 2 {waited}"]
        assert each((), LONG, True) == ["passed"] * 3
        found = each((1, 2), SHORT, True)
        assert found == ["Ranks 1, 2 failed to pass monitoredBarrier in 200 ms", "", ""]
        assert each((0,), SHORT, False) == ["", f"Rank 1 {waited}", f"Rank 2 {waited}"]
        assert each((), LONG, False) == ["passed"] * 3
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            groups[0].monitored_barrier(timedelta(0))
        with pytest.raises(pccl.PCCLTimeoutError, match=r" Timed out waiting 0\.2 s, the limit of"):
            groups[0].set_timeout(SHORT)
            groups[0].barrier().wait()
