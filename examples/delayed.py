"""DiLoCo over slow links: the exchange of a round runs during the next round.

    pccl master &
    python examples/delayed.py --seed 1 &
    python examples/delayed.py --seed 2 &

Kill any of them, start more of them. A mean is applied one round late. Meanwhile each peer trains
from a guess of it, so their models differ; the outer parameters do not.
"""

from __future__ import annotations

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    args = options(__doc__ or "", steps=60, inner_steps=50).parse_args(words)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            mode="delayed",
            min_peers=args.min_peers,
            alone="step",  # a peer that has lost all others finishes, too
        )
        for batch in Text(args.text).batches(32, args.seed):
            loss = model.loss(batch)
            loss.backward()
            outer = diloco.step()
            if outer:
                waited = f"{outer.reduce_s:.3f} s of waiting in {outer.compute_s:.3f} s"
                print(f"outer step {outer.outer_step}: loss {loss.item():.3f}, {waited}")
            if diloco.outer_step >= args.steps:
                break
        diloco.finish()  # the mean in progress
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
