"""A peer process for the failure tests: reduces without end, reports each step as JSON.

Contributions are powers of two, so that a result tells exactly who contributed. Run as

    python worker.py MASTER SLOT COUNT
"""

from __future__ import annotations

import json
import sys

import numpy as np

import pccl


def say(**report: object) -> None:
    print(json.dumps(report), flush=True)


def reduce_once(comm: pccl.Communicator, slot: int, step: int, count: int) -> int:
    """One all-reduce, retried until it commits; returns the number of retries."""
    send = np.full(count, float(2**slot))
    in_place = step % 2 == 0
    recv = send if in_place else np.zeros(count)
    retries = 0
    while True:
        try:
            info = comm.all_reduce(send, recv, op=pccl.ReduceOp.SUM, tag=step % 3)
        except pccl.PeerLostError:
            assert (send == float(2**slot)).all(), "the input was not restored"
            retries += 1
            continue
        assert (recv == recv[0]).all(), "elements differ"
        say(step=step, world=info.world_size, value=int(recv[0]), retries=retries)
        return retries


def main() -> None:
    address, slot, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    step = np.zeros(1, np.int64)
    shared = pccl.SharedState.from_tensors({"step": step})
    with pccl.Communicator(address) as comm:
        comm.sync_shared_state(shared)
        say(joined=int(step[0]))
        while True:
            alone = False
            try:
                reduce_once(comm, slot, int(step[0]), count)
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
