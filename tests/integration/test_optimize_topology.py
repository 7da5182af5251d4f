"""`optimize_topology` with real processes: measurement, new rings, and peers that are lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster, client_of, grow, in_threads
from peers.processes import Puppet, Start, gathered, together
from peers.waiting import PATIENCE_S, entered, reached

import pccl
from pccl.protocol.master.eventlog import Line
from pccl.protocol.master.status import Phase
from pccl.protocol.peer import Peer
from pccl.protocol.peer.effects import Effect
from pccl.runtime.client.probe import rate_of
from pccl.runtime.server.eventlog import read

TCP = {"PCCL_TRANSPORT": "tcp"}  # or peers of one machine would have nothing to measure


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TCP.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def slow_pairs(monkeypatch: pytest.MonkeyPatch) -> set[frozenset[int]]:
    """Links that are said to be slow, whatever was measured; peers by number.

    If there is none, links are said to carry more together.
    """
    pairs: set[frozenset[int]] = set()
    measured = Peer.measured

    def lies(peer: Peer, seq: int, rate: int, delay_us: int) -> list[Effect]:
        assert rate > 0
        transfer = peer.transfers.current
        assert transfer is not None
        pair = frozenset((peer.number, *transfer.streams))
        rate = 10**8 if pairs else 10**8 * len(transfer.streams)
        return measured(peer, seq, 10**4 if pair in pairs else rate, 100)

    monkeypatch.setattr(Peer, "measured", lies)
    return pairs


def ring(comm: pccl.Communicator) -> list[int]:
    """The numbers of the peers, by rank."""
    return [int(text.split()[1]) for text in comm.peers]


@pytest.mark.slow
def test_the_ring_that_was_chosen_is_the_one_that_is_used(
    slow_pairs: set[frozenset[int]],
) -> None:
    slow_pairs.add(frozenset((2, 3)))
    with Cluster(4) as cluster:
        for _ in range(2):
            cluster.each(lambda _, comm: comm.optimize_topology())
            orders = [ring(comm) for comm in cluster.comms]
            assert orders == [orders[0]] * 4
            assert {2, 3} not in [{orders[0][i - 1], orders[0][i]} for i in range(4)]
            assert sorted(comm.rank for comm in cluster.comms) == [0, 1, 2, 3]
            arrays = [np.random.rand(100_003).astype(np.float32) for _ in range(4)]
            cluster.each(lambda i, comm: comm.all_reduce(arrays[i], op="sum"))  # noqa: B023
            assert all((array == arrays[0]).all() for array in arrays)
        newcomer = cluster.join()
        assert ring(newcomer)[:4] == orders[0]
        leaver = cluster.comms.pop(1)
        gone = orders[0][leaver.rank]
        leaver.close()
        sums = cluster.each(lambda i, comm: float(comm_sum(comm)))
        assert sums == [4.0] * 4
        assert ring(newcomer) == [number for number in orders[0] if number != gone] + [5]


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_several_rings_share_out_the_data(slow_pairs: set[frozenset[int]], size: int) -> None:
    rng = np.random.default_rng(size)
    with Cluster(size) as cluster:
        cluster.each(lambda _, comm: comm.optimize_topology())
        clients = [client_of(comm) for comm in cluster.comms]
        rings = {client.knowledge.plan.rings for client in clients if client is not None}
        assert len(rings) == 1
        assert len(rings.pop()) == {3: 2, 4: 6}[size]
        by_rank = sorted(cluster.comms, key=lambda comm: comm.rank)
        for count in (0, 1, 63, 1000, 300_007):
            given = [rng.integers(0, 1000, count) for _ in by_rank]
            reduced = [x.copy() for x in given]
            gathered = [np.zeros((size, count), np.int64) for _ in by_rank]
            casted = [x.copy() for x in given]
            floats = [x.astype(np.float32) for x in given]

            def calls(index: int, comm: pccl.Communicator) -> None:
                rank = comm.rank
                comm.all_reduce(reduced[rank], op="sum")  # noqa: B023
                comm.all_gather(given[rank], gathered[rank])  # noqa: B023
                comm.broadcast(casted[rank], root=size - 1)  # noqa: B023
                comm.all_reduce(floats[rank], op="sum", quantization="int8")  # noqa: B023

            cluster.each(calls)
            for rank in range(size):
                np.testing.assert_array_equal(reduced[rank], sum(given))
                np.testing.assert_array_equal(gathered[rank], given)
                np.testing.assert_array_equal(casted[rank], given[-1])
                assert floats[rank].tobytes() == floats[0].tobytes()
        cluster.comms.pop().close()
        assert cluster.each(lambda _, comm: float(comm_sum(comm))) == [size - 1.0] * (size - 1)


def comm_sum(comm: pccl.Communicator) -> np.float32:
    """An all-reduce of ones, repeated until no peer is lost in it."""
    while True:
        x = np.ones(50_000, np.float32)
        try:
            comm.all_reduce(x, op="sum")
            return x[0]
        except pccl.PeerLostError:
            pass


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_peers_of_one_machine_have_nothing_to_measure(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", transport)
    log, ended = tmp_path / "events", threading.Barrier(3)

    def peer() -> list[int]:
        with pccl.Communicator(master.address) as comm:
            grow(comm, 3)
            comm.optimize_topology()
            order = ring(comm)
            ended.wait(PATIENCE_S)
            return order

    with pccl.MasterNode("127.0.0.1:0", event_log=log) as master:
        orders = in_threads([peer] * 3)
    assert all(sorted(order) == [1, 2, 3] for order in orders)
    lines = [line for _, line in read(log) if isinstance(line, Line)]
    asked = [told for line in lines for told in line.told if told.say == "Probe"]
    if transport == "auto":
        assert not asked and orders == [[1, 2, 3]] * 3
    else:
        assert asked, "peers that only reach each other by TCP measure"


def test_one_peer_of_each_group_is_enough() -> None:
    with Cluster(2, [0, 1]) as cluster:
        cluster.each(lambda _, comm: comm.optimize_topology())


def test_a_peer_leaves_or_is_killed_while_others_have_voted(start: Start) -> None:
    puppets = gathered(start, [0, 0, 0, 0])
    for puppet in puppets[:2]:
        puppet.begin("optimize_topology")
    puppets[3].call("close")
    puppets[2].kill()
    assert [puppet.end() for puppet in puppets[:2]] == [{"value": None}] * 2
    assert together(puppets[:2], "all_reduce") == [2.0, 2.0]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP on Windows")
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_peer_is_lost_while_links_are_measured(
    monkeypatch: pytest.MonkeyPatch,
    blow: str,
) -> None:
    for name, text in (("PCCL_HEARTBEAT_MS", "200"), ("PCCL_HEARTBEAT_TIMEOUT_MS", "1000")):
        monkeypatch.setenv(name, text)
    puppets: list[Puppet] = []
    with pccl.MasterNode("127.0.0.1:0") as node:

        def one(group: int = 0) -> Puppet:
            puppets.append(Puppet(node.address, group))
            return puppets[-1]

        try:
            gathered(one, [0, 0, 0])
            for puppet in puppets:
                puppet.begin("optimize_topology")
            reached(node, Phase.MEASURING)
            os.kill(puppets[2].process.pid, getattr(signal, blow))
            assert [puppet.end() for puppet in puppets[:2]] == [{"value": None}] * 2
            assert together(puppets[:2], "insist", value=1.0) == [2.0, 2.0]
        finally:
            for puppet in puppets:
                puppet.kill()


def test_a_newcomer_waits_until_it_is_over(start: Start) -> None:
    puppets = gathered(start, [0, 0])
    for puppet in puppets:
        puppet.begin("optimize_topology")
    newcomer = start(0)
    newcomer.begin("connect")
    assert [puppet.end() for puppet in puppets] == [{"value": None}] * 2
    while not all(together(puppets, "are_peers_pending")):
        pass
    together(puppets, "update_topology")
    newcomer.value()
    assert together([*puppets, newcomer], "optimize_topology") == [None] * 3
    assert together([*puppets, newcomer], "all_reduce") == [3.0] * 3


def test_a_timeout_ends_it_for_all(
    master: pccl.MasterNode,
    start: Start,
) -> None:
    puppets = gathered(start, [0, 0, 0])
    puppets[0].begin("optimize_topology", timeout=0.2)
    alone = puppets[0].end()
    assert (alone["error"], alone["result"]) == ("PCCLTimeoutError", "TIMEOUT")
    assert "waited for peer 2 (" in alone["text"]
    puppets[0].begin("optimize_topology")
    puppets[2].begin("optimize_topology")
    entered(master, votes=2)
    puppets[1].begin("optimize_topology", timeout=0.3)  # all links take longer
    for puppet in puppets:
        answer = puppet.end()
        assert (answer["error"], answer["result"]) == (alone["error"], alone["result"])
        assert "peer 2 (" in answer["text"]
        assert "waited no longer" in answer["text"]
        assert "measured links" in answer["text"] or "links were measured" in answer["text"]
    assert together(puppets, "all_reduce") == [3.0] * 3


def test_others_are_in_another_call(start: Start) -> None:
    puppets = gathered(start, [0, 0])
    puppets[0].begin("optimize_topology")
    puppets[1].begin("all_reduce")
    for puppet in puppets:
        answer = puppet.end()
        assert answer["error"] == "MismatchError"
        assert "called optimize_topology()" in answer["text"]
        assert "called all_reduce(" in answer["text"]
    assert together(puppets, "all_reduce") == [2.0, 2.0]


def arrivals(rates: list[float], first: float) -> list[tuple[float, int]]:
    """A thousand bytes at a time, at these rates for 0.1 s each, from `first` on."""
    found, at = [], first
    for number, rate in enumerate(rates, 1):
        while at < first + 0.1 * number - 1e-9:
            found.append((at, 1000))
            at += 1000 / rate
    return found


def test_the_rate_is_final_when_it_no_longer_grows() -> None:
    slow_start = [1e5 * 2**i for i in range(5)]
    growing = arrivals(slow_start, 0.5)
    assert all(rate_of(growing, 0.0, 0.5 + 0.01 * i) is None for i in range(50))
    steady = arrivals([*slow_start, *[1.6e6] * 6], 0.5)
    assert rate_of(steady, 0.0, 1.6) == pytest.approx(1.6e6, rel=0.1)


def test_the_rate_is_final_at_the_end() -> None:
    endless = arrivals([1e5 * 1.3**i for i in range(25)], 0.5)
    assert rate_of(endless, 0.0, 2.4) is None
    assert rate_of(endless, 0.0, 2.6) is not None
    assert rate_of([], 0.0, 4.9) is None
    assert rate_of([], 0.0, 5.1) == 0
    assert rate_of([], 0.0, 0.1, ended=True) == 0
    assert rate_of(arrivals([1e6], 0.1), 0.0, 0.3, ended=True) == pytest.approx(1e6, rel=0.05)
    bursts = [(2.0, 262144), (4.0, 262144)]  # 130 kB/s, in chunks that come together
    for now in (3.61, 3.9, 4.5, 5.2):
        rate = rate_of(bursts, 0.0, now)
        assert rate is None or 50_000 < rate < 400_000
