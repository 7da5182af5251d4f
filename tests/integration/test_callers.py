"""However a call ends, it releases everything first."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, client_of, in_threads
from peers.processes import Master, stop
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl import operands
from pccl.protocol.tuning import choose
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.sync import Staging


class Alarm(Exception):
    """Raised by a signal handler."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises Alarm in the main thread after some seconds."""

    def ring(signum: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pair() -> Iterator[list[pccl.Communicator]]:
    with Cluster(2) as cluster:
        yield cluster.comms


def works(comms: list[pccl.Communicator], count: int = 1000, tag: int = 0) -> None:
    """All can reduce together."""
    arrays = [np.full(count, 2.0**i, np.float32) for i in range(len(comms))]
    jobs = [
        lambda c=c, x=x: c.all_reduce(x, op="sum", tag=tag, timeout=PATIENCE_S)
        for c, x in zip(comms, arrays, strict=True)
    ]
    in_threads(jobs)  # type: ignore[arg-type]
    assert all((x == 2.0 ** len(comms) - 1).all() for x in arrays)


# ---- exceptions ----


@pytest.mark.parametrize("count", [1000, 200_000], ids=["small", "large"])
def test_a_signal_handler_raises_out_of_a_wait(pair: list[pccl.Communicator], count: int) -> None:
    ours, other = pair
    x = np.ones(count, np.float32)
    with alarm(0.2), pytest.raises(Alarm):
        ours.all_reduce(x, op="sum")
    assert (x == 1).all()
    x[:] = 99  # whoever reduces now must not see this
    y = np.ones(count, np.float32)
    with pytest.raises(pccl.PCCLTimeoutError):
        other.all_reduce(y, op="sum", timeout=0.2)
    assert (y == 1).all() and (x == 99).all()
    works(pair, count)


def test_a_signal_handler_raises_amid_the_data(pair: list[pccl.Communicator]) -> None:
    ours, other = pair
    ends: list[object] = []

    def insist() -> None:
        try:
            other.all_reduce(np.ones(8 << 20, np.float32), op="sum", timeout=PATIENCE_S)
            ends.append("done")
        except pccl.PCCLError as error:
            ends.append(error)

    for delay in (0.001, 0.01, 0.03):
        thread = threading.Thread(target=insist)
        thread.start()
        x = np.ones(8 << 20, np.float32)
        with contextlib.suppress(Alarm), alarm(delay):
            ours.all_reduce(x, op="sum")
        content = set(np.unique(x))
        assert content in ({1.0}, {2.0})
        x[:] = 7
        if content == {1.0} and thread.is_alive():
            with contextlib.suppress(pccl.PCCLError):
                ours.all_reduce(np.ones(8 << 20, np.float32), op="sum", timeout=1.0)
        thread.join()
        assert (x == 7).all()
    works(pair, 1 << 20)


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_no_memory_for_staging(
    pair: list[pccl.Communicator], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*arguments: object) -> None:
        raise error("none left")

    states = [pccl.SharedState.from_tensors({"x": np.full(5000, i)}) for i in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "__init__", fail)
        with pytest.raises((error, pccl.PeerLostError)) as caught:
            in_threads(
                [lambda c=c, s=s: c.sync_shared_state(s) for c, s in zip(pair, states, strict=True)]  # type: ignore[misc]
            )
    if isinstance(caught.value, pccl.PeerLostError):
        assert "has left by an exception" in str(caught.value)
        listed(f"PeerLostError: {caught.value}")
    else:
        assert "none left" in str(caught.value)
    in_threads([lambda c=c, s=s: c.sync_shared_state(s) for c, s in zip(pair, states, strict=True)])  # type: ignore[misc]
    assert states[0].revision == states[1].revision == 0
    works(pair)


# ---- time limits ----

BAD = [(float("nan"), ValueError), (-1, ValueError), (1e300, ValueError), ("x", TypeError)]


@pytest.mark.parametrize(("limit", "error"), BAD)
def test_limits_are_checked_before_anything_happens(
    pair: list[pccl.Communicator], limit: float, error: type[Exception]
) -> None:
    ours = pair[0]
    x = np.ones(10, np.float32)
    state = pccl.SharedState.from_tensors({"x": x})
    descriptors: list[pccl.ReduceOpDescriptor] = []
    fresh = pccl.Communicator("127.0.0.1:1")
    for call in (
        lambda: ours.all_reduce(x, timeout=limit),
        lambda: ours.all_gather(x, timeout=limit),
        lambda: ours.reduce_scatter(x, timeout=limit),
        lambda: ours.broadcast(x, timeout=limit),
        lambda: ours.barrier(timeout=limit),
        lambda: ours.update_topology(timeout=limit),
        lambda: ours.are_peers_pending(timeout=limit),
        lambda: ours.optimize_topology(timeout=limit),
        lambda: ours.sync_shared_state(state, timeout=limit),
        lambda: ours.all_reduce_multiple_with_retry(descriptors, timeout=limit),
        lambda: fresh.connect(timeout=limit),
    ):
        with pytest.raises(error, match=r"^timeout is "):
            call()
    handle = ours.all_reduce_async(x)
    with pytest.raises(error, match=r"^timeout is "):
        handle.wait(timeout=limit)
    assert handle.wait(timeout=0.0)[0] is False
    works(pair)


def test_each_waiter_has_its_own_limit(pair: list[pccl.Communicator]) -> None:
    handle = pair[0].all_reduce_async(np.ones(10, np.float32))
    patient = threading.Thread(target=handle.wait)
    patient.start()
    assert handle.wait(timeout=0.2)[0] is False
    patient.join(PATIENCE_S)
    assert not patient.is_alive()


@contextlib.contextmanager
def two_of_a_master() -> Iterator[tuple[Master, list[pccl.Communicator]]]:
    """Two peers here; their master is another process."""
    master = Master()
    with contextlib.ExitStack() as stack:
        stack.callback(master.kill)
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        comms[0].connect()

        def admit() -> None:
            while not comms[0].are_peers_pending():
                pass
            comms[0].update_topology()

        in_threads([admit, comms[1].connect])
        for comm in comms:
            stack.callback(comm.close)
        yield master, comms


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
def test_an_exception_does_not_wait_for_a_master_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", "3600000")  # the connection stands
    with two_of_a_master() as (master, comms):
        x = np.ones(10, np.float32)
        stop(master.process)
        try:
            with alarm(0.1), pytest.raises(Alarm):
                comms[0].all_reduce(x, op="sum")
        finally:
            master.process.send_signal(signal.SIGCONT)
        works(comms, tag=1)  # the master may hear of the other's call between ours and its end
        works(comms)


def test_limits_hold_while_the_master_is_away() -> None:
    with two_of_a_master() as (master, comms):
        small, large = np.ones(10, np.float32), np.ones(200_000, np.float32)
        early = [comms[0].all_reduce_async(x, tag=7 + i) for i, x in enumerate((small, large))]
        master.kill()
        state = pccl.SharedState.from_tensors({"x": np.ones(10)})

        def wait(handle: pccl.AsyncReduceHandle) -> None:
            assert not handle.wait(timeout=0.1)[0]
            assert handle.error is not None
            raise handle.error

        for call in (
            *(functools.partial(wait, handle) for handle in early),
            lambda: comms[0].all_reduce(small, op="sum", timeout=0.1),
            lambda: comms[0].all_reduce(large, op="sum", timeout=0.1),
            lambda: comms[0].update_topology(timeout=0.1),
            lambda: comms[0].are_peers_pending(timeout=0.1),
            lambda: comms[0].optimize_topology(timeout=0.1),
            lambda: comms[0].sync_shared_state(state, timeout=0.1),
        ):
            with pytest.raises(pccl.PCCLTimeoutError):
                call()
        assert (small == 1).all() and (large == 1).all()
        master.start()
        works(comms, small.size)
        works(comms, large.size)


# ---- handles ----


def test_a_dropped_handle(pair: list[pccl.Communicator], caplog: pytest.LogCaptureFixture) -> None:
    ours, other = pair
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    ours.all_reduce_async(x, op="sum")
    gc.collect()
    with pytest.raises(pccl.PCCLError, match="not awaited"):
        ours.update_topology()  # it goes on
    other.all_reduce(y, op="sum")

    def is_over() -> bool:
        with contextlib.suppress(pccl.PCCLError):
            ours.update_topology()
            return True
        return False

    in_threads([lambda: wait_until(is_over), other.update_topology])
    assert (x == 2).all() and (y == 2).all()
    in_threads([ours.update_topology, other.update_topology])
    with caplog.at_level(logging.WARNING, "pccl"):
        ours.all_reduce_async(x)
        with pytest.raises(pccl.MismatchError):
            other.all_reduce(np.ones(11, np.float32))
        wait_until(lambda: "a collective whose handle was dropped has failed" in caplog.text)
    works(pair)


def test_many_with_retry_let_go_of_all_after_a_mismatch(pair: list[pccl.Communicator]) -> None:
    ours, other = pair
    kind = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
    rows = [np.ones(10 + tag, np.float32) for tag in range(4)]
    descriptors = [
        pccl.ReduceOpDescriptor.from_numpy(
            x, x, pccl.ReduceDescriptor(x.size, pccl.ReduceOp.SUM, tag, kind, None)
        )
        for tag, x in enumerate(rows)
    ]
    with pytest.raises(pccl.MismatchError):
        in_threads(
            [
                lambda: ours.all_reduce_multiple_with_retry(descriptors),
                lambda: _expect(pccl.MismatchError, lambda: other.all_reduce(np.ones(99))),
            ]
        )
    for tag in range(4):
        works(pair, tag=tag)


def _expect(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


# ---- what threads know of ranks ----


def test_each_thread_has_its_own_view_of_the_world_size() -> None:
    with Cluster(3) as cluster:
        comm, other, lost = cluster.comms
        assert comm.world_size == 3
        lost.close()
        sizes: list[int] = []

        def watch() -> None:
            wait_until(lambda: comm.world_size == 2)
            sizes.append(comm.world_size)

        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
        assert sizes == [2]
        wait_until(lambda: other.world_size == 2)
        x = np.ones(10, np.float32)
        errors: list[BaseException] = []

        def join_in() -> None:
            with contextlib.suppress(pccl.PeerLostError):
                other.broadcast(np.zeros(10, np.float32), root=0, timeout=PATIENCE_S)

        helper = threading.Thread(target=join_in)
        helper.start()
        try:
            comm.broadcast(x, root=0, timeout=PATIENCE_S)
        except pccl.PeerLostError as error:
            errors.append(error)
        helper.join()
        assert errors, "the ranks had changed, and this thread had not seen that"
        in_threads(
            [
                lambda: comm.broadcast(x, root=0, timeout=PATIENCE_S),
                lambda: other.broadcast(x.copy(), root=0, timeout=PATIENCE_S),
            ]
        )


# ---- what is left ----


def test_reconnecting_keeps_nothing_of_the_old_membership(pair: list[pccl.Communicator]) -> None:
    ours, other = pair
    states = [pccl.SharedState.from_tensors({"x": np.zeros(n)}) for n in (5, 6)]
    with pytest.raises(pccl.KickedError):
        in_threads(
            [lambda: ours.sync_shared_state(states[0]), lambda: other.sync_shared_state(states[1])]
        )
    threads = sum(thread.name.startswith("pccl-") for thread in threading.enumerate())

    def admit() -> None:
        while not ours.are_peers_pending():
            pass
        ours.update_topology()

    in_threads([admit, other.connect])
    after = sum(thread.name.startswith("pccl-") for thread in threading.enumerate())
    assert after == threads
    works(pair)


# ---- the end ----


def test_events_after_the_end_of_the_membership_are_dropped() -> None:
    """Nothing of it raises, in the caller's thread or in the one that ends."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        comm.connect()
        client = client_of(comm)
        comm.close()
        client.remind(1, 1)
        client.verified(1, [(0, 0, True)])
        client.allow(client.call())


def test_a_call_that_begins_when_the_membership_has_just_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was there when the call looked, and is not when the call enters."""
    state, heard = pccl.SharedState.from_tensors({"x": np.zeros(10)}), list[object]()
    calls: list[Callable[[pccl.Communicator], object]] = [
        lambda comm: comm.update_topology(),
        lambda comm: comm.are_peers_pending(),
        lambda comm: comm.sync_shared_state(state),
    ]
    begin = PeerClient.call
    for call in calls:
        with pccl.MasterNode("127.0.0.1:0") as master:
            comm = pccl.Communicator(master.address)
            comm.connect()
            client = client_of(comm)

            def closed(client: PeerClient) -> Call:
                monkeypatch.undo()
                comm.close()  # noqa: B023
                return begin(client)

            monkeypatch.setattr(PeerClient, "call", closed)
            with pytest.raises(pccl.PCCLError, match="the communicator was closed"):
                in_threads([lambda: call(comm)], PATIENCE_S)  # noqa: B023
    begun = client.call()
    barrier = operands.barrier()
    client.collective(begun, 0, barrier, choose(barrier.work, 0, client.knowledge.conditions))
    client.on_end(begun, heard.append)
    assert heard == [begun.end] != [None]
