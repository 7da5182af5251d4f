"""Measures optimize_topology on a mesh with one slow pair. Needs Linux, root and wanem.

    python stress/wan/topology.py [--bytes 67108864] [--iterations 3] [--rtts 1 50 100]
                                  [--mbit 500] [--slow 50]

Hosts join in an order that makes neighbors of the slow pair, as the worst order does. Times are
those of the slowest peer. With the same rate for --mbit and --slow it is a mesh of equal links,
which share nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np
from network import Link, network, run_script

import pccl

HOSTS = ("a", "b", "c", "d")
SLOW = ("a", "b")


def measure(link: Link, slow_mbit: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The report of each host."""
    job = {"peers": len(HOSTS), "bytes": args.bytes, "iterations": args.iterations}
    jobs = {host: {**job, "size": size} for size, host in enumerate(HOSTS, 1)}
    with network(link, ["master", *HOSTS], between={SLOW: slow_mbit}) as net:
        return net.play(__file__, jobs, args.timeout, wait=True)


def peer(job: dict[str, Any]) -> None:
    """One host's process; prints a line when it is registered or accepted, and a JSON object."""
    comm = pccl.Communicator(job["master"])
    comm.connect(n_attempts=30)
    print(flush=True)
    comm.wait_for_peers(job["peers"])
    x = np.ones(job["bytes"] // 4, np.float32)

    def reduces() -> list[float]:
        times = []
        for _ in range(1 + job["iterations"]):
            comm.barrier()
            began_s = time.perf_counter()
            comm.all_reduce(x)
            times.append(time.perf_counter() - began_s)
        return times[1:]

    before, order_before = reduces(), comm.peers
    comm.barrier()
    began_s = time.perf_counter()
    comm.optimize_topology(timeout=60)
    optimize_s = time.perf_counter() - began_s
    after, order_after = reduces(), comm.peers
    report = {"before": before, "after": after, "optimize_s": optimize_s, "size": job["size"]}
    orders = [[text.split()[1] for text in order] for order in (order_before, order_after)]
    print(json.dumps({**report, "orders": orders}), flush=True)
    comm.barrier()
    comm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=500, help="of all links but one")
    parser.add_argument("--slow", type=int, default=50, help="Mbit/s of that one")
    parser.add_argument("--rtts", type=int, nargs="+", default=[1, 50, 100], help="ms")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(json.loads(args.peer))
        return 0
    for rtt_ms in args.rtts:
        link = Link(args.mbit, rtt_ms)
        found = measure(link, args.slow, args)
        times = {
            when: [max(one) for one in zip(*(f[when] for f in found), strict=True)]
            for when in ("before", "after")
        }
        was, now = ("-".join(order) for order in found[0]["orders"])
        before_s, after_s = median(times["before"]), median(times["after"])
        print(
            f"{link}, one pair at {args.slow} Mbit/s: {before_s:.2f} s ({was}), then "
            f"{after_s:.2f} s ({now}), {before_s / after_s:.1f} times as fast; optimizing took "
            f"{max(f['optimize_s'] for f in found):.2f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run_script(main)
