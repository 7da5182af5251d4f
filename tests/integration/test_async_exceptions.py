"""An exception at every line of every call: the peer that it befalls has let go, all others go on.

Signal handlers raise between any two bytecodes of the main thread, PyThreadState_SetAsyncExc in any
thread. A tracer raises here, at one line of pccl after the other. Afterwards the call has either
ended or raised that exception; nothing refers to its memory; and the same call works, on all peers.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster, in_threads
from peers.injected import Injected, Tracer, interrupted_in_conditions
from peers.waiting import wait_until

import pccl
from pccl.runtime.signals import Latch

SHORT_S, LONG_S = 0.05, 30.0
LARGE = 100_000  # elements, which go around the ring
SAMPLES = 12  # of the lines of each call, where not all of them are tried


@dataclass
class Peer:
    """One peer and what it calls with."""

    comm: pccl.Communicator
    index: int
    array: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    target: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    state: pccl.SharedState | None = None
    handle: pccl.AsyncReduceHandle | None = None


@dataclass
class Scenario:
    """A call: what comes before it, the call with a time limit, and what holds when it is over.

    `check` is told whether the call has succeeded; if not it may have, or all is as it was.
    """

    prepare: Callable[[Peer], None]
    call: Callable[[Peer, float], object]
    check: Callable[[Peer, bool], None]


def fill(count: int) -> Callable[[Peer], None]:
    def prepare(peer: Peer) -> None:
        peer.array = np.full(count, 2.0**peer.index, np.float32)
        peer.target = np.zeros(count, np.float32)

    return prepare


def is_sum(peer: Peer, succeeded: bool) -> None:
    """In place: what it gave, or the sum of all; elsewhere: what it gave, in any case."""
    found = set(np.unique(peer.array))
    assert found in ([{3.0}] if succeeded else [{3.0}, {2.0**peer.index}])


def is_apart(peer: Peer, succeeded: bool) -> None:
    assert set(np.unique(peer.array)) == {2.0**peer.index}
    assert not succeeded or set(np.unique(peer.target)) == {3.0}


def is_first(peer: Peer, succeeded: bool) -> None:
    assert set(np.unique(peer.array)) in ([{1.0}] if succeeded else [{1.0}, {2.0**peer.index}])


def nothing(peer: Peer, *_: object) -> None:
    pass


def awaited(peer: Peer, limit: float) -> None:
    peer.handle = handle = peer.comm.all_reduce_async(peer.array, op="sum", tag=3)
    if not handle.wait(timeout=limit)[0]:
        assert handle.error is not None
        raise handle.error


def differ(peer: Peer) -> None:
    """The first peer's shared state is ahead: the other one fetches it."""
    peer.array = np.zeros(30_000)
    peer.state = pccl.SharedState.from_tensors({"x": peer.array})
    peer.state.revision = peer.comm.revision + 1 if peer.index == 0 else 0
    peer.array[:] = peer.state.revision if peer.index == 0 else -1.0


def synchronize(peer: Peer, limit: float) -> None:
    assert peer.state is not None
    peer.comm.sync_shared_state(peer.state, timeout=limit)


def is_whole(peer: Peer, succeeded: bool) -> None:
    """Torn content is what must never be: all is old, or all is new."""
    found = set(np.unique(peer.array))
    assert len(found) == 1
    assert not succeeded or found != {-1.0}


SCENARIOS = {
    "all_reduce, small": Scenario(
        fill(10), lambda p, s: p.comm.all_reduce(p.array, op="sum", timeout=s), is_sum
    ),
    "all_reduce, large": Scenario(
        fill(LARGE),
        lambda p, s: p.comm.all_reduce(p.array, p.target, op="sum", timeout=s),
        is_apart,
    ),
    "all_reduce, in place": Scenario(
        fill(LARGE), lambda p, s: p.comm.all_reduce(p.array, op="sum", timeout=s), is_sum
    ),
    "all_reduce_async": Scenario(fill(LARGE), awaited, is_sum),
    "broadcast": Scenario(fill(LARGE), lambda p, s: p.comm.broadcast(p.array, timeout=s), is_first),
    "barrier": Scenario(nothing, lambda p, s: p.comm.barrier(timeout=s), nothing),
    "update_topology": Scenario(nothing, lambda p, s: p.comm.update_topology(timeout=s), nothing),
    "are_peers_pending": Scenario(
        nothing, lambda p, s: p.comm.are_peers_pending(timeout=s), nothing
    ),
    "sync_shared_state": Scenario(differ, synchronize, is_whole),
}


def nothing_refers_to_memory(peer: Peer) -> None:
    """The arrays of a call that has ended are free when the program forgets them."""
    left = [weakref.ref(peer.array), weakref.ref(peer.target)]
    peer.array = peer.target = np.zeros(0, np.float32)
    peer.state = None

    def are_free() -> bool:
        if any(one() is not None for one in left):
            gc.collect()  # two exceptions may refer to each other's frames
        return all(one() is None for one in left)

    wait_until(are_free)


def attempt(peer: Peer, scenario: Scenario, tracer: Tracer) -> None:
    """Makes the call under the tracer, in this thread."""
    scenario.prepare(peer)
    peer.handle, succeeded = None, False
    try:
        with tracer.tracing():
            scenario.call(peer, SHORT_S)
            succeeded = True
    except (Injected, pccl.PCCLError):
        pass
    if peer.handle is not None:  # an exception before it began to wait gives nothing up
        succeeded = peer.handle.wait(timeout=SHORT_S)[0]
        peer.handle = None
    scenario.check(peer, succeeded)
    nothing_refers_to_memory(peer)


