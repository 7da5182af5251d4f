"""A script written for pypccl 1.0; docs/howto/migrate/pypccl.md lists the differences.

pccl master &
python examples/from_pypccl.py &
python examples/from_pypccl.py &
"""

import argparse
import os
import time

import numpy as np

from pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    ReduceOperandDescriptor,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)


def main() -> None:
    """Moves weights to the mean of the peers' targets."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--target", type=float, default=1.0)
    parser.add_argument("--elements", type=int, default=10_000, help="of the array")
    args = parser.parse_args()

    communicator = Communicator(args.master_address, 0)
    communicator.connect(n_attempts=15)

    weights = np.zeros(args.elements, np.float32)
    update = np.zeros_like(weights)
    shared_state = SharedState(
        [TensorInfo.from_numpy(weights, "weights", allow_content_inequality=False)]
    )
    while shared_state.revision < args.steps:
        if communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1:
            communicator.sync_shared_state(shared_state, SharedStateSyncStrategy.ENFORCE_POPULAR)
            is_success = False
            while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1 and not is_success:
                handle = communicator.all_reduce_async(
                    args.target - weights,
                    update,
                    op=ReduceOp.AVG,
                    operand_descriptor=ReduceOperandDescriptor(
                        DataType.FLOAT, DistributionHint.NORMAL
                    ),
                    quantization_options=QuantizationOptions(
                        DataType.UINT8, QuantizationAlgorithm.MIN_MAX
                    ),
                )
                is_success, status, info = handle.wait()
                if not is_success:
                    print(f"all_reduce failed with status {status}: again", flush=True)
            if is_success:
                weights += 0.5 * update
                shared_state.revision += 1
                print(f"step {shared_state.revision}, {info.world_size} peers", flush=True)
        else:  # alone: wait for a replacement
            time.sleep(0.05)
        if communicator.are_peers_pending():
            communicator.update_topology()
    communicator.finish()  # not in pypccl: a peer that restarts too late ends, too
    print(f"weights {weights[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
