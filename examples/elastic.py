"""A loop that survives: peers may be killed and restarted at any moment.

pccl run -n 3 -- python examples/elastic.py
"""

import os

import numpy as np

import pccl

weights, rng = np.zeros(100_000, np.float32), np.random.default_rng()
shared = pccl.SharedState.from_tensors({"weights": weights})  # what a newcomer receives


def step(number: int) -> None:
    gradient = weights - rng.normal(1.0, 0.1, weights.shape).astype(np.float32)  # your model's
    info = comm.all_reduce(gradient)  # the mean over all peers
    weights[:] -= 0.01 * gradient
    if number % 100 == 0:
        print(f"step {number}: {info.world_size} peers, weight {weights[0]:.4f}", flush=True)


with pccl.Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148")) as comm:
    comm.run(step, shared, steps=3000, min_peers=2)
print(f"weights {weights.sum():.6f}")
