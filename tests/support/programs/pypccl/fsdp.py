"""Sharded training as a pypccl 1.0 script has it: one peer group for each shard of the model.

python fsdp.py MASTER SEED SHARD
"""

import hashlib
import json
import sys

import numpy as np

import pccl
from pccl import Attribute, Communicator, PCCLError, ReduceOp, Result, SharedState, TensorInfo

SHARDS = 2
shard = int(sys.argv[3])
communicator = Communicator(sys.argv[1], peer_group=shard, p2p_connection_pool_size=4)
communicator.connect()
rng = np.random.default_rng(int(sys.argv[2]))
truth = np.linspace(-1, 1, 6000, dtype=np.float32).reshape(SHARDS, -1)[shard]
parts = {name: np.zeros(truth.size // 2, np.float32) for name in ("first", "second")}
step = np.zeros(1, np.int64)
entries = {**parts, "step": step}
shared_state = SharedState([TensorInfo.from_numpy(each, name) for name, each in entries.items()])
newcomer = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1
stepped = False


def reduce_all(gradients: list[np.ndarray]) -> "pccl.ReduceInfo | None":
    """One collective for each part, all at the same time; None when this peer is alone."""
    work = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
    descriptors = [
        pccl.ReduceOpDescriptor.from_numpy(
            gradient, gradient, pccl.ReduceDescriptor(gradient.size, ReduceOp.SUM, tag, work, None)
        )
        for tag, gradient in enumerate(gradients)
    ]
    try:
        return communicator.all_reduce_multiple_with_retry(descriptors, max_in_flight=2)
    except PCCLError as error:
        if error.result is not Result.TOO_FEW_PEERS:
            raise
        return None


while True:
    changed = newcomer
    if not newcomer and communicator.are_peers_pending():
        communicator.update_topology()
        changed = True
    newcomer = False
    groups = communicator.get_attribute(Attribute.NUM_DISTINCT_PEER_GROUPS)
    largest = communicator.get_attribute(Attribute.LARGEST_PEER_GROUP_WORLD_SIZE)
    local = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
    assert 1 <= groups <= SHARDS and largest >= local
    if changed or stepped:
        shared_state.push_revision()
        communicator.sync_shared_state(shared_state)
        stepped = False

    whole = np.concatenate(list(parts.values()))
    noise = 0.1 * rng.standard_normal(whole.size, np.float32)
    gradients = np.split(whole - truth + noise, 2)
    info = reduce_all(gradients)
    if info is None:
        continue
    for part, gradient in zip(parts.values(), gradients, strict=True):
        part -= 0.02 * gradient
    step += 1
    stepped = True
    report = {
        "group": shard,
        "step": int(step[0]),
        "world": info.world_size,
        "digest": hashlib.sha256(b"".join(p.tobytes() for p in parts.values())).hexdigest(),
        "loss": float(np.square(whole - truth).mean()),
    }
    print(json.dumps(report), flush=True)
