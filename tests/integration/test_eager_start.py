"""Real peers start collectives eagerly, and the start then turns out to be void."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from peers import waiting
from peers.cluster import Cluster, gather, grow, in_threads
from peers.processes import Master, Reporter

import pccl
from pccl.runtime.client.engine import Engine

LARGE = 100_000  # too large to travel with the vote
EAGER = Path(__file__).resolve().parents[1] / "support" / "programs" / "eager.py"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many ops each engine has begun before their start."""
    counter: Counter[int] = Counter()
    start_eagerly = Engine.start_eagerly

    def count(self: Engine, *args: object, **kwargs: object) -> None:
        counter[id(self)] += 1
        start_eagerly(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "start_eagerly", count)
    return counter


@pytest.fixture
def comms() -> Iterator[list[pccl.Communicator]]:
    with Cluster(2) as cluster:
        reduce(cluster.comms)
        yield cluster.comms


def reduce(comms: list[pccl.Communicator], tag: int = 0) -> None:
    """All reduce, and get the right result."""
    arrays = [np.full(LARGE, 2.0**i, np.float32) for i in range(len(comms))]
    pairs = zip(comms, arrays, strict=True)
    in_threads([lambda c=c, x=x: c.all_reduce(x, op="sum", tag=tag) for c, x in pairs])
    assert all((x == 2 ** len(comms) - 1).all() for x in arrays)


def test_a_call_begins_at_once_when_another_one_has_committed(
    begun: Counter[int], comms: list[pccl.Communicator]
) -> None:
    assert not begun
    reduce(comms)
    assert [*begun.values()] == [1, 1]
    in_threads([lambda c=c: [reduce_alone(c, t) for t in (1, 2)] for c in comms])
    assert [*begun.values()] == [3, 3]


def reduce_alone(comm: pccl.Communicator, tag: int) -> None:
    comm.all_reduce(np.ones(LARGE, np.float32), op="sum", tag=tag)


def test_calls_that_do_not_match_have_changed_nothing(
    begun: Counter[int], comms: list[pccl.Communicator]
) -> None:
    arrays = [np.full(LARGE + i, 1.0 + i, np.float32) for i in range(2)]

    def call(index: int) -> None:
        with pytest.raises(pccl.MismatchError):
            comms[index].all_reduce(arrays[index], op="sum", tag=1)

    in_threads([lambda: call(0), lambda: call(1)])
    assert [*begun.values()] == [1, 1]
    assert (arrays[0] == 1).all() and (arrays[1] == 2).all()
    reduce(comms, tag=1)


def test_a_timed_out_call_returns_its_memory_and_harms_no_later_call(
    begun: Counter[int], comms: list[pccl.Communicator]
) -> None:
    for attempt in range(2):
        mine = np.full(LARGE, 5.0, np.float32)
        with pytest.raises(pccl.PCCLTimeoutError):
            comms[attempt].all_reduce(mine, op="sum", tag=1, timeout=0.05)
        assert (mine == 5).all()
        mine[:] = 7  # what was sent before must not count
        reduce(comms, tag=1)
        reduce(comms, tag=0)
    assert sum(begun.values()) == 2 * (1 + 2 + 2)


def test_the_death_of_a_peer_that_has_not_called_leaves_memory_unchanged(
    begun: Counter[int],
) -> None:
    with Cluster(3) as cluster:
        ours, other, dying = cluster.comms
        reduce(cluster.comms)
        arrays = [np.full(LARGE, 1.0 + i, np.float32) for i in range(2)]
        handles = [
            comm.all_reduce_async(x, op="sum", tag=3)
            for comm, x in zip((ours, other), arrays, strict=True)
        ]
        dying.close()
        ends = in_threads([lambda h=h: h.wait() for h in handles])
        assert len(ends) == 2
        assert all((x == 3).all() for x in arrays)  # those that are left start without it
        assert len(begun) == 2
        reduce([ours, other])


def test_two_tags_in_different_orders(comms: list[pccl.Communicator]) -> None:
    arrays = [[np.full(LARGE, 1.0 + tag, np.float32) for tag in range(4)] for _ in comms]

    def all_tags(index: int) -> None:
        tags = range(4) if index else reversed(range(4))
        handles = [
            comms[index].all_reduce_async(arrays[index][tag], op="sum", tag=tag) for tag in tags
        ]
        for handle in handles:
            handle.wait()

    in_threads([lambda: all_tags(0), lambda: all_tags(1)])
    for mine in arrays:
        assert all((x == 2 * (1 + tag)).all() for tag, x in enumerate(mine))


def finish(comms: list[pccl.Communicator], first: Callable[[], bool], mine: np.ndarray) -> None:
    """The first of two has begun a call with 1.0 in its memory: the other one joins, and both try
    again if that failed for both."""
    theirs = np.full(LARGE, 2.0, np.float32)

    def attempt(comm: pccl.Communicator, array: np.ndarray) -> bool:
        return comm.all_reduce_async(array, op="sum", tag=1).wait()[0]

    ours, other = comms
    done = in_threads([first, lambda: attempt(other, theirs)])
    assert done[0] == done[1]
    if not done[0]:
        assert (mine == 1).all() and (theirs == 2).all()
        done = in_threads([lambda: attempt(ours, mine), lambda: attempt(other, theirs)])
    assert all(done) and (mine == 3).all() and mine.tobytes() == theirs.tobytes()
    reduce(comms)


@pytest.mark.slow
def test_a_peer_is_killed_when_its_call_has_begun(begun: Counter[int]) -> None:
    """Its early data is void: the others have the result without it."""
    with Cluster(2) as cluster:
        eager = Reporter(EAGER, cluster.master.address, 3, LARGE, patience_s=40.0)
        try:
            in_threads([lambda c=c: grow(c, 3) for c in cluster.comms])  # type: ignore[misc]
            zeros = [np.zeros(LARGE, np.float32) for _ in cluster.comms]
            cluster.each(lambda i, comm: comm.all_reduce(zeros[i], op="sum"))
            mine = np.ones(LARGE, np.float32)
            handle = cluster.comms[0].all_reduce_async(mine, op="sum", tag=1)
            waiting.entered(cluster.master, 2)
        finally:
            eager.kill()
        assert [*begun.values()] == [1] and (mine == 1).all()
        finish(cluster.comms, lambda: handle.wait()[0], mine)


def test_a_signal_comes_when_a_call_has_begun(
    begun: Counter[int], comms: list[pccl.Communicator]
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    mine = np.full(LARGE, 5.0, np.float32)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            comms[0].all_reduce(mine, op="sum", tag=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [*begun.values()] == [1] and (mine == 5).all()
    mine[:] = 1  # what was sent before must not count
    handle = comms[0].all_reduce_async(mine, op="sum", tag=1)
    finish(comms, lambda: handle.wait()[0], mine)


def test_the_master_is_restarted_when_a_call_has_begun(begun: Counter[int]) -> None:
    """Its successor's epoch has other streams, and what has come over the old ones is void."""
    master = Master()
    comms = [pccl.Communicator(master.address) for _ in range(2)]
    try:
        comms[0].connect()
        in_threads([lambda: grow(comms[0], 2), lambda: gather(comms[1], 2)])
        reduce(comms)
        mine = np.ones(LARGE, np.float32)
        handle = comms[0].all_reduce_async(mine, op="sum", tag=1)
        waiting.wait_until(lambda: begun)
        master.kill()
        master.start()
        finish(comms, lambda: handle.wait()[0], mine)
    finally:
        for comm in comms:
            comm.close()
        master.kill()
