"""sync_shared_state end to end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cluster import Cluster, in_threads

import pccl


def state(*arrays: np.ndarray, revision: int = 0) -> pccl.SharedState:
    made = pccl.SharedState(
        [pccl.TensorInfo.from_numpy(array, f"t{i}") for i, array in enumerate(arrays)]
    )
    made.revision = revision
    return made


def test_equal_content_moves_nothing(cluster: Cluster) -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        shared = state(np.arange(1000, dtype=np.float32), np.empty(0, np.int64))
        assert comm.sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        shared.push_revision()
        assert comm.sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        assert comm.revision == shared.revision == 1

    cluster.each(job)


def test_the_popular_content_wins_and_only_what_differs_moves(filling: str) -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            same = np.arange(7, dtype=np.uint8)
            array = np.full(100_003, 1.0 if index == 1 else 2.0, np.float64)
            info = comm.sync_shared_state(state(same, array))
            assert (array == 2).all()
            np.testing.assert_array_equal(same, np.arange(7))
            return info

        infos = cluster.each(job)
        assert [info.rx_bytes for info in infos] == [0, 800_024, 0]
        assert sum(info.tx_bytes for info in infos) == 800_024


def test_a_newcomer_receives_everything(filling: str) -> None:
    with Cluster(2) as cluster:
        arrays = [np.full(300_001, 5.0, np.float32) for _ in range(2)]
        states = [state(array, revision=41) for array in arrays]
        cluster.each(lambda i, comm: comm.sync_shared_state(states[i]))
        cluster.join()
        arrays.append(np.zeros(300_001, np.float32))
        states.append(state(arrays[2]))
        for shared in states[:2]:
            shared.push_revision()
        infos = cluster.each(lambda i, comm: comm.sync_shared_state(states[i]))
        assert [shared.revision for shared in states] == [42, 42, 42]
        assert (arrays[2] == 5).all()
        assert infos[2] == pccl.SharedStateSyncInfo(0, 1_200_004)


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05])
def test_a_holder_leaves_in_the_middle_of_the_transfer(filling: str, delay_s: float) -> None:
    with Cluster(3) as cluster:
        arrays = [np.full(4_000_000, 3.0, np.float64) for _ in range(2)] + [np.zeros(4_000_000)]
        moment = threading.Event()

        def job(index: int, comm: pccl.Communicator) -> str:
            try:
                info = comm.sync_shared_state(state(arrays[index]))
            except pccl.PCCLError as error:
                assert index == 0
                return str(error)
            return str(info.rx_bytes)

        def leave() -> str:
            moment.wait(delay_s)
            cluster.comms[0].close()
            return "left"

        jobs = [lambda i=i, c=c: job(i, c) for i, c in enumerate(cluster.comms)]  # type: ignore[misc]
        in_threads([*jobs, leave])
        np.testing.assert_array_equal(arrays[1], arrays[2])
        assert (arrays[1] == arrays[1][0]).all()
        assert cluster.comms[1].world_size == 2


def test_fp16_and_unaligned_entries(filling: str) -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            odd = np.frombuffer(bytearray(1 + 4 * 1001), np.uint8)[1:].view(np.float32)
            half = np.full(999, index, np.float16)
            odd[:] = index
            comm.sync_shared_state(state(half, odd))
            assert (half == 0).all()
            assert (odd == 0).all()

        cluster.each(job)


def test_the_same_revision_twice_is_an_error_and_the_run_goes_on() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = state(np.ones(10))
            comm.sync_shared_state(shared)
            with pytest.raises(pccl.PCCLError, match="push_revision"):
                comm.sync_shared_state(shared)
            shared.push_revision()
            comm.sync_shared_state(shared)

        cluster.each(job)


def test_another_structure_is_dropped_with_the_first_difference() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            if index == 2:
                with pytest.raises(pccl.PCCLError, match="element count"):
                    comm.sync_shared_state(state(np.ones(11)))
            else:
                comm.sync_shared_state(state(np.ones(10)))

        cluster.each(job)
        assert cluster.comms[0].world_size == 2
        with pytest.raises(pccl.PCCLError, match="dropped this peer"):
            cluster.comms[2].update_topology()


def test_alone(filling: str) -> None:
    with Cluster(1) as cluster:
        shared = state(np.ones(3), revision=9)
        assert cluster.comms[0].sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        assert shared.revision == 9


def test_what_is_not_there_yet_says_so() -> None:
    with Cluster(1) as cluster:
        for strategy in ("RECEIVE_ONLY", "SEND_ONLY"):
            with pytest.raises(pccl.UnsupportedError, match="ENFORCE_POPULAR"):
                cluster.comms[0].sync_shared_state(
                    state(np.ones(3)), pccl.SharedStateSyncStrategy[strategy]
                )
