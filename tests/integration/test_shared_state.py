"""sync_shared_state end to end."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster, client_of, in_threads
from peers.waiting import entered

import pccl

SEND_ONLY = pccl.SharedStateSyncStrategy.SEND_ONLY
RECEIVE_ONLY = pccl.SharedStateSyncStrategy.RECEIVE_ONLY


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


def test_the_popular_content_wins_and_only_differences_move(backend: str) -> None:
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


def test_a_newcomer_receives_everything(backend: str) -> None:
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
def test_a_holder_leaves_in_the_middle_of_the_transfer(backend: str, delay_s: float) -> None:
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


def test_fp16_and_unaligned_entries(backend: str) -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            odd = np.frombuffer(bytearray(1 + 4 * 1001), np.uint8)[1:].view(np.float32)
            half = np.full(999, index, np.float16)
            odd[:] = index
            comm.sync_shared_state(state(half, odd))
            assert (half == 0).all()
            assert (odd == 0).all()

        cluster.each(job)


def test_the_same_revision_twice_is_an_error_and_the_run_continues() -> None:
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


def test_alone(backend: str) -> None:
    with Cluster(1) as cluster:
        shared = state(np.ones(3), revision=9)
        assert cluster.comms[0].sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        assert shared.revision == 9


# ---- strategies ----


def test_late_joiners_receive_and_the_others_send(backend: str) -> None:
    with Cluster(4) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            array = np.full(50_001, 1.0 if index < 2 else float(index))
            shared = state(array, revision=8 if index < 2 else 99)
            info = comm.sync_shared_state(shared, SEND_ONLY if index < 2 else RECEIVE_ONLY)
            assert (array == 1).all()
            assert shared.revision == comm.revision == 8
            shared.push_revision()
            again = comm.sync_shared_state(shared, SEND_ONLY)  # all are equal now
            assert again == pccl.SharedStateSyncInfo(0, 0)
            return info

        infos = cluster.each(job)
        assert [info.rx_bytes for info in infos] == [0, 0, 400_008, 400_008]
        assert [info.tx_bytes for info in infos[2:]] == [0, 0]
        assert sum(info.tx_bytes for info in infos) == 800_016


def test_a_newcomer_receives_where_the_others_are(backend: str) -> None:
    """The pattern of asynchronous DiLoCo: who joins late gets the revision that is there."""
    with Cluster(2) as cluster:
        cluster.each(lambda i, comm: comm.sync_shared_state(state(np.ones(9)), SEND_ONLY))
        cluster.join()
        arrays = [np.ones(9), np.ones(9), np.zeros(9)]

        def job(index: int, comm: pccl.Communicator) -> int:
            shared = state(arrays[index], revision=5 if index == 2 else 0)
            comm.sync_shared_state(shared, RECEIVE_ONLY if index == 2 else SEND_ONLY)
            return shared.revision

        assert cluster.each(job) == [0, 0, 0]
        assert (arrays[2] == 1).all()


def test_no_peer_offers_shared_state() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = state(np.full(5, float(index)))
            with pytest.raises(pccl.PCCLError, match="RECEIVE_ONLY") as caught:
                comm.sync_shared_state(shared, RECEIVE_ONLY)
            assert caught.value.result is pccl.Result.NO_SHARED_STATE_AVAILABLE
            comm.sync_shared_state(shared)  # nobody is dropped

        cluster.each(job)
        assert cluster.comms[0].world_size == 2


def test_senders_that_disagree_and_strategies_that_do_not_mix() -> None:
    with Cluster(3) as cluster:

        def disagree(index: int, comm: pccl.Communicator) -> None:
            array = np.full(5, float(index == 2))
            if index == 2:
                with pytest.raises(pccl.KickedError, match=r"SEND_ONLY.*'t0'"):
                    comm.sync_shared_state(state(array), SEND_ONLY)
                assert (array == 1).all()
            else:
                comm.sync_shared_state(state(array), SEND_ONLY)

        def mix(index: int, comm: pccl.Communicator) -> None:
            shared = state(np.zeros(5), revision=1)
            if index == 1:
                with pytest.raises(pccl.KickedError, match="peer 1 with ENFORCE_POPULAR"):
                    comm.sync_shared_state(shared, RECEIVE_ONLY)
            else:
                comm.sync_shared_state(shared)

        cluster.each(disagree)
        del cluster.comms[2]
        cluster.each(mix)
        assert cluster.comms[0].world_size == 1


# ---- revisions ----


def test_the_last_holder_is_gone_and_another_history_begins() -> None:
    with Cluster(1) as cluster:
        first = cluster.comms[0]
        first.sync_shared_state(state(np.ones(3), revision=70))
        comm = cluster.join()
        first.close()
        shared = state(np.zeros(3), revision=2)
        assert comm.sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        assert shared.revision == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_latest_checkpoint_wins_in_any_order_of_votes(order: tuple[int, ...]) -> None:
    with Cluster(3) as cluster:
        turns = [threading.Event() for _ in range(4)]
        turns[0].set()

        def job(index: int, comm: pccl.Communicator) -> None:
            client = client_of(comm)
            place = order.index(index)
            turns[place].wait()
            enter = client.sync

            def vote(*arguments: Any) -> Any:
                entered = enter(*arguments)
                turns[place + 1].set()
                return entered

            client.sync = vote  # type: ignore[method-assign]
            array = np.full(9, float(index))
            shared = state(array, revision=[10, 12, 11][index])
            comm.sync_shared_state(shared)
            assert (array == 1).all() and shared.revision == 12

        cluster.each(job)


def test_only_the_peer_with_too_high_a_revision_gets_an_error() -> None:
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            array = np.ones(10)
            shared = state(array, revision=4)
            comm.sync_shared_state(shared)
            shared.revision = 6 if index == 1 else 5
            array[:] = index == 1
            if index == 1:
                with pytest.raises(pccl.PCCLError, match="this peer offers revision 6") as caught:
                    comm.sync_shared_state(shared)
                assert caught.value.result is pccl.Result.INVALID_ARGUMENT
                assert "the others of its group are at 5" in str(caught.value)
                assert (shared.revision, comm.revision, array.min()) == (6, 4, 1)
                shared.revision = 5
            else:
                comm.sync_shared_state(shared)
            comm.sync_shared_state(shared)  # the others once more, for the one that comes back
            assert comm.revision == 5
            assert (array == 0).all()

        cluster.each(job)


def test_a_revision_that_is_too_high_everywhere_is_an_error_for_all() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = state(np.ones(10), revision=4)
            comm.sync_shared_state(shared)
            shared.revision = 6
            with pytest.raises(pccl.PCCLError, match="peer 1 offers revision 6, but") as caught:
                comm.sync_shared_state(shared)
            assert caught.value.result is pccl.Result.INVALID_ARGUMENT
            shared.revision = 5
            comm.sync_shared_state(shared)
            assert comm.revision == 5

        cluster.each(job)


def test_a_newcomer_with_a_later_revision_is_refused_alone() -> None:
    """Whether the others have advanced for its sake or not, and whether it comes alone or not."""
    with Cluster(2) as cluster:

        def first(index: int, comm: pccl.Communicator) -> pccl.SharedState:
            shared = state(np.full(10, 7.0), revision=4)
            comm.sync_shared_state(shared)
            return shared

        held = cluster.each(first)
        cluster.join()
        cluster.join()

        def job(index: int, comm: pccl.Communicator) -> None:
            if index < 2:
                held[index].revision += index  # one of them has advanced
                comm.sync_shared_state(held[index])
                return
            with pytest.raises(pccl.PCCLError, match="the others of its group are at 5"):
                comm.sync_shared_state(state(np.zeros(10), revision=6 if index == 2 else 90))

        cluster.each(job)
        assert [shared.revision for shared in held] == [5, 5]


def test_a_newcomer_that_is_gone_again_costs_the_others_nothing() -> None:
    """They call with an unchanged revision, for its sake, and it is not there any more."""
    with Cluster(2) as cluster:
        held = [state(np.ones(10), revision=4) for _ in range(2)]
        cluster.each(lambda i, comm: comm.sync_shared_state(held[i]))
        cluster.join().close()
        del cluster.comms[2]
        assert cluster.each(lambda i, comm: comm.sync_shared_state(held[i]).rx_bytes) == [0, 0]
        with pytest.raises(pccl.PCCLError, match="no peer joined or was lost"):
            cluster.each(lambda i, comm: comm.sync_shared_state(held[i]))


def test_a_first_synchronization_waits_for_enough_peers() -> None:
    with Cluster(2) as cluster:
        arrays = [np.full(10, float(i)) for i in range(3)]

        def job(index: int, comm: pccl.Communicator) -> None:
            shared = state(arrays[index], revision=index)
            wanted = 3 if index else 1  # it is enough that one wants so many
            comm.sync_shared_state(shared, min_peers=wanted)

        def late() -> None:
            entered(cluster.master, 2)
            comm = pccl.Communicator(cluster.master.address)
            cluster.comms.append(comm)
            comm.connect()
            job(2, comm)

        def hurried(index: int, comm: pccl.Communicator) -> None:
            with pytest.raises(
                pccl.PCCLTimeoutError, match=r"not begun after 0\.1 s: min_peers is 4"
            ):
                comm.sync_shared_state(state(arrays[index]), min_peers=4, timeout=0.1)

        cluster.each(hurried)
        present = list(enumerate(cluster.comms))
        in_threads([*(partial(job, *each) for each in present), late])
        assert [array[0] for array in arrays] == [2.0] * 3
        cluster.comms.pop().close()

        def later(index: int, comm: pccl.Communicator) -> None:  # once begun, any number will do
            comm.sync_shared_state(state(arrays[index], revision=3), min_peers=3)

        cluster.each(later)
        with pytest.raises(ValueError, match="min_peers is 0"):
            cluster.comms[0].sync_shared_state(state(arrays[0]), min_peers=0)


def test_memory_that_rots_between_two_synchronizations_is_seen(backend: str) -> None:
    """Content that was verified is hashed again each time."""
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            array = np.full(3 << 20, 5, np.uint32)
            shared = state(array, np.ones(3))
            comm.sync_shared_state(shared)
            if index == 1:
                array[-1] ^= 1 << 30
            shared.push_revision()
            info = comm.sync_shared_state(shared)
            assert (array == 5).all()
            return info

        infos = cluster.each(job)
        assert [info.rx_bytes for info in infos] == [0, 12 << 20, 0]
        assert {info.hashed_bytes for info in infos} == {(12 << 20) + 24}
        (found,) = infos[0].divergence
        assert (found.name, found.differing_bytes) == ("t0", 1)


# ---- groups ----


def test_a_group_that_waits_holds_up_no_other() -> None:
    with Cluster(3, groups=[0, 0, 1]) as cluster:
        first, second, other = cluster.comms
        done = threading.Event()

        def wait() -> None:
            first.sync_shared_state(state(np.ones(3)))
            assert done.is_set()

        def go_on() -> None:
            assert other.sync_shared_state(state(np.zeros(5), revision=9)).rx_bytes == 0
            done.set()
            second.sync_shared_state(state(np.ones(3)))

        in_threads([wait, go_on])
        assert (first.revision, other.revision) == (0, 9)


# ---- entries of all kinds ----


def test_entries_that_may_differ_are_received_by_newcomers_alone(backend: str) -> None:
    def offered(array: np.ndarray, revision: int) -> pccl.SharedState:
        same = pccl.TensorInfo.from_numpy(np.ones(3), "same")
        own = pccl.TensorInfo.from_numpy(array, "own", allow_content_inequality=True)
        made = pccl.SharedState([same, own])
        made.revision = revision
        return made

    with Cluster(2) as cluster:
        arrays = [np.full(1000, index, np.int16) for index in range(3)]
        infos = cluster.each(lambda i, comm: comm.sync_shared_state(offered(arrays[i], 7)))
        assert infos == [pccl.SharedStateSyncInfo(0, 0)] * 2
        cluster.join()
        infos = cluster.each(lambda i, comm: comm.sync_shared_state(offered(arrays[i], 7)))
    assert [info.rx_bytes for info in infos] == [0, 0, 2000]
    assert [array[0] for array in arrays] == [0, 1, 0]  # of the peer that was accepted first


@pytest.mark.parametrize("dtype", list(pccl.DataType), ids=lambda dtype: dtype.name)
def test_every_element_type(dtype: pccl.DataType) -> None:
    """At an odd address, with an odd count; and an entry without elements beside it."""
    count = 1001
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            memory = np.full(1 + count * dtype.itemsize, index + 1, np.uint8)
            infos = [
                pccl.TensorInfo(
                    name,
                    memory.ctypes.data + 1,
                    numel=numel,
                    dtype=dtype,
                    device_type=pccl.DeviceType.CPU,
                    allow_content_inequality=False,
                )
                for name, numel in (("none", 0), ("all", count))
            ]
            comm.sync_shared_state(pccl.SharedState(infos))
            assert (memory[1:] == 1).all()
            assert memory[0] == index + 1

        cluster.each(job)


def test_thousands_of_entries(backend: str) -> None:
    entries = 3000
    with Cluster(3) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            arrays = [np.full(1 + i % 7, float(i), np.float32) for i in range(entries)]
            if index == 1:
                for array in arrays[::3]:
                    array += 1
            info = comm.sync_shared_state(state(*arrays))
            assert all((array == i).all() for i, array in enumerate(arrays))
            return info

        infos = cluster.each(job)
        differing = sum(4 * (1 + i % 7) for i in range(0, entries, 3))
        assert [info.rx_bytes for info in infos] == [0, differing, 0]


@pytest.mark.slow
def test_an_entry_above_4_gib(tmp_path: Path) -> None:
    """Its memory is a sparse file: offsets beyond 32 bits, not much of it in memory."""
    count = (4 << 30) + (5 << 20) + 3
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> pccl.SharedStateSyncInfo:
            array = np.memmap(tmp_path / f"{index}", np.uint8, "w+", shape=(count,))
            if index == 0:
                array[-5:] = array[5] = 7
            info = comm.sync_shared_state(state(array))
            assert array[5] == 7 and (array[-5:] == 7).all() and array[-6] == 0
            return info

        infos = in_threads(
            [lambda i=i, c=c: job(i, c) for i, c in enumerate(cluster.comms)],  # type: ignore[misc]
            patience_s=280,
        )
        assert [info.rx_bytes for info in infos] == [0, count]


def _half(model: Any) -> None:
    model.half()


def _other_data(model: Any) -> None:
    model.weight.data = model.weight.data.clone()


def _assigned(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _resized(model: Any) -> None:
    model.weight.data.resize_(100, 100)


@pytest.mark.parametrize("change", [_half, _other_data, _assigned, _resized])
def test_a_module_that_has_other_memory_by_now_is_an_error(change: Any, tmp_path: Path) -> None:
    """Else its peers would receive what it no longer trains."""
    torch = pytest.importorskip("torch")
    from pccl import weights

    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        model = torch.nn.Linear(3, 3)
        shared = pccl.SharedState.from_module(model)
        shared.save(tmp_path / "file")
        named = weights.Publisher(master.address, dict(model.named_parameters()))
        publisher = weights.Publisher(master.address, model)
        comm.sync_shared_state(shared)
        shared.push_revision()
        change(model)
        calls = [
            partial(comm.sync_shared_state, shared),
            partial(shared.save, tmp_path / "file"),
            partial(shared.load, tmp_path / "file"),
        ]
        with named, publisher:
            calls.append(publisher.publish)
            for call in calls if change is _assigned else [*calls, named.publish]:
                with pytest.raises(
                    ValueError, match=r"^'(weight|bias)' has other memory than before"
                ):
                    call()
        anew = pccl.SharedState.from_module(torch.nn.Linear(3, 3))
        anew.push_revision()
        comm.sync_shared_state(anew)


@pytest.mark.parametrize("size", [1, 5, 1_000_000])
def test_an_array_that_was_resized_is_an_error(size: int) -> None:
    """Else pccl would read memory that is no longer the program's."""
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        array = np.zeros(4)
        shared = pccl.SharedState.from_tensors({"x": array})
        comm.sync_shared_state(shared)
        array.resize(size, refcheck=False)
        shared.push_revision()
        with pytest.raises(ValueError, match=r"^'x' has other memory than before"):
            comm.sync_shared_state(shared)
