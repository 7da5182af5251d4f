"""Looks for leaks: the memory of two peers and of a master over many small all-reduces.

    python stress/leaks.py [--collectives 100000] [--tags 1000]

Tags are used one after the other, so each is used many times. Memory is read at every tenth of the
way; the exit code is 1 when any process has grown by more than --limit KiB in the last half.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import pccl
from pccl.runtime.signals import ended_by, interrupt

STEPS = 10


def resident_kib() -> int:
    """Memory of this process that is in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise OSError("the system does not say how much memory a process has")


def descriptors() -> int:
    """Files and sockets that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def master(report: Connection) -> None:
    """Life of the master; answers every question with its memory."""
    with pccl.MasterNode("127.0.0.1:0") as node:
        report.send(node.address)
        while report.recv():
            report.send((resident_kib(), descriptors()))


def peer(address: str, collectives: int, tags: int, report: Connection) -> None:
    """Life of a peer; reports its memory at every step."""
    with pccl.Communicator(address) as comm:
        comm.wait_for_peers(2)
        for number in range(collectives):
            x = np.full(256, number % 1000, np.float32)
            comm.all_reduce(x, x, op=pccl.ReduceOp.SUM, tag=number % tags)
            assert x[0] == x[-1] == 2 * (number % 1000)
            if (number + 1) % (collectives // STEPS) == 0:
                report.send((resident_kib(), descriptors()))
                report.recv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--tags", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=512, help="KiB (%(default)s)")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")

    def start(life: object, *arguments: object) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=life, args=(*arguments, theirs), daemon=True).start()  # type: ignore[arg-type]
        theirs.close()
        return ours

    ends = [start(master)]
    address = ends[0].recv()
    ends += [start(peer, address, args.collectives, args.tags) for _ in range(2)]
    print("collectives      master      peer 0      peer 1   KiB (open files)")
    rows = []
    began = time.monotonic()
    for step in range(1, STEPS + 1):
        for end in ends[1:]:
            end.poll(None)
        ends[0].send(True)
        seen = [end.recv() for end in ends]
        rows.append([kib for kib, _ in seen])
        text = "".join(f"{kib:9} ({files})" for kib, files in seen)
        print(f"{step * args.collectives // STEPS:11}{text}", flush=True)
        for end in ends[1:]:
            end.send(True)
    print(f"{(time.monotonic() - began) / args.collectives * 1e3:.2f} ms for each")
    grown = [last - half for last, half in zip(rows[-1], rows[STEPS // 2 - 1], strict=True)]
    print("grown in the last half, KiB:", *grown)
    ends[0].send(False)
    return 1 if max(grown) > args.limit else 0


if __name__ == "__main__":
    with ended_by(interrupt):
        sys.exit(main())
