"""Measures the transfer of shared state to a newcomer over emulated long links. Needs Linux, root.

    python stress/wan/state.py [--bytes 268435456] [--iterations 3] [--cases 0 1 2]

The shares of holders exceed 1 where a late answer was requested again from another one.
The links of the holders limit the rate; the newcomer's own link is faster. The minimum is the bytes
over the sum of the holders' rates. Each iteration is a new run with new processes, so connections
are as cold as a newcomer's. The time is that of `sync_shared_state` on the newcomer, including the
hashing of its own content.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from network import Link, kind, network, run_script

import pccl

FAST_MBIT = 2000  # of hosts that are no holders


@dataclass(frozen=True)
class Case:
    """Rates of the holders' links in Mbit/s, and the round trip and loss between any two hosts."""

    mbits: tuple[int, ...]
    rtt_ms: int
    loss: float = 0.0

    def __str__(self) -> str:
        rates = " + ".join(map(str, self.mbits))
        return f"{rates} Mbit/s, {self.rtt_ms} ms, {self.loss:g} %"


CASES = (
    Case((200, 200), 1),
    Case((200, 200), 50),
    Case((200, 200), 100),
    Case((300, 100), 50),
    Case((200, 200), 50, 0.01),
    Case((100, 100, 100, 100), 50),
    Case((400,), 50),
)


def measure(case: Case, nbytes: int, timeout: float) -> tuple[float, list[int]]:
    """The seconds of a transfer, and the bytes from each holder."""
    holders = [f"h{i}" for i in range(len(case.mbits))]
    slow = dict(zip(holders, case.mbits, strict=True))
    link, hosts = Link(FAST_MBIT, case.rtt_ms, case.loss), [*holders, "new"]
    with network(link, ["master", *hosts], slow) as net:
        jobs = {host: {"peers": len(hosts), "bytes": nbytes, "host": host} for host in hosts}
        *given, came = net.play(__file__, jobs, timeout, wait=False)
    assert came["rx"] == nbytes  # holders may have given more: late requests are repeated
    assert sum(one["tx"] for one in given) >= nbytes
    return came["s"], [one["tx"] for one in given]


def peer(job: dict[str, Any]) -> None:
    """One host's process; prints a JSON object."""
    nbytes, size = job["bytes"], job["peers"]
    expected = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
    own = ~expected if job["host"] == "new" else expected.copy()
    shared = pccl.SharedState.from_tensors(
        {f"entry {i}": part for i, part in enumerate(np.array_split(own, 16))}
    )
    shared.revision = int(job["host"] != "new")
    with pccl.Communicator(job["master"]) as comm:
        comm.wait_for_peers(size)
        comm.barrier()
        began = time.perf_counter()
        info = comm.sync_shared_state(shared)
        elapsed = time.perf_counter() - began
    np.testing.assert_array_equal(own, expected)
    print(json.dumps({"s": elapsed, "tx": info.tx_bytes, "rx": info.rx_bytes}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)))
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args.peer)
        return 0
    print(f"{args.bytes} bytes to a newcomer, {kind()}; median (min) in s", flush=True)
    for number in args.cases:
        case = CASES[number]
        mbit = sum(case.mbits)
        found = [measure(case, args.bytes, args.timeout) for _ in range(args.iterations)]
        times = [seconds for seconds, _ in found]
        rate = args.bytes * 8e-6 / median(times)
        given = zip(*(each for _, each in found), strict=True)
        shares = ", ".join(f"{median(each) / args.bytes:.0%}" for each in given)
        print(
            f"{case!s:42} {median(times):6.2f} ({min(times):.2f})  {rate:4.0f} Mbit/s, "
            f"{rate / mbit:.2f} of the sum; shares {shares}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run_script(main)
