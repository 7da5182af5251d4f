"""Data-parallel training with JAX and optax: peers may be killed and restarted at any step.

pccl run -n 3 -- python examples/integrations/jax_data_parallel.py 200
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax_trees import average, received, shared

import pccl

optimizer = optax.adam(1e-2)


@jax.jit
def gradients_of(weights: Any, key: Any) -> Any:
    """The loss of a small model on random data, and its gradients."""
    inputs = jax.random.normal(key, (64, 20))
    targets = inputs.sum(1, keepdims=True)
    return jax.value_and_grad(
        lambda w: jnp.mean((jnp.tanh(inputs @ w["in"]) @ w["out"] - targets) ** 2)
    )(weights)


def main(steps: int) -> None:
    key = jax.random.key(os.getpid())  # each peer has its own data
    weights = {"in": jax.random.normal(key, (20, 64)) / 5, "out": jnp.zeros((64, 1))}
    trained, step = (weights, optimizer.init(weights)), 0
    with pccl.Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148")) as comm:
        while True:
            state = shared(trained, step)
            comm.admit(state, min_peers=2)  # newcomers receive it
            (weights, moments), step = received(trained, state), state.revision
            if step == steps:
                break
            loss, gradients = gradients_of(weights, jax.random.fold_in(key, step))
            try:
                gradients = average(comm, gradients)
            except pccl.PeerLostError:
                continue  # nothing has changed: repeat the step without the lost peer
            updates, moments = optimizer.update(gradients, moments)
            trained, step = (optax.apply_updates(weights, updates), moments), step + 1
            print(f"step {step}: loss {loss:.4f}, {comm.world_size} peers", flush=True)
        comm.finish()
    print(f"weights {float(weights['in'].sum())!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
