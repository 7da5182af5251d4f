"""Process groups of torch.distributed over pccl: each peer is a thread, and has its own group."""

from __future__ import annotations

import importlib
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from oracles import payloads
from peers.cluster import Cluster
from peers.waiting import PATIENCE_S, wait_until
from torch import Tensor
from torch._C import _distributed_c10d as c10d_C
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.nn.parallel import DistributedDataParallel
from training.groups import Groups

import pccl
from pccl import kernels
from pccl.cli.main import main
from pccl.torch import ProcessGroup, hooks, recorder
from pccl.torch.work import POOL

T = TypeVar("T")


def reduced(group: ProcessGroup, op: object, *given: Tensor) -> list[Tensor]:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce_coalesced(list(given), options).wait()
    return list(given)


def test_ranks_are_those_of_the_launcher(three: Groups) -> None:
    assert [group.rank() for group in three.all] == [0, 1, 2]
    assert {group.size() for group in three.all} == {3}
    assert [group.communicator.rank for group in three.all] != [0, 1, 2]  # of the ring
    assert three.all[0].name() == "pccl"


def test_every_reduction(three: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        mine = float(group.rank() + 1)
        for op, wanted in (
            (dist.ReduceOp.SUM, 6.0),
            (dist.ReduceOp.AVG, 2.0),
            (dist.ReduceOp.MIN, 1.0),
            (dist.ReduceOp.MAX, 3.0),
            (dist.ReduceOp.PRODUCT, 6.0),
            (dist._make_nccl_premul_sum(0.5), 3.0),
        ):
            first, second = reduced(group, op, torch.full((4,), mine), torch.full((2, 2), mine).t())
            assert first.tolist() == [wanted] * 4 and second.tolist() == [[wanted] * 2] * 2
        bits = torch.tensor([1 << group.rank(), 7])
        assert reduced(group, dist.ReduceOp.BOR, bits.clone())[0].tolist() == [7, 7]
        assert reduced(group, dist.ReduceOp.BAND, bits.clone())[0].tolist() == [0, 7]
        assert reduced(group, dist.ReduceOp.BXOR, bits.clone())[0].tolist() == [7, 7]
        true = torch.tensor([group.rank() == 1, True, False])
        assert reduced(group, dist.ReduceOp.SUM, true)[0].tolist() == [True, True, False]
        assert reduced(group, dist.ReduceOp.PRODUCT, true)[0].tolist() == [True, True, False]
        with pytest.raises(ValueError, match=r"AVG of torch\.bool is not defined"):
            reduced(group, dist.ReduceOp.AVG, true)
        strided = torch.zeros(4, 4)[:, 1]
        strided += mine
        group.allreduce([strided]).wait()
        assert strided.tolist() == [6.0] * 4
        turning = torch.tensor([1j * mine])
        group.allreduce([turning]).wait()
        assert turning.tolist() == [6j]
        group.barrier().wait()

    three.each(job)


def test_collectives_follow_the_ranks_of_torch(three: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        rank = group.rank()
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn):
            mine = torch.tensor([rank, 0], dtype=torch.float32).to(dtype)
            wanted = [torch.tensor([r, 0], dtype=torch.float32).to(dtype) for r in range(3)]
            outputs = [torch.empty_like(mine) for _ in range(3)]
            group.allgather([outputs], [mine], AllgatherOptions()).wait()
            for output, each in zip(outputs, wanted, strict=True):
                assert torch.equal(output.view(torch.uint8), each.view(torch.uint8))
            options = dist.BroadcastOptions()
            options.rootRank = 1
            group.broadcast([mine], options).wait()
            assert torch.equal(mine.view(torch.uint8), wanted[1].view(torch.uint8))
        whole = torch.empty(3, 2)
        group.all_gather_single(whole, torch.full((2,), float(rank)), AllgatherOptions()).wait()
        assert whole.tolist() == [[0, 0], [1, 1], [2, 2]]
        whole.fill_(-1.0)[rank] = rank
        group.all_gather_single(whole, whole[rank]).wait()  # in place, as FSDP2 does
        assert whole.tolist() == [[0, 0], [1, 1], [2, 2]]
        lists = [[torch.empty(1), torch.empty(2)] for _ in range(3)]
        given = [torch.full((1,), float(rank)), torch.full((2,), float(rank))]
        group.allgather_coalesced(lists, given).wait()
        assert [(a.tolist(), b.tolist()) for a, b in lists] == [([r], [r, r]) for r in range(3)]
        part = torch.empty(2)
        group.reduce_scatter_single(part, torch.arange(6.0), ReduceScatterOptions()).wait()
        assert part.tolist() == [6.0 * rank, 6.0 * rank + 3]
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.MAX
        inputs = [torch.tensor([float(10 * rank + r)]) for r in range(3)]
        one = torch.empty(1)
        group.reduce_scatter([one], [inputs], options).wait()
        assert one.item() == 20 + rank

    three.each(job)


def test_roots_and_rows_follow_the_ranks_of_torch(three: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        rank = group.rank()
        mine = torch.full((3,), float(rank + 1))
        reducing = dist.ReduceOptions()
        reducing.rootRank, reducing.reduceOp = 1, dist._make_nccl_premul_sum(2.0)
        group.reduce([mine], reducing).wait()
        assert mine.tolist() == [12.0 if rank == 1 else rank + 1.0] * 3
        gathering = dist.GatherOptions()
        gathering.rootRank = 2
        outputs = [torch.empty(2, dtype=torch.bool) for _ in range(3)] if rank == 2 else []
        group.gather(
            [outputs] if outputs else [], [torch.tensor([rank > 0, True])], gathering
        ).wait()
        assert [output[0].item() for output in outputs] == [False, True, True][: len(outputs)]
        scattering = dist.ScatterOptions()
        scattering.rootRank = 0
        inputs = [[torch.full((2, 2), float(r)) for r in range(3)]] if rank == 0 else []
        one = torch.empty(2, 2).t()
        group.scatter([one], inputs, scattering).wait()
        assert one.tolist() == [[rank] * 2] * 2
        given = torch.arange(6) + 10 * rank
        taken = torch.empty(6, dtype=torch.int64)
        group.all_to_all_single(taken, given, [], []).wait()
        assert taken.tolist() == [10 * r + 2 * rank + i for r in range(3) for i in range(2)]
        # of rank r, rank s gets r + s elements
        uneven = [torch.full((rank + s,), float(10 * rank + s)) for s in range(3)]
        received = [torch.empty(rank + s) for s in range(3)]
        group.alltoall(received, uneven).wait()
        assert [r.tolist() for r in received] == [[10.0 * s + rank] * (rank + s) for s in range(3)]
        whole = torch.empty(3 * rank + 3)
        sizes = [rank + s for s in range(3)]
        group.all_to_all_single(whole, torch.cat(uneven), sizes, sizes).wait()
        assert torch.equal(whole, torch.cat(received))

    three.each(job)


def test_tensors_may_differ_in_size_between_ranks(three: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        rank = group.rank()
        for op, wanted in ((dist.ReduceOp.SUM, 6), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.BOR, 3)):
            inputs = [torch.full((2 * r,), rank + 1) for r in range(3)]
            output = torch.empty(2 * rank, dtype=torch.int64)
            group.reduce_scatter(output, inputs, op).wait()
            assert output.tolist() == [wanted] * 2 * rank
        for dtype in (torch.complex64, torch.bool, torch.float8_e5m2):
            outputs = [torch.zeros(3 - r, 2).to(dtype) for r in range(3)]
            group.allgather([outputs], [torch.ones(3 - rank, 2).to(dtype)]).wait()
            assert all(output.to(torch.complex64).eq(1).all() for output in outputs)
        with pytest.raises(ValueError, match="the output has 7 elements"):
            group.reduce_scatter(torch.empty(7), [torch.ones(r) for r in range(3)])

    three.each(job)


def test_a_time_limit_is_an_option_or_an_argument(two: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        if group.rank() == 1:
            return
        limit = timedelta(milliseconds=50)
        options = dist.AllreduceOptions()
        options.timeout = limit
        one = torch.ones(1)
        for call in (
            lambda: group.allreduce([one], options),
            lambda: group.allreduce(one, dist.ReduceOp.SUM, limit),
            lambda: group.allreduce(one, timeout=limit),
            lambda: group.broadcast(one, 0, limit),
            lambda: group.reduce(one, 0, dist.ReduceOp.SUM, limit),
            lambda: group.allgather([torch.empty(1), torch.empty(1)], one, limit),
            lambda: group.barrier(timeout=limit),
        ):
            with pytest.raises(pccl.PCCLTimeoutError, match=r"Timed out waiting 0\.05 s"):
                call().wait()

    two.each(job)


def test_the_profiler_shows_collectives_until_they_end(two: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        before, one = group._get_sequence_number_for_group(), torch.ones(1)
        group.allreduce(one).wait()
        group.broadcast(one).wait()
        assert group._get_sequence_number_for_group() == before + 2

    def profiled(group: ProcessGroup) -> None:
        if group.rank() == 1:
            job(group)
            return
        with torch.profiler.profile(record_shapes=True) as profile:
            job(group)
        shown = {event.name: event for event in profile.events()}
        for name in ("pccl:all_reduce", "pccl:broadcast"):
            assert shown[name].is_async and shown[name].input_shapes == [[1]]

    two.each(profiled)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the flight recorder read its variable again, as if the process had begun with it."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "3")
        importlib.reload(recorder)
        yield
    importlib.reload(recorder)


@pytest.mark.usefixtures("recording")
def test_the_flight_recorder_has_calls_of_all_groups(two: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        if group.rank() == 1:
            return
        group.setGroupName("flight")
        one = torch.ones(1)
        with pytest.raises(pccl.PCCLTimeoutError):
            group.recv([one], 1, 5).wait(timedelta(milliseconds=50))
        with pytest.raises(pccl.PCCLTimeoutError):
            group.allreduce([one], timeout=timedelta(milliseconds=50)).wait()

    two.each(job)
    dump = pickle.loads(c10d_C._dump_fr_trace(onlyActive=False))
    assert dump["pg_config"]["flight"]["ranks"] == "[0, 1]"
    received, reduced = (each for each in dump["entries"] if each["process_group"][0] == "flight")
    assert received["profiling_name"] == "pccl:recv" and received["is_p2p"]
    assert reduced["profiling_name"] == "pccl:all_reduce" and reduced["input_sizes"] == [[1]]
    assert reduced["state"] == "started" and reduced["retired"] and reduced["timeout_ms"] == 50
    assert any(frame["name"] == "job" for frame in reduced["frames"])
    active = pickle.loads(c10d_C._dump_fr_trace(onlyActive=True))["entries"]
    assert all(each["process_group"][0] != "flight" for each in active)  # gloo's tests leave theirs


def test_sparse_tensors_are_summed(three: Groups) -> None:
    def job(group: ProcessGroup) -> None:
        rank = group.rank()
        dense = torch.zeros(5, 2)
        dense[: rank + 1, 0] = rank + 1.0  # each has another number of elements
        wanted = torch.tensor([[6.0, 0], [5, 0], [3, 0], [0, 0], [0, 0]])
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)):
            (summed,) = reduced(group, op, dense.to_sparse())
            assert summed.is_sparse and torch.allclose(summed.to_dense(), wanted / divisor)
        by_rows = torch.sparse_coo_tensor([[rank]], [[1.0, 2.0]], (3, 2), check_invariants=True)
        assert reduced(group, dist.ReduceOp.SUM, by_rows)[0].to_dense().tolist() == [[1, 2]] * 3
        with pytest.raises(ValueError, match="sparse tensors can only be summed or averaged"):
            reduced(group, dist.ReduceOp.MAX, by_rows)

    three.each(job)


def test_messages_between_two_members(three: Groups) -> None:
    """Messages of one tag keep their order; a receive from any source takes the first to arrive."""
    received = [threading.Event() for _ in range(2)]

    def job(group: ProcessGroup) -> list[float]:
        rank = group.rank()
        if rank == 0:
            numbers = [torch.empty(3) for _ in range(3)]
            works = [group.recv([number], 1, 7) for number in numbers]
            other = torch.empty(2, 2, dtype=torch.bool).t()
            group.recv([other], 1, 8).wait()
            assert other.tolist() == [[True, False], [False, True]]
            assert [work.wait() for work in works] == [True] * 3
            found = []
            for event in received:
                number = torch.empty(1)
                work = group.recv_anysource([number], 9)
                work.wait()
                found.append((work._source_rank(), number.item()))
                event.set()
            assert found == [(2, 20.0), (1, 10.0)]
            last = torch.empty(1)
            group.recv([last], 2, 9).wait()  # asked for already, when another one was the first
            return [number[0].item() for number in [*numbers, last]]
        if rank == 1:
            for i in range(3):
                group.send([torch.full((3,), float(i))], 0, 7)
            group.send([torch.tensor([[True, False], [False, True]])], 0, 8).wait()
            assert received[0].wait(PATIENCE_S)
        group.send([torch.tensor([10.0 * rank])], 0, 9).wait()
        if rank == 2:
            assert received[1].wait(PATIENCE_S)
            group.send([torch.tensor([30.0])], 0, 9).wait()
        return []

    assert three.each(job) == [[0.0, 1.0, 2.0, 30.0], [], []]
    with pytest.raises(ValueError, match="rank 0 is not that of another member"):
        three.all[0].send([torch.ones(1)], 0)


def test_a_group_of_one_returns_its_input() -> None:
    with Cluster(1) as cluster:
        group = ProcessGroup(cluster.comms[0])
        mine = torch.tensor([1.0, 2.0])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            assert reduced(group, op, mine.clone())[0].tolist() == [1, 2]
        assert reduced(group, dist._make_nccl_premul_sum(3.0), mine.clone())[0].tolist() == [3, 6]
        assert reduced(group, dist.ReduceOp.BOR, torch.tensor([5]))[0].tolist() == [5]
        outputs, whole, part = [torch.empty(2)], torch.empty(2), torch.empty(2)
        group.allgather([outputs], [mine]).wait()
        group.all_gather_single(whole, mine).wait()
        group.reduce_scatter_single(part, mine).wait()
        group.broadcast([mine], 0).wait()
        group.barrier().wait()
        for rooted in (group.reduce, lambda t: group.gather([outputs], t)):
            rooted([mine]).wait()
        group.scatter([whole], [[mine]]).wait()
        group.all_to_all_single(part, mine, [], []).wait()
        assert outputs[0].tolist() == whole.tolist() == part.tolist() == mine.tolist() == [1, 2]


def test_many_are_under_way_at_once_and_callbacks_may_wait_for_others(two: Groups) -> None:
    """As hooks of DDP do: with any bounded number of threads this would wait for ever."""
    meeting, added = threading.Barrier(20), threading.Event()

    def total(future: torch.futures.Future[list[Tensor]]) -> float:
        return float(future.value()[0].sum())

    def together(future: torch.futures.Future[list[Tensor]]) -> float:
        meeting.wait(60)  # all callbacks are under way
        return total(future)

    def job(group: ProcessGroup) -> float:
        def more(future: torch.futures.Future[list[Tensor]]) -> float:
            second = future.value()[0].clone()
            group.allreduce([second], None).wait()
            return float(second.sum())

        launched = [torch.full((5000,), 1.0) for _ in range(30)]
        works = [group.allreduce([tensor]) for tensor in launched]
        assert [work.wait() for work in works] == [True] * 30
        assert all(work.is_completed() and work.is_success() for work in works)
        callback = total if group.rank() else together
        if group.rank():
            assert added.wait(PATIENCE_S)  # a callback that comes too late runs in `then`
        futures = [
            group.allreduce([tensor]).get_future().then(callback) for tensor in launched[:20]
        ]
        added.set()
        sums = torch.futures.wait_all(futures)
        return sum(sums) + group.allreduce([torch.ones(10)]).get_future().then(more).wait()

    assert two.each(job) == [20 * 20000.0 + 40.0] * 2


def test_one_thread_ends_a_collective_and_completes_its_future(
    two: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each switch of threads costs a busy processor more than the rest of it."""
    jobs: list[Callable[[], None]] = []
    run = POOL.run

    def counted(job: Callable[[], None]) -> None:
        jobs.append(job)
        run(job)

    monkeypatch.setattr(POOL, "run", counted)
    told = two.each(lambda group: group.allreduce([torch.ones(9)]).get_future().wait()[0].tolist())
    assert told == [[2.0] * 9] * 2
    assert len(jobs) == 2  # one on each peer


def test_all_reduce_survives_a_loss_and_other_collectives_name_the_lost_peer(three: Groups) -> None:
    three.all[1].communicator.close()

    def job(group: ProcessGroup) -> tuple[int, int, list[float]]:
        mine = torch.full((50000,), 1.0 + group.rank())
        broadcast = torch.full((3,), float(group.rank()))
        failing = group.broadcast([broadcast], 0)
        with pytest.raises(pccl.PeerLostError):
            failing.wait()
        assert not failing.is_success() and isinstance(failing.exception(), pccl.PeerLostError)
        group.allreduce([mine]).wait()
        group.broadcast([broadcast], 1).wait()
        return group.rank(), group.size(), [mine[0].item(), broadcast[0].item()]

    assert three.each(job, 1) == [(0, 2, [4.0, 2.0]), (1, 2, [4.0, 2.0])]


def test_a_loss_during_all_reduce_costs_a_retry(three: Groups) -> None:
    """The one that is lost is in the call: its data have been summed, in part."""
    begun = threading.Barrier(3)

    def job(group: ProcessGroup) -> list[float]:
        rank = group.rank()  # it changes as soon as the loss is known
        tensors = [torch.full((1 << 20,), 1.0 + rank) for _ in range(4)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        begun.wait(20)
        if rank == 1:
            group.communicator.close()
            return []
        for work in works:
            work.wait()
        assert group.size() == 2
        return [tensor.unique().item() for tensor in tensors]

    first, _, last = three.each(job)
    assert first == last and set(first) <= {6.0, 4.0}


def test_the_last_member_continues_alone(two: Groups) -> None:
    two.all[0].communicator.close()
    group = two.all[1]
    wait_until(lambda: group.communicator.world_size == 1)
    mine = torch.full((3,), 5.0)
    with pytest.raises(pccl.PeerLostError, match="all 1 other members of the group are lost"):
        group.all_gather_single(torch.empty(6), mine).wait()
    group.allreduce([mine]).wait()
    assert (group.rank(), group.size(), mine.tolist()) == (0, 1, [5.0] * 3)


def test_the_store_of_a_run_is_shared_and_none_is_served_where_keys_are_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's stores are open to whoever reaches them."""
    with Cluster(2) as cluster:
        groups = cluster.each(lambda _, comm: ProcessGroup(comm))
        groups[0].get_group_store().set("key", "value")
        assert groups[1].get_group_store().get("key") == b"value"
        assert groups[1].get_group_store().add("number", 2) == 2
    assert main(["keys", str(tmp_path / "keys")]) == 0
    monkeypatch.setenv("PCCL_CURVE_DIR", str(tmp_path / "keys"))
    with Cluster(1) as cluster:
        with pytest.raises(RuntimeError, match="this run has no store: keys are in use"):
            ProcessGroup(cluster.comms[0]).get_group_store().get("key")


def test_a_time_limit_fails_on_all(two: Groups) -> None:
    two.all[0].set_timeout(timedelta(seconds=0.3))
    with pytest.raises(pccl.PCCLTimeoutError):
        two.all[0].allreduce([torch.ones(3)]).wait()
    with pytest.raises(pccl.PCCLTimeoutError):
        two.all[1].barrier().wait(timedelta(seconds=0.3))


def model_of(group: ProcessGroup) -> DistributedDataParallel:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    with torch.no_grad():  # threads share torch's generator of random numbers
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1.5, parameter.numel()).view(parameter.shape))
    return DistributedDataParallel(model, process_group=group, init_sync=False)


def gradients(ddp: DistributedDataParallel, rank: int) -> list[float]:
    ddp.zero_grad()
    given = torch.arange(8.0).view(2, 4) * (rank + 1)
    ddp(given).square().sum().backward()
    return [p.grad.sum().item() for p in ddp.parameters() if p.grad is not None]


def test_a_backward_pass_beside_an_exclusive_call_is_an_error_and_the_next_one_is_right(
    two: Groups,
) -> None:
    """In the call on the member that also makes the other call, and later on the other member.

    DDP's reducer is lost if a Work raises in the call, or if its future gets an exception. The
    first leaves it with an internal assertion in each later pass, the second ends the process.
    """
    ready = {id(group): model_of(group) for group in two.all}
    wanted = two.each(lambda group: gradients(ready[id(group)], group.rank()))
    two.each(lambda group: gradients(ready[id(group)], group.rank()))  # buckets are made anew
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(two.all[1].communicator.update_topology)
        wait_until(lambda: len(two.cluster.master.status().waits) == 1)
        for group in two.all[::-1]:
            with pytest.raises(RuntimeError, match="update_topology"):
                gradients(ready[id(group)], group.rank())
        with pytest.raises(pccl.MismatchError, match="never meet"):
            beside.result(PATIENCE_S)
    assert two.each(lambda group: gradients(ready[id(group)], group.rank())) == wanted


def test_a_backward_pass_without_another_member_ends_when_its_time_is_up(two: Groups) -> None:
    """No thread waits for its Works, only for their futures."""
    ready = {id(group): model_of(group) for group in two.all}
    wanted = two.each(lambda group: gradients(ready[id(group)], group.rank()))
    two.each(lambda group: gradients(ready[id(group)], group.rank()))
    for group in two.all:
        group.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.3 s"):
            gradients(ready[id(group)], group.rank())
        group.set_timeout(timedelta(seconds=50))
    assert two.each(lambda group: gradients(ready[id(group)], group.rank())) == wanted


def test_a_backward_pass_survives_a_loss(three: Groups) -> None:
    ready = {id(group): model_of(group) for group in three.all}
    for _ in range(2):  # in the second pass, DDP makes its buckets anew, and broadcasts them
        three.each(lambda group: gradients(ready[id(group)], group.rank()))
    three.all[0].communicator.close()
    found = three.each(lambda group: gradients(ready[id(group)], group.rank() + 1), 0)
    assert found[0] == found[1]


class _Bucket:
    """A bucket of these parameters, as torch passes it to a hook."""

    def __init__(self, parameters: list[torch.nn.Parameter], gradient: Tensor) -> None:
        self.parameters, self.buffer = lambda: parameters, lambda: gradient


def averaged(
    group: ProcessGroup, state: hooks.Quantized, parameters: list[torch.nn.Parameter], given: Tensor
) -> tuple[Tensor, int]:
    """The mean of gradients, and the number of its contributors."""
    gradient = given.clone()
    work = state.launch(_Bucket(parameters, gradient))
    work.wait()
    return gradient, work.contributors


@pytest.mark.parametrize("wire", ["int8", "int4", "e3m0"])
def test_what_quantizing_takes_from_gradients_comes_with_later_ones(
    three: Groups, wire: kernels.Format
) -> None:
    """All of it, when no other gradients follow; one of three members leaves after that."""
    count = 20_000  # more than travel with the votes
    states = {id(group): hooks.Quantized(wire, group) for group in three.all}
    parameters = [torch.nn.Parameter(torch.zeros(count))]
    missing = torch.zeros(count, dtype=torch.float64)

    def step(given: Callable[[], Tensor], *left: int) -> None:
        def job(group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
            gradient = given()
            mean = averaged(group, states[id(group)], parameters, gradient)
            return gradient, *mean

        found = three.each(job, *left)
        assert all(torch.equal(mean, found[0][1]) for _, mean, _ in found)
        assert [members for *_, members in found] == [3 - len(left)] * (3 - len(left))
        missing.add_(sum(gradient.double() for gradient, *_ in found))
        missing.sub_(len(found) * found[0][1].double())

    for left in ((), (1,)):
        if left:
            three.all[1].communicator.close()
        for _ in range(3):
            step(lambda: torch.randn(count) + 0.1, *left)
        assert missing.abs().max() > 1e-3
        for _ in range(8):
            step(lambda: torch.zeros(count), *left)
        assert missing.abs().max() < 1e-4


@pytest.mark.parametrize("wire", payloads.ENCODINGS)
def test_each_contribution_has_the_errors_of_the_last_one(
    three: Groups, wire: kernels.Format
) -> None:
    """One of three members leaves after half of the steps, and takes its errors with it."""
    count = 20_000
    states = {id(group): hooks.Quantized(wire, group) for group in three.all}
    errors = {id(group): torch.zeros(count) for group in three.all}
    parameters = [torch.nn.Parameter(torch.zeros(count))]

    def job(group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
        gradient = torch.randn(count) + 0.1
        wanted, sent = gradient + errors[id(group)], torch.empty(count)
        payload = torch.empty(kernels.quantized_size(wire, count), dtype=torch.uint8)
        kernels.quantize(payload, wanted, wire)
        kernels.dequantize(sent, payload, wire)
        errors[id(group)] = wanted - sent
        return sent, *averaged(group, states[id(group)], parameters, gradient)

    for number in range(6):
        left = (1,) if number > 2 else ()
        if number == 3:
            three.all[1].communicator.close()
        found = three.each(job, *left)
        assert len(found) == 3 - len(left)
        wanted = sum(sent for sent, *_ in found) / len(found)
        for _, mean, members in found:
            assert members == len(found)
            assert torch.equal(mean, found[0][1])
            assert torch.allclose(mean, wanted, atol=1e-5)


def test_a_gradient_that_is_not_finite_leaves_no_error_behind(two: Groups) -> None:
    states = {id(group): hooks.Quantized("int8", group) for group in two.all}
    parameters = [torch.nn.Parameter(torch.zeros(20_000))]

    def job(group: ProcessGroup) -> None:
        for bad in (float("inf"), 0.0):
            gradient = torch.ones(20_000)
            gradient[:10] += bad
            states[id(group)].launch(_Bucket(parameters, gradient)).wait()
        assert torch.allclose(gradient, torch.ones(20_000), atol=0.02)

    two.each(job)


def test_reductions_that_a_type_cannot_hold_are_refused(two: Groups) -> None:
    half, twice = (dist._make_nccl_premul_sum(factor) for factor in (0.5, 2.0))
    whole, number = torch.full((3,), 10, dtype=torch.int32), torch.full((3,), 1 + 1j)
    parts = [torch.zeros(3, dtype=torch.complex64) for _ in range(2)]
    for group in two.all:
        with pytest.raises(ValueError, match="cannot hold the products"):
            reduced(group, half, whole.clone())
        for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            with pytest.raises(ValueError, match="complex numbers add up"):
                group.reduce_scatter(torch.zeros(3, dtype=torch.complex64), parts, op)
            with pytest.raises(ValueError, match="complex numbers add up"):
                group.reduce(number, 0, op)
        with pytest.raises(ValueError, match="integers and bools"):
            reduced(group, dist.ReduceOp.BOR, torch.ones(2))
    results = two.each(lambda group: reduced(group, twice, torch.ones(3, dtype=torch.float16)))
    assert all(torch.equal(found, torch.full((3,), 4.0).half()) for (found,) in results)


def test_errors_stay_with_their_parameters_when_buckets_are_built_anew(two: Groups) -> None:
    one, other = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))

    def sent(given: Tensor) -> Tensor:
        """What is left of it when it has been quantized."""
        found = torch.empty(len(given))
        payload = torch.empty(kernels.quantized_size("e3m0", len(given)), dtype=torch.uint8)
        kernels.quantize(payload, given, "e3m0")
        kernels.dequantize(found, payload, "e3m0")
        return found

    def job(group: ProcessGroup) -> None:
        state, given = hooks.Quantized("e3m0", group), torch.linspace(-1, 1, 16)
        mean, _ = averaged(group, state, [one, other], given)
        assert torch.equal(mean, sent(given))  # both give the same
        of_one, of_other = (given - mean).split(8)
        assert of_one.any() and of_other.any()
        mean, _ = averaged(group, state, [other], torch.zeros(8))
        assert torch.equal(mean, sent(of_other))
        both = torch.cat([of_other - mean, of_one])
        mean, _ = averaged(group, state, [other, one], torch.zeros(16))
        assert torch.equal(mean, sent(both))
        mean, _ = averaged(group, state, [one], torch.zeros(8))
        assert torch.equal(mean, sent((both - sent(both))[8:]))

    two.each(job)
