"""The tutorial's last step: the trained model writes a text. It needs torch, but not pccl.

python examples/tutorial_generate.py tutorial.pt --prompt "The "
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tutorial_gpt import CONTEXT, GPT, decode, encode


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text with a model of the tutorial.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = GPT()
    model.load_state_dict(torch.load(args.model, weights_only=True))
    tokens = encode(args.prompt)
    for _ in range(args.tokens):
        logits = model(tokens[None, -CONTEXT:])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1)])
    print(decode(tokens))


if __name__ == "__main__":
    main()
