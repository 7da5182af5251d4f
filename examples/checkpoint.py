"""A run that outlives all its peers: each regularly writes a file, and begins with it.

    pccl master &
    python examples/checkpoint.py /tmp/first &
    python examples/checkpoint.py /tmp/second &

Kill both of them and start them again: they continue from the later of the two files, because the
highest revision wins the first synchronization of a run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

import pccl


def main() -> None:
    """Counts the steps of a run, and of all its peers."""
    parser = argparse.ArgumentParser(description="Checkpoints of a run.")
    parser.add_argument("file", type=Path, help="of this peer")
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the run")
    parser.add_argument("--elements", type=int, default=100_000, help="of the array")
    args = parser.parse_args()

    total = np.zeros(args.elements, np.float32)
    shared = pccl.SharedState.from_tensors({"total": total})
    if args.file.exists():
        shared.load(args.file)
        print(f"loaded revision {shared.revision}", flush=True)

    with pccl.Communicator(args.master_address) as comm:

        def step(number: int) -> None:
            if number % 10 == 0 and number > 0:
                shared.save(args.file)  # atomic
                print(f"step {number}: {total[0]:.0f} contributions", flush=True)
            contribution = np.ones_like(total)
            comm.all_reduce(contribution, op="sum")
            total[:] += contribution

        # the peer with the latest file must be there when the run begins; a peer alone waits
        comm.run(step, shared, steps=args.steps, min_peers=2)
        print(f"step {args.steps}: {total[0]:.0f} contributions", flush=True)


if __name__ == "__main__":
    main()
