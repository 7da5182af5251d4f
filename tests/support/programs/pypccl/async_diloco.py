"""Overlapped DiLoCo as a pypccl 1.0 script has it: a thread reduces while the next steps run.

A late joiner receives (RECEIVE_ONLY) what the others send (SEND_ONLY), who are ahead of it by the
reduction under way.

python async_diloco.py MASTER SEED
"""

import hashlib
import json
import sys
import threading

import numpy as np

from pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceOp,
    Result,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)

rng = np.random.default_rng(int(sys.argv[2]))
truth = np.linspace(-1, 1, 20_000, dtype=np.float32)
theta = np.zeros_like(truth)
step = np.zeros(1, np.int64)
shared_state = SharedState(
    [TensorInfo.from_numpy(theta, "theta"), TensorInfo.from_numpy(step, "step")]
)
communicator = Communicator(sys.argv[1])
communicator.connect()
newcomer = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1


class Reduction(threading.Thread):
    """Averages a pseudo-gradient, again until it commits or no other peer is left."""

    def __init__(self, gradient: np.ndarray) -> None:
        super().__init__(daemon=True)
        self.gradient, self.mean, self.world = gradient, np.empty_like(gradient), 0
        self.start()

    def run(self) -> None:
        while self.world == 0:
            try:
                info = communicator.all_reduce(self.gradient, self.mean, op=ReduceOp.AVG, tag=1)
                self.world = info.world_size
            except PCCLError as error:
                if error.result is Result.TOO_FEW_PEERS:
                    return
                if error.result is not Result.RANK_CONNECTION_LOST:
                    raise


def finish(reduction: Reduction) -> None:
    """Applies what has come of it."""
    reduction.join()
    if reduction.world:
        np.subtract(theta, np.float32(0.7) * reduction.mean, out=theta)
        step[0] += 1
        report = {
            "group": 0,
            "step": int(step[0]),
            "world": reduction.world,
            "digest": hashlib.sha256(theta.tobytes()).hexdigest(),
            "loss": float(np.square(theta - truth).mean()),
        }
        print(json.dumps(report), flush=True)


reduction = None
while True:
    if newcomer:
        communicator.sync_shared_state(shared_state, SharedStateSyncStrategy.RECEIVE_ONLY)
        newcomer = False
    elif communicator.are_peers_pending():  # while the reduction is under way
        if reduction is not None:
            finish(reduction)
            reduction = None
        communicator.update_topology()
        shared_state.push_revision()
        communicator.sync_shared_state(shared_state, SharedStateSyncStrategy.SEND_ONLY)
    local = theta.copy()
    for _ in range(10):  # inner steps
        local -= 0.1 * (local - truth + 0.1 * rng.standard_normal(truth.size, np.float32))
    if reduction is not None:
        finish(reduction)
    reduction = Reduction(theta - local)
