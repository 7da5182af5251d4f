"""A peer that may be killed and restarted at any moment, as schedulers do.

    pccl run -n 2 -- python examples/launch/train.py

A peer that starts or restarts gets the weights and the step number from the others. If no other
peer is left, it begins with its file (--checkpoint), if there is one.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import pccl


def main(words: list[str] | None = None) -> None:
    """Trains until all steps are done."""
    parser = argparse.ArgumentParser(description="Trains a model that any peer may leave.")
    address = os.environ.get("PCCL_MASTER", "127.0.0.1:48148")
    parser.add_argument("--master-address", default=address)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--elements", type=int, default=1000, help="of the weights")
    parser.add_argument("--seconds", type=float, default=0.1, help="that a step takes")
    parser.add_argument("--min-peers", type=int, default=1, help="peers before the first step")
    parser.add_argument("--checkpoint", type=Path, help="written after each tenth step")
    args = parser.parse_args(words)

    weights, step = np.zeros(args.elements, np.float32), np.zeros(1, np.int64)
    shared = pccl.SharedState.from_tensors({"weights": weights, "step": step})
    if args.checkpoint is not None and args.checkpoint.exists():
        shared.load(args.checkpoint)
    with pccl.Communicator(args.master_address, connect_timeout=300) as comm:
        while True:
            comm.admit(shared, min_peers=args.min_peers)  # gives newcomers what they lack
            if step[0] >= args.steps:
                break
            time.sleep(args.seconds)  # a model would train here
            progress = np.full_like(weights, 1.0)
            try:
                peers = comm.all_reduce(progress).world_size
            except pccl.PeerLostError:
                continue  # nothing has changed: repeat the step without it
            except pccl.TooFewPeersError:
                peers = 1
            weights += progress
            step += 1
            shared.push_revision()
            print(f"step {step[0]}: {peers} peers", flush=True)
            if args.checkpoint is not None and step[0] % 10 == 0:
                shared.save(args.checkpoint)
        comm.finish()  # a peer that starts from now on is too late, and exits
    print(f"done: {step[0]} steps, weights {weights[0]}", flush=True)


if __name__ == "__main__":
    main()