def join_in(peer: Peer, scenario: Scenario) -> None:
    scenario.prepare(peer)
    with contextlib.suppress(pccl.PCCLError):
        scenario.call(peer, SHORT_S)


def again(peer: Peer, scenario: Scenario) -> None:
    """The same call, by all of them, works: though what one was told of may come a moment later."""
    for _ in range(20):
        scenario.prepare(peer)
        try:
            scenario.call(peer, LONG_S)
            break
        except (pccl.PeerLostError, pccl.MismatchError):
            pass
    else:
        raise AssertionError("it never works again")
    scenario.check(peer, True)


def inject(peers: list[Peer], scenario: Scenario, at: frozenset[int]) -> Tracer:
    tracer = Tracer(at)
    ours, other = reversed(peers)  # the second one, which fetches
    in_threads([lambda: attempt(ours, scenario, tracer), lambda: join_in(other, scenario)])
    in_threads([lambda p=p: again(p, scenario) for p in peers])  # type: ignore[misc]
    return tracer


@contextlib.contextmanager
def all_threads_well() -> Iterator[None]:
    """No thread ends by an exception meanwhile."""
    failed: list[object] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        yield
    finally:
        threading.excepthook = before
    assert not failed


def each_line(scenario: Scenario, step: int | None, echo: int = 0) -> None:
    """Raises at every `step`-th line; None: at some, spread over all. `echo`: and later again."""
    with Cluster(2) as cluster, all_threads_well():
        peers = [Peer(comm, index) for index, comm in enumerate(cluster.comms)]
        in_threads([lambda p=p: again(p, scenario) for p in peers])  # type: ignore[misc]
        lines = max(inject(peers, scenario, frozenset()).lines for _ in range(3))
        assert lines > SAMPLES
        step = step or lines // SAMPLES
        for line in range(1, lines + 1, step):
            inject(peers, scenario, frozenset((line, line + echo)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_at_some_lines(name: str) -> None:
    each_line(SCENARIOS[name], None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_every_line(name: str) -> None:
    each_line(SCENARIOS[name], 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["all_reduce, small", "all_reduce, in place", "sync_shared_state"])
@pytest.mark.parametrize("echo", [2, 7])
def test_twice(name: str, echo: int) -> None:
    """A second one while the first is dealt with."""
    each_line(SCENARIOS[name], 3, echo)


# ---- joining and leaving ----


def threads_of_pccl() -> int:
    return sum(each.name in ("pccl-control", "pccl-engine") for each in threading.enumerate())


def nothing_is_left(before: int) -> None:
    """Waits until pccl has as many threads as before: one that has ended is soon gone."""
    wait_until(lambda: threads_of_pccl() == before)


def joins(master: pccl.MasterNode, tracer: Tracer) -> None:
    """A call of connect under the tracer, and then one that must succeed."""
    before = threads_of_pccl()
    comm = pccl.Communicator(master.address)
    with contextlib.suppress(Injected), tracer.tracing():
        comm.connect(timeout=LONG_S)
    try:
        assert not comm.are_peers_pending(timeout=LONG_S)
    except pccl.PCCLError:
        nothing_is_left(before)  # of what was half connected
        comm.connect(timeout=LONG_S)
        assert not comm.are_peers_pending(timeout=LONG_S)
    comm.close()
    nothing_is_left(before)


def leaves(master: pccl.MasterNode, tracer: Tracer) -> None:
    """A call of close under the tracer, and then another one."""
    before = threads_of_pccl()
    comm = pccl.Communicator(master.address)
    comm.connect(timeout=LONG_S)
    with contextlib.suppress(Injected), tracer.tracing():
        comm.close()
    comm.close()
    nothing_is_left(before)


@pytest.mark.parametrize("call", [joins, leaves])
@pytest.mark.parametrize("step", [None, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_joining_and_leaving(
    call: Callable[[pccl.MasterNode, Tracer], None], step: int | None
) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, all_threads_well():
        count = Tracer()
        call(master, count)
        for line in range(1, count.lines + 1, step or max(1, count.lines // SAMPLES)):
            call(master, Tracer(frozenset((line,))))


def latch() -> tuple[Callable[[], object], Callable[[], object]]:
    made = Latch()
    return lambda: made.wait(0.01), made.set


def learner() -> tuple[Callable[[], object], Callable[[], object]]:
    pytest.importorskip("torch")
    from pccl.diloco.decoupled import Learner

    made = Learner()
    return made.stepped, made.met


def time_limits() -> tuple[Callable[[], object], Callable[[], object]]:
    pytest.importorskip("torch")
    from pccl.torch.work import TimeLimits

    made: Any = TimeLimits()
    return lambda: made.discard(None), lambda: made.discard(None)


@pytest.mark.parametrize("make", [latch, learner, time_limits])
def test_no_lock_stays_locked(
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> None:
    """If an exception comes in one thread, where Python's own locks would break, others go on."""
    mine, other = make()
    with interrupted_in_conditions():
        mine()
    in_threads([other], 20.0)
