"""DiLoCo in one file: peers that come and go learn one function together.

    python -m pccl.master &
    python examples/diloco.py --seed 1 &
    python examples/diloco.py --seed 2 &

Kill any of them, start more of them, whenever you like: the others notice within moments, and a
newcomer goes on from where they are. All of them end with the same weights, to the last bit.
"""

from __future__ import annotations

import argparse
import os
from typing import get_args

import torch
from torch import nn

import pccl
from pccl.diloco import DiLoCo, Mode, Wire


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a square and what is to be learnt about them: (size, 2) and (size, 1)."""
    points = 4 * torch.rand(size, 2, generator=generator) - 2
    return points, torch.sin(3 * points[:, :1]) * torch.cos(2 * points[:, 1:])


def main() -> None:
    """Trains until the run has taken `--steps` outer steps."""
    parser = argparse.ArgumentParser(description="DiLoCo on a toy problem.")
    parser.add_argument(
        "--master-address",
        default=os.environ.get("PCCL_MASTER", "127.0.0.1:48148"),
        metavar="HOST:PORT",
        help="of the master (default: PCCL_MASTER, or %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=60, help="outer steps of the run")
    parser.add_argument("--inner-steps", type=int, default=50, help="inner steps in each of them")
    parser.add_argument("--min-peers", type=int, default=2, help="wait for so many peers to begin")
    parser.add_argument("--mode", default="sync", choices=get_args(Mode), help="of the exchange")
    parser.add_argument("--wire", default="fp32", choices=get_args(Wire), help="what is sent")
    parser.add_argument("--seed", type=int, default=0, help="of this peer's weights and data")
    args = parser.parse_args()

    # The seed, hence the initial weights and the data, may differ on every peer: the first of a run
    # gives its weights to the others.
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            min_peers=args.min_peers,
            mode=args.mode,
            wire=args.wire,
            alone="step",  # who has lost all others comes to the end too
        )
        while diloco.outer_step < args.steps:
            points, values = batch(256, generator)
            loss = nn.functional.mse_loss(model(points), values)
            loss.backward()
            outer = diloco.step()
            if outer:
                print(
                    f"outer step {outer.outer_step}: loss {loss.item():.4f}, "
                    f"mean of {outer.contributors} peers, {outer.tx_bytes} bytes sent",
                    flush=True,
                )
        diloco.finish()  # what is still under way, in other modes than "sync"
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
