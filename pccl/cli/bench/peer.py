"""One process of `pccl bench all_reduce`: joins the run, and measures one size after the other.

All ways of one size take turns in each iteration, so that whatever else happens on the machine hits
them alike. Before each timed call the peers meet in an untimed all-reduce of one element, of the
same library: all begin together, and none pays for how another library let its peers go.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np

import pccl
from pccl.arrays import Array
from pccl.cli.bench import data
from pccl.types import DataType, ReduceOp

OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
GLOO = "gloo"

_GLOO_TIMEOUT = timedelta(seconds=60)
_TAG = 1  # of what is timed; the meetings before it have tag 0


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes do.

    Attributes:
        counts: elements, one size after the other.
        warmups: iterations that are not timed.
        check: whether to verify every element of one more call of each way.
        quantization: as `Communicator.all_reduce` takes it.
        gloo: whether torch.distributed with gloo takes its turns too.
    """

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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to reduce the buffers of one size."""

    meet: Callable[[], object]
    reduce: Callable[[], object]


def serve(job: Job, number: int, address: str, store: str, results: Connection) -> None:
    """The life of process `number`.

    Args:
        address: of the master.
        store: URL of a file in which gloo's processes find each other.
        results: gets a `Measured` for each size, or why there is none, as text.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with _gloo(job, number, store), pccl.Communicator(address) as comm:
            while comm.world_size < job.peers:
                if comm.are_peers_pending():
                    comm.update_topology()
            for count in job.counts:
                results.send(_measure(comm, job, number, count))
    except pccl.PCCLError as error:
        results.send(str(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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


def _measure(comm: pccl.Communicator, job: Job, number: int, count: int) -> Measured:
    send = data.tiled(data.contribution(job.dtype, job.op, number), count)
    recv = np.zeros_like(send)
    ways = _ways(comm, job, send, recv)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for iteration in range(job.warmups + job.iterations):
        for name, way in ways.items():
            way.meet()
            began = time.perf_counter()
            way.reduce()
            elapsed = time.perf_counter() - began
            if iteration >= job.warmups:
                times_s[name].append(elapsed)
    return Measured(times_s, _check(job, ways, send, recv) if job.check else {})


def _ways(comm: pccl.Communicator, job: Job, send: data.Bits, recv: data.Bits) -> dict[str, Way]:
    source, target = data.as_array(send, job.dtype), data.as_array(recv, job.dtype)
    one = np.zeros(1, np.float32)

    def meet() -> None:
        comm.all_reduce(one, one, op=ReduceOp.MAX)

    def reduce(send: Array) -> None:
        comm.all_reduce(send, target, op=job.op, tag=_TAG, quantization=job.quantization)

    ways = {
        OUT_OF_PLACE: Way(meet, lambda: reduce(source)),
        IN_PLACE: Way(meet, lambda: reduce(target)),
    }
    if job.gloo:
        ways[GLOO] = _gloo_way(job.op, target)
    return ways


def _gloo_way(op: ReduceOp, target: Array) -> Way:
    import torch
    import torch.distributed as dist

    tensor = torch.as_tensor(target)  # the same memory
    one = torch.zeros(1)
    gloo_op = {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.PROD: dist.ReduceOp.PRODUCT,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.MIN: dist.ReduceOp.MIN,
    }[op]
    return Way(lambda: dist.all_reduce(one), lambda: dist.all_reduce(tensor, gloo_op))


def _check(job: Job, ways: dict[str, Way], send: data.Bits, recv: data.Bits) -> dict[str, int]:
    """Reduces once more in both of our ways, from known contents, and counts what is wrong."""
    table = data.expected(job.dtype, job.op, job.peers)
    before = {
        OUT_OF_PLACE: ~data.tiled(table, recv.size).view(np.uint8),  # right in no element
        IN_PLACE: send.view(np.uint8),
    }
    wrong = {}
    for name, content in before.items():
        recv.view(np.uint8)[:] = content
        ways[name].reduce()
        if job.quantization is None:
            wrong[name] = data.count_wrong(recv, table)
        else:
            error = data.error_max(job.dtype, job.op, job.peers, job.quantization)
            wrong[name] = data.count_far(recv, table, job.dtype, error)
    return wrong
