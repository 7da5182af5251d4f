"""A peer's own numbers, of real collectives, and what it says limits them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from peers.cluster import Cluster

import pccl
from pccl.insight import Cause


def test_stats_count_calls_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")  # TCP, of which the kernel tells
    fresh = pccl.Communicator("127.0.0.1:1")
    for ask in (fresh.stats, fresh.explain):
        with pytest.raises(pccl.PCCLError, match="not connected"):
            ask()
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.Explanation:
            assert comm.stats() == pccl.Stats()
            assert str(comm.explain()) == "no collective has succeeded yet"
            large, small = np.ones(2_000_000, np.float32), np.ones(10, np.float32)
            for tag in range(3):
                comm.all_reduce(large, op="sum", tag=tag)
            comm.all_reduce(small)
            comm.barrier()
            state = pccl.SharedState([pccl.TensorInfo.from_numpy(large, "x")])
            comm.sync_shared_state(state)
            with pytest.raises(pccl.MismatchError):
                comm.all_reduce(small if index else small[:5])
            comm.all_reduce(small)
            return comm.explain()

        explained = cluster.each(job)
        for comm in cluster.comms:
            comm.close()
            stats = comm.stats()
            assert stats.collectives == {"all_reduce": 5, "barrier": 1}
            assert stats.failures == {"mismatch": 1} and stats.syncs == 1
            assert stats.tx_bytes == stats.rx_bytes == 3 * 8_000_000 + 2 * 40
            assert stats.entering_seconds > 0 < stats.moving_seconds and stats.sync_seconds > 0
            assert stats.flat()["pccl/collectives/barrier"] == 1.0
        for one in explained:
            assert (one.what, one.count) == ("all_reduce", 3) and one.rate > 0
            assert sum(limit.seconds for limit in one.limits) <= one.seconds * 1.001
            data = [limit for limit in one.limits if limit.cause in DATA]
            assert len(data) == 1, one
            assert (sys.platform == "linux") == ("is not known" not in data[0].why)


DATA = {Cause.CPU, Cause.LINK, Cause.RECEIVER, Cause.ELSEWHERE}


def test_a_recovery_is_counted() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.Stats:
            x = np.ones(100_000, np.float32)
            if index == 2:
                comm.close()
                return comm.stats()
            with pytest.raises(pccl.PeerLostError):
                comm.all_gather(x, np.ones(300_000, np.float32))
            comm.all_reduce(x)
            return comm.stats()

        for stats in cluster.each(job)[:2]:
            assert stats.failures == {"peer_lost": 1}
            assert stats.recoveries == 1 and stats.recovery_seconds > 0
