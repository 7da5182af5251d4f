"""Measures what concurrent collectives do to each other, on this machine over loopback.

    python stress/sharing.py [--iterations 7]

One 64 MiB all-reduce takes turns with sixteen of 4 MiB at once, and with itself beside a thread
in each peer that is busy in Python, with Python's usual switch interval of 5 ms and with a shorter
one; then beside as many busy processes, which take the processors but not Python's lock. A 4 KiB
one is timed alone and beside one of 256 MiB; forty are launched in opposite orders. The exit code
is 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
from numpy.typing import NDArray

import pccl

MIB = 1 << 20
PARTS = 16
TAGS = 40
LATE_S = 300.0  # nothing here takes so long
SUM = pccl.ReduceOp.SUM

Floats = NDArray[np.float32]


class Peer:
    """One of the two processes."""

    def __init__(self, comm: pccl.Communicator, number: int) -> None:
        self.comm = comm
        self.number = number
        self.times_s: dict[str, list[float]] = {}

    def launch(self, x: Floats, y: Floats, tag: int) -> pccl.AsyncReduceHandle:
        """An all-reduce in the background."""
        return self.comm.all_reduce_async(x, y, op=SUM, tag=tag)

    def reduce(self, x: Floats, y: Floats, tag: int) -> None:
        """An all-reduce that may not fail."""
        self.comm.all_reduce(x, y, op=SUM, tag=tag, timeout=LATE_S)

    def timed(self, name: str, do: Callable[[], object]) -> None:
        """Both meet, then do it; the time is kept under the name."""
        self.reduce(np.zeros(1, np.float32), np.zeros(1, np.float32), 0)
        began = time.perf_counter()
        do()
        self.times_s.setdefault(name, []).append(time.perf_counter() - began)

    def sixteen(self, x: Floats, y: Floats) -> None:
        """The same bytes in sixteen collectives at once."""
        pairs = zip(np.array_split(x, PARTS), np.array_split(y, PARTS), strict=True)
        handles = [self.launch(a, b, 100 + tag) for tag, (a, b) in enumerate(pairs)]
        for handle in handles:
            wait(handle)

    def beside(self, large: Floats, result: Floats) -> None:
        """Small ones, one after the other, while a large one is under way at both peers."""
        small = np.ones(1024, np.float32)
        handle = self.launch(large, result, 500)
        for _ in range(20):
            began = time.perf_counter()
            self.reduce(small, np.zeros_like(small), 501)
            self.times_s.setdefault("4 KiB beside 256 MiB", []).append(time.perf_counter() - began)
        wait(handle)

    def opposite(self) -> bool:
        """Forty collectives, the one peer's last being the other's first. Whether all are right."""
        tags = range(TAGS) if self.number == 0 else range(TAGS - 1, -1, -1)
        inputs = {tag: np.full(10_000 + tag, tag, np.float32) for tag in tags}
        results = {tag: np.zeros_like(x) for tag, x in inputs.items()}
        handles = [self.launch(x, results[tag], 1000 + tag) for tag, x in inputs.items()]
        for handle in handles:
            wait(handle)
        return all((y == 2 * tag).all() for tag, y in results.items())


def wait(handle: pccl.AsyncReduceHandle) -> None:
    """The end of a collective that may not fail."""
    ok, status, _ = handle.wait(timeout=LATE_S)
    if not ok:
        raise RuntimeError(f"an all-reduce failed with status {status}")


def busy(stop: threading.Event) -> None:
    """Keeps Python's lock as busy as a thread can."""
    number = 0
    while not stop.is_set():
        for _ in range(10_000):
            number += 1


@contextlib.contextmanager
def busy_thread(switch_s: float) -> Iterator[None]:
    """A busy thread of this process, which gives Python's lock away after `switch_s`."""
    usual_s = sys.getswitchinterval()
    stop = threading.Event()
    thread = threading.Thread(target=busy, args=(stop,))
    sys.setswitchinterval(switch_s)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(usual_s)


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A busy process; when this begins, it is."""
    argv = [sys.executable, "-Sc", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


BESIDE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "Python, 5 ms": partial(busy_thread, 5e-3),
    "Python, 0.5 ms": partial(busy_thread, 5e-4),
    "a busy process": busy_process,
}


def serve(number: int, address: str, iterations: int, report: Connection) -> None:
    """The life of one process; reports (all results right, times)."""
    x = np.arange(16 * MIB, dtype=np.float32) % 97
    y = np.zeros_like(x)
    large, result = np.ones(64 * MIB, np.float32), np.zeros(64 * MIB, np.float32)
    right = True
    with pccl.Communicator(address) as comm:
        comm.wait_for_peers(2)
        peer = Peer(comm, number)
        for _ in range(2 + iterations):
            peer.timed("64 MiB", lambda: peer.reduce(x, y, 1))
            right &= bool((y == 2 * x).all())
            y[:] = 0
            peer.timed("16 x 4 MiB", lambda: peer.sixteen(x, y))
            right &= bool((y == 2 * x).all())
            for name, busy_one in BESIDE.items():
                with busy_one():
                    peer.timed(f"64 MiB beside {name}", lambda: peer.reduce(x, y, 1))
            peer.timed("4 KiB", lambda: peer.reduce(x[:1024], y[:1024], 2))
            peer.timed("256 MiB with 4 KiB ones", lambda: peer.beside(large, result))
            peer.timed("256 MiB", lambda: peer.reduce(large, result, 3))
        right &= peer.opposite()
    report.send((right, peer.times_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=7)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with pccl.MasterNode("127.0.0.1:0") as master:
        ends, processes = [], []
        for number in range(2):
            end, other = context.Pipe(duplex=False)
            process = context.Process(
                target=serve, args=(number, master.address, args.iterations, other), daemon=True
            )
            process.start()
            other.close()  # the process has its own, so that its end is the end of the pipe
            ends.append(end)
            processes.append(process)
        reports = [end.recv() for end in ends]
        for process in processes:
            process.join()
    print(f"{'2 peers, loopback':30}{'median':>10}{'min':>10}  ms")
    for name in reports[0][1]:
        times = [max(pair) for pair in zip(*(times[name] for _, times in reports), strict=True)]
        times = times[2 * len(times) // (2 + args.iterations) :]
        print(f"{name:30}{1e3 * median(times):10.2f}{1e3 * min(times):10.2f}")
    right = all(right for right, _ in reports)
    print("all results right, forty launched in opposite orders too" if right else "WRONG RESULTS")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
