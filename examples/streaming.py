"""DiLoCo without pauses or peaks: one part of the model after the other, while all of it trains.

    pccl master &
    python examples/streaming.py --seed 1 &
    python examples/streaming.py --seed 2 &

Every inner_steps / fragments steps, one fragment is sent in 4 bits a number. Its mean is applied
`overlap` steps later, which is the time that the exchange may take (arXiv 2501.18512). What a peer
has learned meanwhile stays.
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
        diloco.finish()  # the mean that is under way
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
