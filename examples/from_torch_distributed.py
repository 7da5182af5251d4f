"""Data-parallel training as with torch.distributed; see docs/howto/migrate/torch_distributed.md.

    pccl master &
    python examples/from_torch_distributed.py --seed 1 &
    python examples/from_torch_distributed.py --seed 2 &

All peers begin together. A peer that dies costs the others a retry.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import nn

import pccl


def with_survivors(call: Callable[[], object]) -> None:
    """Repeats a call without the peers that were lost in it."""
    while True:
        try:
            call()
            return
        except pccl.PeerLostError as error:
            print(f"again: {error}", flush=True)  # nothing has changed
        except pccl.TooFewPeersError:
            return  # all other peers are lost: the mean is this peer's own


def main() -> None:
    """Trains for a number of steps."""
    parser = argparse.ArgumentParser(description="Gradient averaging.")
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))  # of `pccl run` or torchrun
    parser.add_argument("--peers", type=int, default=local, help="that begin together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1, help="of the model's output")
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = nn.Linear(8, args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pccl.Communicator(args.master_address) as comm:
        comm.wait_for_peers(args.peers)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        with_survivors(lambda: comm.broadcast(parameters, root=0))
        for step in range(1, args.steps + 1):
            inputs = torch.randn(32, 8)
            loss = nn.functional.mse_loss(
                model(inputs), inputs.sum(1, keepdim=True).expand(-1, args.width)
            )
            optimizer.zero_grad()
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            with_survivors(lambda grads=gradients: comm.all_reduce(grads))
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        comm.finish()
        print(f"weights {sum(p.sum().item() for p in parameters.values())!r}", flush=True)


if __name__ == "__main__":
    main()
