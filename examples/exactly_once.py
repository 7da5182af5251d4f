"""Every sample exactly once: peers that may be killed count the letters of a text together.

    pccl master &
    python examples/exactly_once.py README.md &
    python examples/exactly_once.py README.md &

Kill any of them, or start more: another peer recounts the blocks that a lost peer had counted but
not yet shared, and no others. In training, a batch takes the place of a block, and a gradient that
of a count.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import pccl
from pccl.data import Ledger

BLOCK = 64  # bytes of a sample


def main() -> None:
    """Counts until all blocks are counted."""
    parser = argparse.ArgumentParser(description="Every sample exactly once.")
    parser.add_argument("file", type=Path, help="the text: the same for all peers")
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument("--min-peers", type=int, default=2, help="peers that the run waits for")
    parser.add_argument("--round-s", type=float, default=0.1, help="how long a round takes")
    args = parser.parse_args()

    text = np.fromfile(args.file, np.uint8)
    ledger = Ledger(-(-len(text) // BLOCK), share=8)
    total = np.zeros(256, np.int64)
    shared = pccl.SharedState([pccl.TensorInfo.from_numpy(total, "total"), *ledger.entries()])
    with pccl.Communicator(args.master_address) as comm:
        comm.sync_shared_state(shared, min_peers=args.min_peers)  # newcomers meet admit() below
        ledger.claim(comm)
        while not ledger.finished:
            mine = [text[BLOCK * i : BLOCK * (i + 1)] for part in ledger.share for i in part]
            counts = sum((np.bincount(block, minlength=256) for block in mine), 0 * total)
            time.sleep(args.round_s)
            vote = ledger.vote()
            reduce(comm, [counts, vote])
            total += counts
            ledger.settle(vote)
            shared.push_revision()
            comm.admit(shared)
            ledger.claim(comm)
            print(f"{ledger.consumed} of {ledger.samples} blocks", flush=True)
        comm.finish()
    print(f"exact: {(total == np.bincount(text, minlength=256)).all()}", flush=True)


def reduce(comm: pccl.Communicator, arrays: list[np.ndarray]) -> None:
    """Sums over the remaining peers; alone, the sum is this peer's own."""
    while True:
        try:
            comm.all_reduce(arrays, op="sum")
            return
        except pccl.PeerLostError:
            pass  # nothing has changed: repeat without it
        except pccl.TooFewPeersError:
            return


if __name__ == "__main__":
    main()
