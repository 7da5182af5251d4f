"""Measures all-reduce between two hosts over emulated long links. Needs Linux and root.

    python stress/wan/bench.py [--bytes 67108864] [--iterations 7] [--links 0 1 2] [--ways pccl tcp]

The bound is bytes / rate + 2 round trips; the master is as far from both peers as they are from
each other. The ways take turns, iteration by iteration; times are of the slower peer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from network import Link, kind, network

LINKS = (
    Link(1000, 1),
    Link(1000, 50),
    Link(1000, 100),
    Link(1000, 200),
    Link(1000, 100, 0.01),
    Link(500, 100),
    Link(100, 100),
)
WAYS = ("pccl", "pccl-16", "tcp", "gloo")
PORT = 48148


def measure(link: Link, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each iteration of each way, those of the slower peer."""
    with network(link, ["master", "a", "b"]) as net:
        address = f"{net.addresses['master']}:{PORT}"
        python = sys.executable
        master = net.popen("master", [python, "-m", "pccl.master", "--listen-address", address])
        peers = []
        for number, (host, other) in enumerate((("a", "b"), ("b", "a"))):
            job = {
                "number": number,
                "master": address,
                "first": net.addresses["a"],
                "other": net.addresses[other],
                "bytes": args.bytes,
                "lanes": args.lanes,
                "ways": args.ways,
                "warmups": args.warmups,
                "iterations": args.iterations,
            }
            argv = [python, str(Path(__file__).with_name("peer.py")), json.dumps(job)]
            peers.append(net.popen(host, argv, stdout=subprocess.PIPE))
        results = [json.loads(peer.communicate(timeout=args.timeout)[0]) for peer in peers]
        master.terminate()
        master.wait()
    return {
        way: [max(pair) for pair in zip(*(r[way] for r in results), strict=True)]
        for way in args.ways
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=0, help="0: automatic")
    parser.add_argument("--links", type=int, nargs="+", default=range(len(LINKS)))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["pccl"])
    parser.add_argument("--timeout", type=float, default=300)
    args = parser.parse_args()
    print(
        f"{args.bytes} bytes, float, 2 peers, {kind()}; median (min) in s, times the bound",
        flush=True,
    )
    for number in args.links:
        link = LINKS[number]
        bound = link.bound_s(args.bytes)
        row = [f"{link!s:28} bound {bound:7.3f}"]
        for way, times in measure(link, args).items():
            row.append(
                f"{way} {median(times):7.3f} ({min(times):.3f}) x{median(times) / bound:.2f}"
            )
        print("  ".join(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
