"""A peer that reduces once with all others, and then begins a call that none of them has made.

python eager.py MASTER WORLD COUNT
"""

from __future__ import annotations

import sys

import numpy as np

import pccl


def main() -> None:
    address, world, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    comm = pccl.Communicator(address)
    comm.connect()
    comm.wait_for_peers(world)
    comm.all_reduce(np.zeros(count, np.float32), op="sum")
    comm.all_reduce(np.full(count, 1000.0, np.float32), op="sum", tag=1)


if __name__ == "__main__":
    main()
