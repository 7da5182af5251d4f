"""DiLoCo that outlives all its peers: each regularly saves a file, and begins with it.

    pccl master &
    python examples/resume.py /tmp/first --seed 1 &
    python examples/resume.py /tmp/second --seed 2 &

Kill all of them, and start the same, a larger or a smaller number: they continue from the latest
file. With a directory that all peers share, they write one checkpoint together, in the background:

    python examples/resume.py --together /shared/run1 --seed 1 &
    python examples/resume.py --together /shared/run1 --seed 2 &
"""

from __future__ import annotations

from pathlib import Path

import torch
from language import Model, Text, options

import pccl
from pccl.diloco import Checkpoints, DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    parser = options(__doc__ or "", steps=60, inner_steps=50, save_every=5)
    parser.add_argument("file", type=Path, nargs="?", help="of this peer")
    parser.add_argument("--together", type=Path, metavar="DIR", help="of all peers")
    args = parser.parse_args(words)
    together = Checkpoints(args.together, every=args.save_every) if args.together else None
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pccl.Communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            min_peers=args.min_peers,
            alone="step",
            state=args.file if args.file and args.file.exists() else None,
            checkpoints=together,  # a new run begins with the latest file
        )
        print(f"begins at outer step {diloco.outer_step}", flush=True)
        seed = args.seed + 1000 * diloco.outer_step  # does not repeat the first samples
        for batch in Text(args.text).batches(32, seed):
            if diloco.outer_step >= args.steps:
                break
            loss = model.loss(batch)
            loss.backward()
            outer = diloco.step()
            if outer and outer.outer_step % args.save_every == 0:
                if args.file:
                    diloco.save(args.file)  # atomic
                print(f"outer step {outer.outer_step}: loss {loss.item():.3f}, saved", flush=True)
        diloco.finish()  # waits for the checkpoint in progress
        comm.finish()
        print(f"shared state: {diloco.state_digest()}", flush=True)


if __name__ == "__main__":
    main()
