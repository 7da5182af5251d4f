"""A trainer publishes its weights, and workers elsewhere follow, each at its own pace.

python examples/weights.py --master-address HOST:PORT --train
python examples/weights.py --master-address HOST:PORT          # any number, at any time
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pccl.weights import Publisher, Subscriber


def model(seed: int | None = None) -> dict[str, np.ndarray]:
    """The parameters; a follower's may hold anything at first."""
    draw = np.random.default_rng(seed)
    shapes = {"embedding": (1000, 64), "hidden": (64, 64), "bias": (64,)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def train(master: str, steps: int, seconds: float) -> None:
    parameters = model(seed=1)
    with Publisher(master, parameters) as publisher:
        for step in range(1, steps + 1):
            parameters["embedding"][step % 1000] *= 1.01  # a step of training
            time.sleep(seconds)
            published = publisher.publish(version=step)
            sent = published.delta_bytes or published.whole_bytes
            print(f"version {step}: {sent} bytes for each follower", flush=True)
        time.sleep(seconds)
        print(f"weights {sum(float(each.sum()) for each in parameters.values()):.6f}")


def follow(master: str, steps: int, patience: float) -> None:
    parameters = model()
    with Subscriber(master, parameters) as subscriber:
        while subscriber.version < steps:
            subscriber.wait(timeout=patience)
            version = subscriber.swap()  # between two pieces of its own work
            print(f"works with version {version}", flush=True)
        print(f"weights {sum(float(each.sum()) for each in parameters.values()):.6f}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master-address", default="127.0.0.1:48148")
    parser.add_argument("--train", action="store_true", help="publish; otherwise follow")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a version")
    args = parser.parse_args(words)
    if args.train:
        train(args.master_address, args.steps, args.seconds)
    else:
        follow(args.master_address, args.steps, args.patience)


if __name__ == "__main__":
    main()
