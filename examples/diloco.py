"""DiLoCo: peers that come and go learn a text together.

    pccl master &
    python examples/diloco.py --seed 1 &
    python examples/diloco.py --seed 2 &

Kill any of them, or start more, at any time: the others notice within moments, and a newcomer
continues where they are. All of them end with the same weights, to the last bit.
"""

from __future__ import annotations

from typing import get_args

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import DiLoCo, Mode, Wire


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    parser = options(__doc__ or "", steps=60, inner_steps=50)
    parser.add_argument("--mode", default="sync", choices=get_args(Mode), help="of the exchange")
    parser.add_argument("--wire", default="fp32", choices=get_args(Wire), help="what is sent")
    args = parser.parse_args(words)

    # The seed, and so the initial weights and the data, may differ on every peer: the first peer of
    # a run gives its weights to the others.
    torch.manual_seed(args.seed)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Text(args.text).batches(32, args.seed)

    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            min_peers=args.min_peers,
            mode=args.mode,
            wire=args.wire,
            alone="step",  # a peer that has lost all others finishes, too
        )
        while diloco.outer_step < args.steps:
            loss = model.loss(next(batches))
            loss.backward()
            outer = diloco.step()
            if outer:
                print(
                    f"outer step {outer.outer_step}: loss {loss.item():.4f}, "
                    f"mean of {outer.contributors} peers, {outer.tx_bytes} bytes sent",
                    flush=True,
                )
        diloco.finish()  # applies the mean in progress, in modes other than "sync"
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
