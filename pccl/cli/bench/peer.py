"""One process of `pccl bench` for collectives: joins the run and measures one size after another.

The variants of one size alternate in each iteration, so that other load on the machine affects all
alike. Before each timed call, the peers do an untimed all-reduce of one element with the same
library, so that all start together and no variant pays for the end of the previous one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import pccl
from pccl.cli.bench import places, ways
from pccl.cli.bench.processes import follow_parent
from pccl.types import DataType, ReduceOp

_TORCH_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes do.

    Attributes:
        what: the collective, by its name.
        counts: elements, one size after the other; of the smaller buffer.
        warmups: iterations that are not timed.
        check: whether to verify every element of one more call of each way.
        quantization: as `Communicator.all_reduce` takes it.
        against: what takes its turns too, of `ways.OTHERS`.
        lanes: connections to the next peer; 0: as pccl chooses.
        device: where the arrays lie, of `places.DEVICES`.
    """

    what: str
    peers: int
    counts: tuple[int, ...]
    dtype: DataType
    op: ReduceOp
    iterations: int
    warmups: int
    check: bool
    against: str | None = None
    quantization: str | None = None
    lanes: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Measured:
    """One size by one peer.

    Attributes:
        times_s: seconds of each timed iteration, by way.
        wrong: wrong elements by way; empty when not checked.
        sent: bytes that the peer sends in a call, by way; none of torch's.
    """

    times_s: dict[str, list[float]]
    wrong: dict[str, int]
    sent: dict[str, int]


def serve(number: int, job: Job, address: str, store: str, results: Connection) -> None:
    """The life of process `number`.

    Args:
        address: of the master.
        store: URL of a file in which torch's processes find each other.
        results: gets a `Measured` for each size, or why there is none, as text.
    """
    follow_parent()
    try:
        place = places.of_process(job.device, number)
        with _torch(job, number, store), join(address, job) as comm:
            for count in job.counts:
                results.send(measure(comm, job, count, place))
    except pccl.PCCLError as error:
        results.send(str(error))


@contextmanager
def join(address: str, job: Job) -> Iterator[pccl.Communicator]:
    """A communicator of a run of `job.peers`, which it waits for."""
    with pccl.Communicator(address, p2p_connection_pool_size=job.lanes) as comm:
        comm.wait_for_peers(job.peers)
        yield comm


@contextmanager
def _torch(job: Job, number: int, store: str) -> Iterator[None]:
    if job.against not in ways.TORCH:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        job.against, init_method=store, timeout=_TORCH_TIMEOUT, rank=number, world_size=job.peers
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(comm: pccl.Communicator, job: Job, count: int, place: places.Place) -> Measured:
    """One size, of `count` elements, whose arrays lie there."""
    trial = ways.Trial(comm, job.what, job.dtype, job.op, count, job.quantization, place)
    found = trial.ways(job.against)
    times_s: dict[str, list[float]] = {name: [] for name in found}
    for iteration in range(job.warmups + job.iterations):
        for name, way in found.items():
            way.meet()
            place.finish()
            began = time.perf_counter()
            way.run()
            elapsed = time.perf_counter() - began
            if iteration >= job.warmups:
                times_s[name].append(elapsed)
    ours = {name: way for name, way in found.items() if name not in ways.TORCH}
    sent = {name: way.sent() for name, way in ours.items()}
    wrong = {name: trial.check(way) for name, way in ours.items()} if job.check else {}
    return Measured(times_s, wrong, sent)
