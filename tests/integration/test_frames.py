"""How many frames calls cost: what is said at one moment travels together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import zmq
from peers.cluster import Cluster
from peers.strangers import HELLO, PATIENCE_S, serving, speaker, welcome

import pccl
from pccl.protocol import messages as m
from pccl.protocol.master import Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.runtime.client.connection import Dealer
from pccl.runtime.client.control import Inbox
from pccl.runtime.client.engine import Engine
from pccl.runtime.config import Config
from pccl.runtime.server.server import Server
from pccl.runtime.sockets import Waiter

TAGS = 16
WORK = m.Spec("all_reduce", 0, 10, 1000)


def frame(peer: zmq.Socket[bytes]) -> list[m.MasterMessage]:
    assert peer.poll(PATIENCE_S * 1000), "no answer"
    return [m.decode_from_master(data) for data in m.opened(peer.recv())]


def test_the_master_answers_many_votes_with_one_frame_for_each_peer() -> None:
    server = Server("127.0.0.1", 0, Config())
    with ExitStack() as stack:
        stack.enter_context(serving(server))
        peers = [stack.enter_context(speaker(zmq.DEALER, server.port)) for _ in range(2)]
        for peer in peers:
            peer.send(m.encode(HELLO))
            assert isinstance(welcome(peer), m.Welcome)
        peers[0].send(m.encode(m.TopologyVote(1)))
        while not isinstance(welcome(peers[0]), m.TopologyResult):
            pass
        while not isinstance(welcome(peers[1]), m.Plan):
            pass
        votes = [m.encode(m.StartVote(2 + tag, tag, WORK)) for tag in range(TAGS)]
        for peer in peers:
            for each in m.frames(votes):
                peer.send(each)
        seqs = []
        for peer in peers:
            started = frame(peer)
            while not isinstance(started[0], m.Started):  # the rest of the new peer's welcome
                started = frame(peer)
            assert [each.call for each in started] == [2 + tag for tag in range(TAGS)]
            seqs = [each.seq for each in started]
        for peer in peers:
            for each in m.frames([m.encode(m.FinishVote(seq, True)) for seq in seqs]):
                peer.send(each)
        for peer in peers:
            assert frame(peer) == [m.Finished(seq, True) for seq in seqs]


def test_an_illegal_message_ends_the_frame_too() -> None:
    """Later messages of the same frame are dropped, like those of later frames."""
    server = Server("127.0.0.1", 0, Config())
    with ExitStack() as stack:
        stack.enter_context(serving(server))
        honest, other = (stack.enter_context(speaker(zmq.DEALER, server.port)) for _ in range(2))
        for peer in (honest, other):
            peer.send(m.encode(HELLO))
            assert isinstance(welcome(peer), m.Welcome)
        bad = m.encode(m.FinishVote(1 << 40, True))
        for each in m.frames([m.encode(m.TopologyVote(1)), bad, m.encode(m.TopologyVote(2))]):
            honest.send(each)
        told = [welcome(honest)]
        while not isinstance(told[-1], m.Kicked):
            told.append(welcome(honest))
        assert "out of turn" in told[-1].why
        assert not any(isinstance(each, m.TopologyResult) and each.call == 2 for each in told)


def test_calls_that_come_while_a_peer_works_cost_one_frame_and_one_message_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[int] = []
    ordered: list[int] = []
    for kind, sizes in ((Dealer, said), (Engine, ordered)):

        def counted(
            self: Dealer | Engine,
            sizes: list[int] = sizes,
            flush: Callable[..., bool] = kind.flush,  # type: ignore[attr-defined]
        ) -> bool:
            sizes.append(len(self.unsent))
            return flush(self)

        monkeypatch.setattr(kind, "flush", counted)
    with Cluster(2) as cluster:
        data = [[np.ones(30_000, np.float32) for _ in range(TAGS)] for _ in range(2)]
        both = threading.Barrier(2)

        def launch(index: int, comm: pccl.Communicator) -> bool:
            """The peer's control thread is in the callback of a handle when it makes its calls."""
            busy, free = threading.Event(), threading.Event()

            def hold() -> None:
                busy.set()
                assert free.wait(PATIENCE_S)

            first = [np.ones(1, np.float32) for _ in range(2)]
            handles = [comm.all_reduce_async(first[0], tag=TAGS + index)]
            handles[0].add_done_callback(hold)
            both.wait(PATIENCE_S)
            handles.append(comm.all_reduce_async(first[1], tag=TAGS + 1 - index))
            assert busy.wait(PATIENCE_S)
            for tag, x in enumerate(data[index]):
                handles.append(comm.all_reduce_async(x, op="sum", tag=tag))
            free.set()
            return all([handle.wait()[0] for handle in handles])

        assert cluster.each(launch) == [True, True]
        assert all((x == 2).all() for each in data for x in each)
    together = [sum(size >= TAGS for size in sizes) for sizes in (said, ordered)]
    assert together[0] >= 2, "the start votes of a peer did not travel together"
    assert together[1] >= 2, "nor did the orders to its engine"


