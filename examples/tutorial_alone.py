"""The tutorial's first step: one process trains the model.

python examples/tutorial_alone.py
"""

from __future__ import annotations

import argparse

import torch
from tutorial_gpt import GPT, Text, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT in one process.")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the model is small
    text, model = Text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, args.steps + 1):
        model.loss(text.batch(16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: validation loss {evaluate(model, text):.3f}", flush=True)


if __name__ == "__main__":
    main()
