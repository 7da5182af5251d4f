"""Handles in asyncio: `done()` and `await`, which never hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.waiting import PATIENCE_S

import pccl

LARGE = 100_000  # elements, which go around the ring


@pytest.fixture(scope="module")
def pair() -> Iterator[list[pccl.Communicator]]:
    with Cluster(2) as cluster:
        yield cluster.comms


def launch(comm: pccl.Communicator, value: float, tag: int = 0) -> pccl.AsyncReduceHandle:
    return comm.all_reduce_async(np.full(LARGE, value, np.float32), op="sum", tag=tag)


def is_sum(handle: pccl.AsyncReduceHandle) -> bool:
    assert isinstance(handle.result, np.ndarray)
    return bool((handle.result == 3).all())


def test_done_waits_for_nothing(pair: list[pccl.Communicator]) -> None:
    first = launch(pair[0], 1)
    assert not first.done()
    second = launch(pair[1], 2)
    assert first.wait(timeout=PATIENCE_S)[0] and first.done() and is_sum(first)
    while not second.done():
        pass
    assert second.wait(timeout=0)[0] and is_sum(second)


async def several(pair: list[pccl.Communicator]) -> None:
    ours = [launch(pair[0], 1, tag) for tag in range(5)]
    tasks = [asyncio.ensure_future(handle) for handle in ours]
    again = asyncio.ensure_future(ours[3])
    for _ in range(20):
        await asyncio.sleep(0)  # the loop goes on
    assert not any(task.done() for task in tasks)
    theirs = [launch(pair[1], 2, tag) for tag in reversed(range(5))]
    ends = await asyncio.wait_for(asyncio.gather(*tasks, again, *theirs), PATIENCE_S)
    assert all(is_success and info.world_size == 2 for is_success, _, info in ends)
    assert all(is_sum(handle) and handle.done() for handle in ours + theirs)
    assert await ours[0] == ends[0] == ours[0].wait()


def test_several_awaits_do_not_block_the_event_loop(pair: list[pccl.Communicator]) -> None:
    asyncio.run(several(pair))


async def cancelled(pair: list[pccl.Communicator]) -> None:
    ours = launch(pair[0], 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ours, 0.05)
    task = asyncio.ensure_future(ours)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ours.done(), "it goes on"
    theirs = launch(pair[1], 2)
    ends = await asyncio.wait_for(asyncio.gather(ours, theirs), PATIENCE_S)
    assert all(is_success for is_success, _, _ in ends) and is_sum(ours) and is_sum(theirs)


def test_a_cancelled_await_leaves_the_collective_as_it_is(pair: list[pccl.Communicator]) -> None:
    asyncio.run(cancelled(pair))


def test_a_loop_that_is_closed_before_the_end(
    pair: list[pccl.Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    ours = launch(pair[0], 1)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ours, 0.05)

    asyncio.run(leave())
    theirs = launch(pair[1], 2)
    for handle in (ours, theirs):
        assert handle.wait(timeout=PATIENCE_S)[0] and is_sum(handle)
    assert not failed


def test_a_failure_is_the_result_and_not_raised() -> None:
    with Cluster(2) as cluster:
        ours, other = cluster.comms

        async def work() -> None:
            handle = launch(ours, 1)
            task = asyncio.ensure_future(handle)
            await asyncio.sleep(0)
            other.close()
            is_success, status, _ = await asyncio.wait_for(task, PATIENCE_S)
            assert (is_success, status) == (False, pccl.Result.RANK_CONNECTION_LOST.value)
            assert isinstance(handle.error, pccl.PeerLostError)
            alone = ours.barrier_async()
            assert alone.done() and (await alone)[0]

        asyncio.run(work())


def test_an_await_ends_with_the_membership() -> None:
    with Cluster(2) as cluster:
        ours = cluster.comms[0]

        async def work() -> None:
            task = asyncio.ensure_future(launch(ours, 1))
            await asyncio.sleep(0)
            await asyncio.to_thread(ours.close)
            assert not (await asyncio.wait_for(task, PATIENCE_S))[0]

        asyncio.run(work())
