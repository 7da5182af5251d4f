"""DiLoCo as a pypccl 1.0 script has it: the outer state is shared, pseudo-gradients are averaged.

python diloco.py MASTER SEED
"""

import hashlib
import json
import sys

import torch
from torch import nn

from pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    ReduceOperandDescriptor,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)

torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[2]))
model = nn.Linear(64, 32)
outer = [parameter.detach().clone() for parameter in model.parameters()]
for parameter in outer:
    parameter.requires_grad_(True)
outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
for parameter in outer:  # so that the momentum is there to be shared from the beginning
    parameter.grad = torch.zeros_like(parameter)
    outer_optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
truth = torch.linspace(-1, 1, 64 * 32).reshape(32, 64)

entries = [TensorInfo.from_torch(p.detach(), f"p{i}") for i, p in enumerate(outer)]
entries += [
    TensorInfo.from_torch(outer_optimizer.state[p]["momentum_buffer"], f"m{i}")
    for i, p in enumerate(outer)
]
shared_state = SharedState(entries)
communicator = Communicator(sys.argv[1], 0)
communicator.connect(n_attempts=15)
newcomer = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1


def restart_from_outer() -> None:
    with torch.no_grad():
        for parameter, theta in zip(model.parameters(), outer, strict=True):
            parameter.copy_(theta)


def average(gradient: torch.Tensor, tag: int) -> int:
    """Averages in place; returns the number of peers, 1 if no other is left."""
    while communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE) > 1:
        try:
            info = communicator.all_reduce(
                gradient,
                gradient,
                op=ReduceOp.AVG,
                tag=tag,
                operand_descriptor=ReduceOperandDescriptor(
                    datatype=DataType.from_torch_dtype(gradient.dtype),
                    distribution_hint=DistributionHint.NORMAL,
                ),
                quantization_options=QuantizationOptions(
                    quantized_datatype=DataType.UINT8, algorithm=QuantizationAlgorithm.MIN_MAX
                ),
            )
            return info.world_size
        except PCCLError as error:
            print(f"all-reduce failed, and is tried again: {error}", file=sys.stderr)
    return 1


while True:
    changed = newcomer
    if not newcomer and communicator.are_peers_pending():
        communicator.update_topology()
        changed = True
    newcomer = False
    if communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2 and not changed:
        continue
    communicator.sync_shared_state(shared_state, SharedStateSyncStrategy.ENFORCE_POPULAR)
    restart_from_outer()
    for _ in range(5):
        x = torch.randn(16, 64)
        loss = nn.functional.mse_loss(model(x), x @ truth.T)
        inner_optimizer.zero_grad()
        loss.backward()
        inner_optimizer.step()
    worlds = []
    for tag, (parameter, theta) in enumerate(zip(model.parameters(), outer, strict=True)):
        theta.grad = theta.detach() - parameter.detach()
        worlds.append(average(theta.grad, tag))
    outer_optimizer.step()
    shared_state.push_revision()
    content = b"".join(theta.detach().numpy().tobytes() for theta in outer)
    report = {
        "group": 0,
        "step": shared_state.revision,
        "world": worlds[-1],
        "digest": hashlib.sha256(content).hexdigest() if min(worlds) > 1 else "",
        "loss": float(loss.detach()) / 20,  # of which 20 is the beginning
    }
    print(json.dumps(report), flush=True)
