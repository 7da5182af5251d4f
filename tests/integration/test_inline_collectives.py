"""Small collectives: data travels with the votes, and the master reduces it."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from oracles import collectives as oracle
from peers.cluster import Cluster, in_threads

import pccl
from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.collectives import fits
from pccl.protocol.master.effects import Drop, Send
from pccl.protocol.master.inputs import Hello, Received
from pccl.protocol.master.voting import held
from pccl.runtime.inline_collectives import combine

WORK = m.Spec("all_reduce", 0, 10, 2)
ONE, TWO = np.float32([1, 10]).tobytes(), np.float32([2, 20]).tobytes()


class InlineRun:
    """A master and its peers 1 and 2, with connections b"1" and b"2"."""

    def __init__(self, number: int = 2) -> None:
        self.master = Master(1, combine, secret=b"s")
        hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "x", b"")
        for index in range(1, number + 1):
            self.master.feed(Hello(b"%d" % index, hello, "10.0.0.1"))
        self.say(b"1", m.TopologyVote(1))

    def say(self, conn: bytes, message: m.PeerMessage) -> list[m.MasterMessage]:
        """The messages that follow."""
        actions = self.master.feed(Received(conn, message))
        return [action.message for action in actions if isinstance(action, Send)]

    def reduce(self, tag: int = 0, heard: tuple[int, int] = (0, 0)) -> m.Started:
        """Both peers vote; what they are told."""
        assert self.say(b"1", m.StartVote(9, tag, WORK, ONE, heard[0])) == []
        first, second = self.say(b"2", m.StartVote(9, tag, WORK, TWO, heard[1]))
        assert first == second
        assert isinstance(first, m.Started)
        return first


def test_a_result_is_final_when_it_is_sent() -> None:
    run = InlineRun()
    started = run.reduce()
    assert started.final
    assert started.data is not None
    np.testing.assert_array_equal(np.frombuffer(started.data, np.float32), [3, 30])
    assert run.say(b"1", m.TopologyVote(10)) == []  # nothing is under way any more
    assert len(run.say(b"2", m.TopologyVote(10))) == 2


def test_results_known_to_all_are_stable() -> None:
    run = InlineRun()
    first, second = run.reduce(0), run.reduce(1)
    assert run.reduce(2, heard=(second.seq, first.seq)).stable == first.seq
    assert run.reduce(0, heard=(first.seq, second.seq)).stable == second.seq  # it was said before


def test_too_many_results_on_the_way_are_voted_on() -> None:
    run = InlineRun()
    run.master.run.collectives.small_max = 2
    started = [run.reduce(tag) for tag in range(3)]
    assert [s.final for s in started] == [True, True, False]
    assert started[2].data is not None
    seq = started[2].seq
    assert run.say(b"1", m.FinishVote(seq, True)) == []
    assert run.say(b"2", m.FinishVote(seq, True)) == [m.Finished(seq, True)] * 2
    assert run.reduce(4, heard=(seq, seq)).final


def test_data_that_waits_with_a_vote_counts_as_memory() -> None:
    assert held(WORK, None, ONE) == held(WORK) + len(ONE)


@pytest.mark.parametrize(
    ("work", "data"),
    [
        (WORK, ONE + b"x"),
        (WORK, b""),
        (m.Spec("all_reduce", 5, 10, 2), ONE),
        (m.Spec("all_reduce", 0, 99, 2), ONE),
        (m.Spec("all_reduce", 0, 10, (1 << 62) + 2), ONE),
        (m.Spec("broadcast", 0, 10, 2), ONE),
    ],
)
def test_a_contribution_that_cannot_be_drops_its_peer(work: m.Spec, data: bytes) -> None:
    assert not fits(work, data)
    run = InlineRun()
    run.say(b"1", m.StartVote(9, 0, WORK, ONE))
    actions = run.master.feed(Received(b"2", m.StartVote(9, 0, work, data)))
    assert [action.conn for action in actions if isinstance(action, Drop)] == [b"2"]


def test_votes_with_and_without_data_do_not_match() -> None:
    run = InlineRun()
    run.say(b"1", m.StartVote(9, 0, WORK, ONE))
    errors = run.say(b"2", m.StartVote(9, 0, WORK))
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, m.CallError)
        assert "PCCL_INLINE_BYTES" in error.why


BETWEEN = 65_000  # elements of fp32, which travel with the votes of four members and not of five


def moving_s(cluster: Cluster) -> list[float]:
    """For how long the engine of each peer has moved data of collectives."""
    return [comm.stats().moving_seconds for comm in cluster.comms]


def test_how_data_travels_follows_from_the_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PCCL_INLINE_BYTES")
    with Cluster(5) as cluster:
        assert cluster.each(lambda _, comm: _sum_of_ones(comm, BETWEEN)) == [5.0] * 5
        assert min(moving_s(cluster)) > 0
        cluster.comms.pop().close()
        assert cluster.each(lambda _, comm: _insist(comm, BETWEEN)) == [4.0] * 4
        before = moving_s(cluster)
        assert cluster.each(lambda _, comm: _sum_of_ones(comm, BETWEEN)) == [4.0] * 4
        assert moving_s(cluster) == before


def _insist(comm: pccl.Communicator, count: int) -> float:
    while True:
        try:
            return _sum_of_ones(comm, count)
        except pccl.PeerLostError:
            pass


@pytest.fixture(scope="module", params=[2, 3, 5])
def ring(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with Cluster(request.param) as made:
        yield made


@pytest.mark.parametrize("in_place", [False, True])
def test_every_dtype_and_operation(ring: Cluster, in_place: bool) -> None:
    size = len(ring.comms)
    # neighbors differ, or they would be bundled
    cases = list(itertools.product([0, 1, size, 65], oracle.DTYPES, oracle.OPS))
    sends = [
        [oracle.draw(dtype, count, 100 * peer + i) for i, (count, dtype, _) in enumerate(cases)]
        for peer in range(size)
    ]
    before = [[array.copy() for array in arrays] for arrays in sends]
    recvs = sends if in_place else [[np.empty_like(a) for a in arrays] for arrays in sends]

    def job(peer: int, comm: pccl.Communicator) -> int:
        handles = []
        for tag, (count, dtype, op) in enumerate(cases):
            descriptor = pccl.ReduceDescriptor(
                count,
                list(pccl.ReduceOp)[oracle.OPS.index(op)],
                tag,
                pccl.ReduceOperandDescriptor(list(pccl.DataType)[oracle.DTYPES.index(dtype)]),
                None,
            )
            pointers = (sends[peer][tag].ctypes.data, recvs[peer][tag].ctypes.data)
            handles.append(pccl.ReduceOpDescriptor(*pointers, descriptor))
        info = comm.all_reduce_multiple_with_retry(handles, max_in_flight=200)
        assert info.world_size == size
        nbytes = sum(array.nbytes for array in before[peer])
        assert (info.tx_bytes, info.rx_bytes) == (nbytes, nbytes)
        return comm.rank

    ranks = ring.each(job)
    for i, (_, dtype, op) in enumerate(cases):
        parts = [before[ranks.index(position)][i] for position in range(size)]
        expected = parts[0]
        for number, part in enumerate(parts[1:], 2):
            divisor = size if number == size else 1
            expected = oracle.reduce(expected, part, op, dtype, divisor)
        if op == "avg" and "int" in dtype:
            expected = oracle.mean(parts)
        for peer in range(size):
            np.testing.assert_array_equal(recvs[peer][i].view(np.uint8), expected.view(np.uint8))
            if not in_place:
                np.testing.assert_array_equal(sends[peer][i], before[peer][i])


def test_the_engine_has_no_part_in_it() -> None:
    with Cluster(2) as cluster:
        sums = cluster.each(lambda _, comm: _sum_of_ones(comm, 4096))
        assert sums == [2.0, 2.0] and moving_s(cluster) == [0.0, 0.0]


def test_a_mismatch_of_the_limit_is_an_error_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    comms = [pccl.Communicator(master.address) for _ in range(2)]
    try:
        comms[0].connect()
        monkeypatch.setenv("PCCL_INLINE_BYTES", "0")
        joined = threading.Thread(target=comms[1].connect)
        joined.start()
        while comms[0].world_size < 2:
            comms[0].update_topology()
        joined.join()
        errors = in_threads([functools.partial(_mismatch, comm) for comm in comms])
        assert all("PCCL_INLINE_BYTES" in error for error in errors)
    finally:
        for comm in comms:
            comm.close()
        master.interrupt()


def _mismatch(comm: pccl.Communicator) -> str:
    with pytest.raises(pccl.MismatchError) as raised:
        _sum_of_ones(comm, 10)
    return str(raised.value)


def _sum_of_ones(comm: pccl.Communicator, count: int) -> float:
    array = np.ones(count, np.float32)
    comm.all_reduce(array, array, op=pccl.ReduceOp.SUM)
    return float(array[0])


def test_an_array_may_be_empty_and_have_no_address() -> None:
    torch = pytest.importorskip("torch")
    assert torch.empty(0).data_ptr() == 0
    with Cluster(2) as cluster:
        infos = cluster.each(lambda _, comm: comm.all_reduce(torch.empty(0)))
        assert [info.world_size for info in infos] == [2, 2]


def test_a_time_out_leaves_the_array_alone() -> None:
    with Cluster(2) as cluster:
        array = np.ones(10, np.float32)
        with pytest.raises(pccl.PCCLTimeoutError):
            cluster.comms[0].all_reduce(array, array, op=pccl.ReduceOp.SUM, timeout=0.1)
        np.testing.assert_array_equal(array, np.ones(10))
        assert cluster.each(lambda _, comm: _sum_of_ones(comm, 10)) == [2.0, 2.0]


FAULTS = """
import resource, pccl

def faults(rounds=20, nbytes=1 << 20):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(rounds):
        bytes(nbytes).replace(b"\\0", b"\\1")
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / rounds

before = faults()
with pccl.MasterNode("127.0.0.1:0"):
    for _ in range(1000):  # its thread may still have to begin
        if (after := faults(1)) < 10:
            break
    print(before, after)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a property of glibc")
def test_a_master_takes_no_new_memory_for_each_round() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = map(float, done.stdout.split())
    if before < 100:
        pytest.skip("this allocator keeps its memory anyway")
    assert after < 10
