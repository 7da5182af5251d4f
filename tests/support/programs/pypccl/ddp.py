"""Data-parallel training as a pypccl 1.0 script has it: gradients are averaged in every step.

python ddp.py MASTER SEED
"""

import hashlib
import json
import sys

import numpy as np

from pccl import *  # noqa: F403

communicator = Communicator(sys.argv[1], 0)  # noqa: F405
communicator.connect(n_attempts=15)
rng = np.random.default_rng(int(sys.argv[2]))
truth = np.linspace(-1, 1, 5000, dtype=np.float32)
weights = np.zeros_like(truth)
shared_state = SharedState([TensorInfo.from_numpy(weights, "weights")])  # noqa: F405
options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.NONE)  # noqa: F405
newcomer = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1  # noqa: F405

while True:
    changed = newcomer
    if not newcomer and communicator.are_peers_pending():
        communicator.update_topology()
        changed = True
    newcomer = False
    world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)  # noqa: F405
    if world_size < 2 and not changed:
        continue
    communicator.sync_shared_state(shared_state)

    gradient = weights - truth + 0.1 * rng.standard_normal(truth.size, np.float32)
    mean = np.empty_like(gradient)
    success = False
    while world_size > 1 and not success:
        handle = communicator.all_reduce_async(
            gradient,
            mean,
            op=ReduceOp.AVG,  # noqa: F405
            operand_descriptor=ReduceOperandDescriptor(  # noqa: F405
                datatype=DataType.FLOAT,  # noqa: F405
                distribution_hint=DistributionHint.NORMAL,  # noqa: F405
            ),
            quantization_options=options,
        )
        success, status, info = handle.wait()
        world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)  # noqa: F405
    if not success:
        continue
    weights -= 0.05 * mean
    shared_state.revision += 1
    report = {
        "group": 0,
        "step": shared_state.revision,
        "world": info.world_size,
        "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
        "loss": float(np.square(weights - truth).mean()),
    }
    print(json.dumps(report), flush=True)
