"""One process of `pccl bench` for collectives: joins the run, measures one size after the other.

All ways of one size take turns in each iteration, so that whatever else happens on the machine hits
them alike. Before each timed call the peers meet in an untimed all-reduce of one element, of the
same library: all begin together, and none pays for how another library let its peers go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import pccl
from pccl.cli.bench import ways
from pccl.cli.bench.processes import follow_parent
from pccl.types import DataType, ReduceOp

_GLOO_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes do.

    Attributes:
        what: the collective, by its name.
        counts: elements, one size after the other; of the smaller buffer.
        warmups: iterations that are not timed.
        check: whether to verify every element of one more call of each way.
        quantization: as `Communicator.all_reduce` takes it.
        gloo: whether torch.distributed with gloo takes its turns too.
    """

    what: str
    peers: int
    counts: tuple[int, ...]
    dtype: DataType
    op: ReduceOp
    iterations: int
    warmups: int
    check: bool
    gloo: bool
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One size by one peer.

    Attributes:
        times_s: seconds of each timed iteration, by way.
        wrong: wrong elements by way; empty when not checked.
    """

    times_s: dict[str, list[float]]
    wrong: dict[str, int]


def serve(number: int, job: Job, address: str, store: str, results: Connection) -> None:
    """The life of process `number`.

    Args:
        address: of the master.
        store: URL of a file in which gloo's processes find each other.
        results: gets a `Measured` for each size, or why there is none, as text.
    """
    follow_parent()
    try:
        with _gloo(job, number, store), pccl.Communicator(address) as comm:
            while comm.world_size < job.peers:
                if comm.are_peers_pending():
                    comm.update_topology()
            for count in job.counts:
                results.send(_measure(comm, job, count))
    except pccl.PCCLError as error:
        results.send(str(error))


@contextmanager
def _gloo(job: Job, number: int, store: str) -> Iterator[None]:
    if not job.gloo:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=store, timeout=_GLOO_TIMEOUT, rank=number, world_size=job.peers
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(comm: pccl.Communicator, job: Job, count: int) -> Measured:
    trial = ways.Trial(comm, job.what, job.dtype, job.op, count, job.quantization)
    found = trial.ways(job.gloo)
    times_s: dict[str, list[float]] = {name: [] for name in found}
    for iteration in range(job.warmups + job.iterations):
        for name, way in found.items():
            way.meet()
            began = time.perf_counter()
            way.run()
            elapsed = time.perf_counter() - began
            if iteration >= job.warmups:
                times_s[name].append(elapsed)
    wrong = {}
    for name, way in found.items():
        if job.check and name != ways.GLOO:
            wrong[name] = trial.check(way)
    return Measured(times_s, wrong)
