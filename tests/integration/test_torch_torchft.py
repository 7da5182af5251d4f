"""The process group for torchft, where that is installed."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from peers.cluster import in_threads

pytestmark = pytest.mark.slow


def test_a_group_of_torchft_is_reconfigured_after_a_loss() -> None:
    pytest.importorskip("torchft")
    from pccl.torch.torchft import ProcessGroupPCCL

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    lost = threading.Barrier(3)

    def replica(rank: int) -> float:
        group = ProcessGroupPCCL(timeout=timedelta(seconds=20))
        address = f"localhost:{store.port}"
        group.configure(f"{address}/1", f"replica {rank}", rank, 3)
        one = torch.ones(1)
        group.allreduce([one], dist.AllreduceOptions()).wait()
        assert one.item() == 3
        lost.wait()
        if rank == 0:  # the master is here
            group.abort()
            return 0
        with pytest.raises(RuntimeError, match=r"Connection closed by peer|timed out|master"):
            group.allgather([[torch.ones(1) for _ in range(3)]], [one], None).wait()
        group.configure(f"{address}/2", f"replica {rank}", rank - 1, 2)
        one = torch.ones(1)
        group.allreduce([one], dist.AllreduceOptions()).wait()
        group.shutdown()
        return one.item()

    assert in_threads([lambda r=r: replica(r) for r in range(3)]) == [0, 2, 2]
