"""A peer process for the failure tests: collectives without end, reports each step as JSON.

Contributions are powers of two, so that a result tells exactly who contributed. Run as

    python worker.py MASTER SLOT COUNT all_reduce|all

where `all` takes one collective after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np

import pccl

ROWS = 60  # any world of up to six divides it
Outcome = tuple[int, int]  # the value of all elements, and how many took part
Collective = Callable[[pccl.Communicator, np.ndarray, int], Outcome]


def say(**report: object) -> None:
    print(json.dumps(report), flush=True)


def only(*arrays: np.ndarray) -> int:
    """The one value of all elements of all arrays."""
    assert all((array == arrays[0].flat[0]).all() for array in arrays), "elements differ"
    return int(arrays[0].flat[0])


def all_reduce(comm: pccl.Communicator, x: np.ndarray, step: int) -> Outcome:
    recv = x if step % 2 == 0 else np.zeros_like(x)
    info = comm.all_reduce(x, recv, op="sum", tag=step % 3)
    return only(recv), info.world_size


def reduce_list(comm: pccl.Communicator, x: np.ndarray, step: int) -> Outcome:
    parts = [x[: x.size // 3], x[x.size // 3 :]]
    info = comm.all_reduce(parts, op="sum")
    return only(*parts), info.world_size


def all_gather(comm: pccl.Communicator, x: np.ndarray, step: int) -> Outcome:
    gathered = comm.all_gather({"x": x, "few": x[:3]})
    values = [only(row, few) for row, few in zip(gathered["x"], gathered["few"], strict=True)]
    return sum(values), len(values)


def reduce_scatter(comm: pccl.Communicator, x: np.ndarray, step: int) -> Outcome:
    value = only(comm.reduce_scatter(x[: x.size // ROWS * ROWS].reshape(ROWS, -1), op="sum"))
    return value, value.bit_count()


def broadcast(comm: pccl.Communicator, x: np.ndarray, step: int) -> Outcome:
    info = comm.broadcast(x, root=1)
    return only(x), info.world_size


ALL: list[Collective] = [
    all_reduce,
    all_gather,
    reduce_list,
    reduce_scatter,
    broadcast,
]


def once(comm: pccl.Communicator, collective: Collective, slot: int, step: int, count: int) -> None:
    """One collective, retried until it commits."""
    x = np.full(count, float(2**slot))
    retries = 0
    while True:
        try:
            value, world = collective(comm, x, step)
        except pccl.PeerLostError:
            assert (x == float(2**slot)).all(), "the input was not restored"
            retries += 1
            continue
        say(step=step, what=collective.__name__, world=world, value=value, retries=retries)
        return


def main() -> None:
    address, slot, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    collectives = ALL if sys.argv[4] == "all" else [all_reduce]
    step = np.zeros(1, np.int64)
    shared = pccl.SharedState.from_tensors({"step": step})
    with pccl.Communicator(address) as comm:
        comm.sync_shared_state(shared)
        say(joined=int(step[0]))
        while True:
            alone = False
            try:
                number = int(step[0])
                once(comm, collectives[number % len(collectives)], slot, number, count)
            except pccl.TooFewPeersError:
                alone = True
            else:
                step += 1
                shared.revision = int(step[0])
            pending = comm.are_peers_pending()
            if pending:
                comm.update_topology()
            if pending or not alone:
                comm.sync_shared_state(shared)


if __name__ == "__main__":
    main()
