"""A program that calls `run` again whenever Ctrl-C has ended it; reports some steps as JSON.

python interrupted.py MASTER COUNT
"""

from __future__ import annotations

import json
import signal
import sys
import time

import numpy as np

import pccl


def say(**report: object) -> None:
    print(json.dumps(report), flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    weights = np.zeros(int(sys.argv[2]), np.float32)
    state = pccl.SharedState.from_tensors({"weights": weights})
    reported_s = 0.0
    with pccl.Communicator(sys.argv[1]) as comm:

        def step(number: int) -> None:
            gradient = np.ones_like(weights)
            comm.all_reduce(gradient)
            weights[:] -= gradient
            nonlocal reported_s
            if time.monotonic() > reported_s + 0.02:
                reported_s = time.monotonic()
                say(step=number)

        while True:
            try:
                comm.run(step, state, steps=1_000_000, min_peers=3)
            except KeyboardInterrupt:
                say(interrupted=True)


if __name__ == "__main__":
    main()
