"""Runs `pccl bench` on hosts with an emulated long link between any two. Linux, root.

    python stress/wan/bench.py --mbit 1000 --rtt-ms 100 -- all_reduce -b 64M -e 64M --quantize int8
    python stress/wan/bench.py --peers 4 -- ddp --wire int8 -n 10

Each peer has its own host, and so has the master; all hosts are equally far from each other. The
time of an all-reduce is also given as a multiple of the minimum: bytes / rate + 2 round trips.
`--scale 4` is for machines whose processors do not keep up with 1 Gbit/s: it divides the rate, the
buffers and the windows that losses allow by four. Give a quarter of the bytes, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from network import Link, kind, network, run_script


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--mbit", type=int, default=1000, help="rate of each link (%(default)s)")
    made.add_argument("--rtt-ms", type=int, default=50, help="of any two hosts (%(default)s)")
    made.add_argument("--loss", type=float, default=0.0, help="of packets, in percent")
    made.add_argument("--scale", type=int, default=1, help="divides the rate of the link")
    made.add_argument("--peers", type=int, default=2)
    made.add_argument("--timeout-s", type=float, default=540)
    made.add_argument("command", nargs=argparse.REMAINDER, help="WHAT and options of `pccl bench`")
    return made


def main() -> int:
    args = parser().parse_args()
    link = Link(args.mbit, args.rtt_ms, args.loss).scaled(args.scale)
    what = args.command[args.command[:1] == ["--"] :] or ["all_reduce"]
    hosts = [f"peer{number}" for number in range(args.peers)]
    print(f"# {link}, by {kind()}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        network(link, ["master", *hosts]) as net,
        net.master() as address,
    ):
        results = Path(folder, "results.json")
        command = [sys.executable, "-m", "pccl", "bench", *what]
        command += ["--peers", str(args.peers), "--master", address]
        command += ["--threads", "1"] * (what[0] == "ddp")  # the hosts share this machine's cores
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wan0"}
        peers = []
        for host in hosts:
            first = host == hosts[0]
            more = ["--json", str(results)] * first
            out = None if first else subprocess.DEVNULL  # all of them print the same
            peers.append(net.popen(host, [*command, *more], stdout=out, env=environment))
        failed = max(abs(peer.wait(args.timeout_s)) for peer in peers)
        if what[0] == "all_reduce" and not failed:
            for row in json.loads(results.read_text(encoding="utf-8"))["results"]:
                bound_s = link.bound_s(row["size"])
                share = row["in_place"]["time"] * 1e-6 / bound_s
                print(f"# {row['size']} bytes: {share:.2f} times the minimum, {bound_s:.3f} s")
    return min(1, failed)


if __name__ == "__main__":
    run_script(main)
