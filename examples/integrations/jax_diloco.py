"""DiLoCo with JAX and optax: an outer step on a pytree, after every 20 inner steps.

pccl run -n 3 -- python examples/integrations/jax_diloco.py 20
"""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import optax
from jax_data_parallel import gradients_of
from jax_trees import average, received, shared

import pccl

INNER_STEPS = 20
inner, outer = optax.adam(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True)


def main(steps: int) -> None:
    key = jax.random.key(os.getpid())  # each peer has its own data
    theta = {"in": jax.random.normal(key, (20, 64)) / 5, "out": jnp.zeros((64, 1))}
    trained, k = (theta, outer.init(theta)), 0  # the same on all peers
    moments = inner.init(theta)  # each peer has its own
    with pccl.Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148")) as comm:
        while True:
            state = shared(trained, k)
            if not comm.admit(state, min_peers=2):
                comm.sync_shared_state(state)  # the same bits everywhere, whatever XLA computes
            (theta, momentum), k = received(trained, state), state.revision
            if k == steps:
                break
            weights = theta
            for i in range(k * INNER_STEPS, (k + 1) * INNER_STEPS):
                loss, gradients = gradients_of(weights, jax.random.fold_in(key, i))
                updates, moments = inner.update(gradients, moments)
                weights = optax.apply_updates(weights, updates)
            progress = jax.tree.map(jnp.subtract, theta, weights)
            try:
                mean = average(comm, progress, quantization="int8")
            except pccl.PeerLostError:
                continue  # repeat the round without the lost peer
            updates, momentum = outer.update(mean, momentum)
            trained, k = (optax.apply_updates(theta, updates), momentum), k + 1
            print(f"outer step {k}: loss {loss:.4f}, {comm.world_size} peers", flush=True)
        comm.finish()
    print(f"weights {float(theta['in'].sum())!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
