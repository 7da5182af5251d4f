"""DiLoCo with hundreds of times fewer bytes: each round sends the 64 largest of 4,096 numbers.

    pccl master &
    python examples/sparse.py --seed 1 &
    python examples/sparse.py --seed 2 &

These are the settings of SparseLoCo (arXiv 2508.15706): the rest stays with this peer for later
rounds, and takes the place of the outer momentum.
"""

from __future__ import annotations

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    args = options(__doc__ or "", steps=60, inner_steps=30).parse_args(words)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            wire="sparse",
            outer_lr=1.0,
            outer_momentum=0.0,
            min_peers=args.min_peers,
            alone="step",
        )
        for batch in Text(args.text).batches(32, args.seed):
            loss = model.loss(batch)
            loss.backward()
            outer = diloco.step()
            if outer:
                share = outer.tx_bytes / diloco.parameter_bytes
                print(f"outer step {outer.outer_step}: loss {loss.item():.3f}, sent {share:.2%}")
            if diloco.outer_step >= args.steps:
                break
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