def woken(waiter: Waiter) -> bool:
    reads = waiter.wait(0.0)
    for read in reads:
        read()
    return bool(reads)


def test_a_command_wakes_only_a_waiting_thread() -> None:
    waiter, done = Waiter(), list[int]()
    inbox = Inbox(waiter.wake)
    try:
        inbox.post(lambda: done.append(1))  # it works
        assert not woken(waiter)
        assert not inbox.may_wait(), "the command would lie there for ever"
        inbox.post(lambda: done.append(2))  # it is about to wait
        assert woken(waiter)
        inbox.carry_out()
        inbox.post(lambda: done.append(3))
        assert not woken(waiter) and done == [1, 2]
        inbox.carry_out()
        assert done == [1, 2, 3] and inbox.may_wait()
    finally:
        waiter.close()
        inbox.end()


def test_the_master_does_its_chores_now_and_then_and_not_for_each_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass of its loop for each frame, and none to look whether sending hid the next one."""
    monkeypatch.setattr("pccl.runtime.limits.MASTER_CHORES_S", 1000.0)
    chores, waits = [], []
    feed, wait = Master.feed, Waiter.wait

    def fed(machine: Master, event: inputs.Event) -> list[Effect]:
        if isinstance(event, inputs.Tick):  # one in each turn of the chores
            chores.append(event)
        return feed(machine, event)

    monkeypatch.setattr(Master, "feed", fed)
    server = Server("127.0.0.1", 0, Config())
    with ExitStack() as stack:
        stack.enter_context(serving(server))
        peer = stack.enter_context(speaker(zmq.DEALER, server.port))
        peer.send(m.encode(HELLO))
        assert isinstance(welcome(peer), m.Welcome)
        peer.send(m.encode(m.StartVote(1, 0, WORK)))
        while not isinstance(welcome(peer), m.CallError):  # the rest of the welcome
            pass
        monkeypatch.setattr(Waiter, "wait", lambda *args: (waits.append(1), wait(*args))[1])
        before = len(chores)
        for call in range(100):  # alone in its group, so that each vote is answered at once
            peer.send(m.encode(m.StartVote(2 + call, 0, WORK)))
            assert isinstance(welcome(peer), m.CallError)
        assert len(waits) <= 110
        assert len(chores) - before <= 10


def test_a_command_without_memory_is_repeated_at_the_end() -> None:
    """Then its call is known and answered, and the commands behind it get their turn."""
    inbox, done = Inbox(lambda: None), list[str]()

    def fails_at_first() -> None:
        done.append("first")
        if len(done) == 1:
            raise MemoryError

    inbox.leave(fails_at_first)
    inbox.leave(lambda: done.append("second"))
    with pytest.raises(MemoryError):
        inbox.carry_out()
    inbox.end()
    assert done == ["first", "first", "second"]


def test_a_command_that_fails_at_the_end_is_dropped() -> None:
    inbox, done = Inbox(lambda: None), list[str]()

    def fails() -> None:
        done.append("first")
        raise MemoryError

    inbox.leave(fails)
    inbox.leave(lambda: done.append("second"))
    inbox.end()
    assert done == ["first", "second"]
