"""Measures all-reduce between two hosts over emulated long links. Needs Linux and root.

    python stress/wan/bench.py [--bytes 67108864] [--iterations 7] [--links 0 1 2]
                               [--ways pccl pccl-int8 tcp gloo] [--scale 4] [--plot FILE.svg]

The bound is bytes / rate + 2 round trips; the master is as far from both peers as they are from
each other. Times are of the slower peer; `tcp` is one connection that carries as many bytes both
ways. `--scale 4` is for machines whose processors do not keep up with 1 Gbit/s: with a quarter of
the bytes over links with a quarter of the rate, of the buffers and of the windows that losses
allow, the bound is the same, and a quarter of the packets travel. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from network import Link, kind, network, reports

LINKS = (
    Link(1000, 1),
    Link(1000, 50),
    Link(1000, 100),
    Link(1000, 200),
    Link(1000, 100, 0.01),
    Link(500, 100),
    Link(100, 100),
    Link(250, 100, 0.05),  # to windows what 0.01 % are at 1 Gbit/s, but the emulator keeps up
)
WAYS = {  # and what the plot calls them
    "pccl": "pccl, fp32",
    "pccl-int8": "pccl, int8",
    "pccl-16": "pccl, 16 at once",
    "tcp": "one TCP connection",
    "gloo": "gloo",
}
PORT = 48148


def measure(link: Link, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each iteration of each way, those of the slower peer."""
    with network(link, ["master", "a", "b"]) as net:
        address = f"{net.addresses['master']}:{PORT}"
        python = sys.executable
        master = net.popen("master", [python, "-m", "pccl.master", "--listen-address", address])
        peers = {}
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
            peers[host] = net.popen(host, argv, stdout=subprocess.PIPE)
        results = reports(peers, args.timeout)
        master.terminate()
        master.wait()
    return {
        way: [max(pair) for pair in zip(*(r[way] for r in results), strict=True)]
        for way in args.ways
    }


def plot(path: Path, nbytes: int, measured: dict[Link, dict[str, list[float]]]) -> None:
    """How many Mbit/s of fp32 each way reduces over each link, and what the link carries."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(11, 4.2))
    ways = list(next(iter(measured.values())))
    for number, way in enumerate(ways):
        rates = [nbytes * 8e-6 / median(times[way]) for times in measured.values()]
        at = [place + 0.8 * number / len(ways) for place in range(len(measured))]
        axes.bar(at, rates, 0.8 / len(ways), align="edge", label=WAYS[way])
    for place, link in enumerate(measured):
        bound = nbytes * 8e-6 / link.bound_s(nbytes)
        axes.hlines(bound, place, place + 0.8, "black", label="" if place else "bound of fp32")
    axes.set_xticks([place + 0.4 for place in range(len(measured))], map(str, measured), fontsize=7)
    axes.set(ylabel=f"Mbit/s, {nbytes >> 20} MiB of fp32", yscale="log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=0, help="0: automatic")
    parser.add_argument("--scale", type=int, default=1, help="divides bytes and the links' rates")
    parser.add_argument("--links", type=int, nargs="+", default=range(len(LINKS)))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["pccl"])
    parser.add_argument("--plot", type=Path, help="an image to draw")
    parser.add_argument("--timeout", type=float, default=300)
    args = parser.parse_args()
    args.bytes //= args.scale
    print(
        f"{args.bytes} bytes, float, 2 peers, {kind()}; median (min) in s, times the bound",
        flush=True,
    )
    measured = {}
    for number in args.links:
        link = LINKS[number].scaled(args.scale)
        measured[link] = measure(link, args)
        bound = link.bound_s(args.bytes)
        row = [f"{link!s:28} bound {bound:7.3f}"]
        for way, times in measured[link].items():
            row.append(
                f"{way} {median(times):7.3f} ({min(times):.3f}) x{median(times) / bound:.2f}"
            )
        print("  ".join(row), flush=True)
    if args.plot:
        plot(args.plot, args.bytes, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
