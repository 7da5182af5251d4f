"""The API in ten lines: two peers meet at a master and average an array.

Start the master, then two peers:

    pccl master &
    python examples/all_reduce.py &
    python examples/all_reduce.py

On other machines, set PCCL_MASTER=HOST:48148. `pccl run -n 3` starts a master and three peers, and
sets their number.
"""

from __future__ import annotations

import os

import numpy as np

import pccl

peers = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
with pccl.Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148")) as comm:
    comm.wait_for_peers(peers)
    x = np.full(1_000_000, 1.0 + comm.rank, np.float32)
    info = comm.all_reduce(x)
    print(f"the mean over {info.world_size} peers is {x[0]}; sent {info.tx_bytes} bytes")
