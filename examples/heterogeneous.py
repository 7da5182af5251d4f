"""DiLoCo between different machines: each takes as many steps as it can in the same time.

    pccl master &
    python examples/heterogeneous.py --seed 1 --batch 64 &
    python examples/heterogeneous.py --seed 2 --batch 16 &

Each trains for `--inner-seconds` with its own batch size. The mean weighs each peer's progress by
its number of samples. Kill any of them, or start more.
"""

from __future__ import annotations

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    parser = options(__doc__ or "", steps=60, batch=32)
    parser.add_argument("--inner-seconds", type=float, default=2.0, help="between outer steps")
    args = parser.parse_args(words)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_seconds=args.inner_seconds,
            weight="samples",
            min_peers=args.min_peers,
            alone="step",  # a peer that has lost all others finishes, too
        )
        for batch in Text(args.text).batches(args.batch, args.seed):
            loss = model.loss(batch)
            loss.backward()
            outer = diloco.step(samples=len(batch))
            if outer:
                steps = ", ".join(str(peer.inner_steps) for peer in outer.peers)
                print(f"outer step {outer.outer_step}: loss {loss.item():.3f}, {steps} inner steps")
            if diloco.outer_step >= args.steps:
                break
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
