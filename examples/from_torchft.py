"""Data-parallel training with peers that come and go, for comparison with torchft: see
docs/howto/migrate/torchft.md.

    pccl master &
    python examples/from_torchft.py --seed 1 &
    python examples/from_torchft.py --seed 2 &
    python examples/from_torchft.py --seed 3 &

Kill any of them, start more of them. A newcomer gets the weights, the optimizer's state and the
step; all peers that print the same step have the same weights.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import pccl


def allocate_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Allocates the optimizer's tensors, which it creates in its first step, by a step of zeros."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        f"optimizer.{index}.{key}": tensor
        for index, state in enumerate(optimizer.state.values())
        for key, tensor in state.items()
    }


def average(comm: pccl.Communicator, gradients: dict[str, torch.Tensor]) -> int:
    """Averages over all peers, or over the survivors of a loss; returns their number."""
    while True:
        try:
            return comm.all_reduce(gradients).world_size
        except pccl.PeerLostError:
            pass  # nothing has changed: repeat without it
        except pccl.TooFewPeersError:
            return 1


def main() -> None:
    """Trains until the run has taken `--steps` steps."""
    parser = argparse.ArgumentParser(description="Elastic gradient averaging.")
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument("--min-peers", type=int, default=2, help="peers that the run waits for")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1, help="of the model's output")
    parser.add_argument("--seed", type=int, default=0, help="of this peer's data")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = nn.Linear(8, args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = torch.zeros(1, dtype=torch.int64)
    shared = pccl.SharedState.from_tensors(
        {"step": step, **model.state_dict(), **allocate_state(optimizer)}
    )
    with pccl.Communicator(args.master_address) as comm:
        comm.sync_shared_state(shared, min_peers=args.min_peers)  # newcomers meet admit() below
        while step < args.steps:
            inputs = torch.randn(32, 8)
            loss = nn.functional.mse_loss(
                model(inputs), inputs.sum(1, keepdim=True).expand(-1, args.width)
            )
            optimizer.zero_grad()
            loss.backward()
            peers = average(comm, {name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            step += 1
            if step % 10 == 0:
                weights = sum(p.sum().item() for p in model.parameters())
                print(f"step {step.item()}: {peers} peers, weights {weights!r}", flush=True)
            shared.push_revision()
            comm.admit(shared)
        comm.finish()


if __name__ == "__main__":
    main()
