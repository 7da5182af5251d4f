"""Measures the distribution of weights over emulated long links. Needs Linux, root and torch.

    python stress/wan/weights.py [--followers 4] [--versions 12] [--mbit 100] [--rtt 40]

The versions are real: a GPT that learns Python by AdamW, with float32 weights of which bfloat16 is
published after each step, as in reinforcement learning. For each version: the bytes that the
trainer sends for a follower, and the seconds until the last follower has swapped it in. Beside
that, what it takes to send everything to everybody (`--whole` measures it), and what rsync's
algorithm sends: all blocks in which anything has changed, and the checksums of all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from network import Link, kind, network, reports, run_script

from pccl.weights import Publisher, Subscriber

RSYNC_BLOCK_MIN = 700  # bytes
RSYNC_CHECKSUM = 20  # bytes for each block, of the weak and the strong one
Weights = dict[str, np.ndarray]


# ---- versions ----


def trained(versions: int, rate: float, width: int) -> Iterator[Weights]:
    """The weights after each step, as the bits of bfloat16."""
    import torch

    from pccl.cli.demo.model import GPT, Corpus, Shape

    torch.manual_seed(1)
    model = GPT(Shape(width=width))
    corpus = Corpus(shard=0, shards=1, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(versions):
        optimizer.zero_grad()
        model(corpus.batch(16, 65)).backward()
        optimizer.step()
        state = model.state_dict().items()
        yield {k: v.bfloat16().view(torch.int16).numpy().view(np.uint16).copy() for k, v in state}


def rsync_bytes(old: Weights, new: Weights) -> int:
    """The bytes of rsync's algorithm: without moved data, it sends each block that has changed."""
    total = 0
    for name, array in new.items():
        block = max(RSYNC_BLOCK_MIN, int(math.sqrt(array.nbytes)))
        changed = (old[name] != array).reshape(-1).view(np.uint8).repeat(array.itemsize)
        starts = np.arange(0, array.nbytes, block)
        hit = np.add.reduceat(changed.astype(np.int64), starts) > 0
        sizes = np.minimum(block, array.nbytes - starts)
        total += int(sizes[hit].sum()) + RSYNC_CHECKSUM * len(starts)
    return total


# ---- the processes ----


def publish(address: str, folder: Path, seconds: float, whole: bool) -> None:
    files = sorted(folder.glob("*.npz"))
    parameters = dict(np.load(files[0]))
    told = []
    with ExitStack() as opened:
        for number, file in enumerate(files, 1):
            for name, array in np.load(file).items():
                parameters[name][...] = array
            if whole or number == 1:  # a new publisher begins with a whole version
                made = Publisher(address, parameters, connect_timeout=30)
                publisher = opened.enter_context(made)
            began_s = time.monotonic()
            done = publisher.publish(number)
            nbytes = done.whole_bytes if done.delta_bytes is None else done.delta_bytes
            told.append((began_s, time.monotonic() - began_s, nbytes))
            time.sleep(seconds * (3 if number == 1 else 1))
    json.dump(told, sys.stdout)


def follow(address: str, folder: Path, followers: int, patience: float) -> None:
    files = sorted(folder.glob("*.npz"))
    parameters = {name: np.zeros_like(array) for name, array in np.load(files[0]).items()}
    done: dict[int, float] = {}
    with Subscriber(address, parameters, connect_timeout=30) as subscriber:
        while subscriber.version < len(files):
            subscriber.wait(timeout=patience)
            done[subscriber.swap()] = time.monotonic()
        last = np.load(files[-1])
        assert all((parameters[name] == last[name]).all() for name in parameters)
        (folder / f"{os.getpid()}.done").touch()
        give_up_s = time.monotonic() + patience
        while len([*folder.glob("*.done")]) < followers:  # others may be fetching from this one
            if time.monotonic() > give_up_s:
                raise SystemExit(f"not all had the last version within {patience:g} s")
            time.sleep(0.05)
    json.dump(done, sys.stdout)


def measure(args: argparse.Namespace, folder: Path) -> None:
    hosts = [f"f{i}" for i in range(args.followers)]
    link = Link(args.mbit, args.rtt)
    own = [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder)]
    own += ["--followers", str(args.followers), "--seconds", str(args.seconds)]
    own += ["--whole"] if args.whole else []
    with (
        network(link, ["master", "trainer", *hosts]) as net,
        net.master(stdout=subprocess.DEVNULL) as address,
    ):
        words = [*own, "--address", address]
        started = {"trainer": net.popen("trainer", [*words, "--role", "publish"], stdout=-1)}
        for host in hosts:
            started[host] = net.popen(host, [*words, "--role", "follow"], stdout=-1)
        told, *followed = reports(started, args.timeout)
    report(link, told, followed, [dict(np.load(one)) for one in sorted(folder.glob("*.npz"))])


def report(link: Link, told: list, followed: list, versions: list[Weights]) -> None:
    nbytes = sum(array.nbytes for array in versions[0].values())
    everything_s = nbytes * 8 * len(followed) / (link.mbit * 1e6)
    print(f"{kind()}: {link}; {len(followed)} followers, {nbytes} bytes of weights")
    print("version  changed    bytes  rsync   seconds to the last follower, to the median one")
    for number, (began_s, _, sent) in enumerate(told, 1):
        late = [one[str(number)] - began_s for one in followed if str(number) in one]
        rsync, share = nbytes, 1.0
        if number > 1:
            old, new = versions[number - 2], versions[number - 1]
            rsync = rsync_bytes(old, new)
            count = sum(array.size for array in new.values())
            share = sum(int((old[k] != new[k]).sum()) for k in new) / count
        times = f"{max(late):8.3f} {median(late):8.3f}" if late else "skipped by all"
        print(f"{number:7} {share:8.2%} {sent:8} {rsync:8} {times}")
    print(f"everything to everybody takes one uplink at least {everything_s:.3f} s a version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--followers", type=int, default=4)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--width", type=int, default=384, help="of the GPT")
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--rtt", type=int, default=40, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two versions")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--whole", action="store_true", help="every version goes out whole")
    for hidden in ("--role", "--folder", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "publish":
        publish(args.address, Path(args.folder), args.seconds, args.whole)
    elif args.role == "follow":
        follow(args.address, Path(args.folder), args.followers, args.timeout)
    else:
        with tempfile.TemporaryDirectory() as folder:
            made = trained(args.versions, args.learning_rate, args.width)
            for number, weights in enumerate(made):
                np.savez(Path(folder, f"{number:04}.npz"), **weights)
            measure(args, Path(folder))


if __name__ == "__main__":
    run_script(main)
