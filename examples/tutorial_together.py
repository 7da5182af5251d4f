"""The tutorial's second step: any number of processes train the model, and any may be killed.

pccl run -n 4 -- python examples/tutorial_together.py --output tutorial.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from tutorial_gpt import GPT, Text, evaluate

import pccl
from pccl.diloco import DiLoCo


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT in many processes.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--min-peers", type=int, default=2, help="peers before the first step")
    parser.add_argument("--output", type=Path, help="where to save the model")
    args = parser.parse_args()

    torch.seed()  # each peer draws its own samples
    torch.set_num_threads(1)
    text, model = Text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with pccl.Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148")) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=20,  # from one average to the next
            min_peers=args.min_peers,
            alone="step",  # a peer that has lost all others goes on
        )
        while diloco.outer_step < args.rounds:
            model.loss(text.batch(16)).backward()
            outer = diloco.step()  # steps the optimizer; every 20th time it averages the models
            if outer:
                loss = evaluate(model, text)
                peers = outer.contributors
                print(f"round {outer.outer_step}: {peers} peers, loss {loss:.3f}", flush=True)
        if args.output and comm.rank == 0:  # all peers have the same weights
            torch.save(model.state_dict(), args.output)
        comm.finish()  # a peer that is started again after this ends at once


if __name__ == "__main__":
    main()
