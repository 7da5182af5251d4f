"""A peer process that holds shared state, for the tests of transfers that are cut off.

    python holder.py MASTER PEERS MIB

Waits until the run has PEERS peers, synchronizes MIB of ones as revision 1, says so, and leaves.
"""

from __future__ import annotations

import sys

import numpy as np

import pccl


def main() -> None:
    address, peers, mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    shared = pccl.SharedState.from_tensors({"x": np.ones(mib << 20, np.uint8)})
    shared.revision = 1
    with pccl.Communicator(address) as comm:
        comm.wait_for_peers(peers)
        info = comm.sync_shared_state(shared)
        print(info.tx_bytes, flush=True)


if __name__ == "__main__":
    main()
