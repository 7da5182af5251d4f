"""DiLoCo without pauses or peaks: it exchanges one part of the model at a time, during training.

    pccl master &
    python examples/streaming.py --seed 1 &
    python examples/streaming.py --seed 2 &

Every inner_steps / fragments steps, each peer sends one fragment, with 4 bits per number. The mean
is applied `overlap` steps later, which is the time for the exchange (arXiv 2501.18512). A peer
keeps its progress since then.
"""

from __future__ import annotations

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until every fragment of the run has taken `--steps` outer steps."""
    args = options(__doc__ or "", steps=60, inner_steps=50, overlap=5).parse_args(words)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            mode="streaming",
            fragments=3,
            overlap=args.overlap,
            wire="e3m0",
            outer_lr=0.4,
            min_peers=args.min_peers,
            alone="step",  # a peer that has lost all others finishes, too
        )
        for batch in Text(args.text).batches(32, args.seed):
            loss = model.loss(batch)
            loss.backward()
            outer = diloco.step()
            if outer:
                fragment = f"fragment {outer.fragment}: {outer.tx_bytes} bytes sent"
                print(f"outer step {outer.outer_step}, loss {loss.item():.3f}, {fragment}")
            if diloco.outer_step >= args.steps:
                break
        diloco.finish()  # the mean in progress
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
