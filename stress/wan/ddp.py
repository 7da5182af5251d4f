"""Trains by DistributedDataParallel over an emulated long link, beside gloo. Needs Linux and root.

    python stress/wan/ddp.py [--mbit 1000] [--rtt-ms 50] [--peers 2] [--json FILE] [-- OPTIONS]

The options are those of `pccl bench ddp`, for example `-- --wire int8 -n 10`. Each peer is a host,
and the master is one that is as far from all of them as they are from each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from network import Link, kind, network

PORT = 48148


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each link")
    parser.add_argument("--rtt-ms", type=int, default=50, help="round trip between any two hosts")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--timeout-s", type=float, default=540)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of `pccl bench ddp`")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    link = Link(args.mbit, args.rtt_ms)
    options = args.options[args.options[:1] == ["--"] :]
    hosts = [f"peer{number}" for number in range(args.peers)]
    print(f"# {link}, by {kind()}", flush=True)
    with network(link, ["master", *hosts]) as net:
        address = f"{net.addresses['master']}:{PORT}"
        command = [sys.executable, "-m", "pccl"]
        master = net.popen("master", [*command, "master", "--listen-address", address])
        command += ["bench", "ddp", "--peers", str(args.peers), "--master", address]
        command += ["--threads", "1", *options]  # the hosts share this machine's cores
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wan0"}
        peers = []
        for host in hosts:
            first = host == hosts[0]
            more = ["--json", str(args.json)] if first and args.json else []
            out = None if first else subprocess.DEVNULL  # all of them print the same
            peers.append(net.popen(host, [*command, *more], stdout=out, env=environment))
        failed = max(abs(peer.wait(args.timeout_s)) for peer in peers)
        master.terminate()
        master.wait()
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
