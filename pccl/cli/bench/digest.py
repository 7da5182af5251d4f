"""Measures the digest of shared state (XXH3-128 by leaves) against numpy's copy of the same memory.

GB/s count the bytes that are hashed, or copied, once. The digest, by one thread and by as many as
pccl would take, and the copy take turns, iteration by iteration; the table shows medians and, in
brackets, the fastest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pccl.cli.bench import options
from pccl.runtime.digest import digests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl bench digest`."""
    options.add_sizes(parser, "1M", "1G", 32)
    options.add_iterations(parser, 7, 2)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if the digests of one memory differ."""
    print(f"# {'size':>10}  {'one thread':>16}  {'threads':>16}  {'copy':>16}   ratio of medians")
    print(f"# {'(B)':>10}  {'(GB/s)':>16}  {'(GB/s)':>16}  {'(GB/s)':>16}  {'one':>6}  {'all':>6}")
    for nbytes in options.sizes(args):
        words = np.random.default_rng(nbytes).integers(0, 1 << 63, -(-nbytes // 8), np.int64)
        memory: NDArray[np.uint8] = words.view(np.uint8)[:nbytes]
        region = [(memory.ctypes.data, nbytes)]
        if digests(region, 1) != digests(region):
            print("# the digest depends on the number of threads")
            return 1
        calls: list[Callable[[], object]] = [
            partial(digests, region, 1),
            partial(digests, region),
            partial(np.copyto, np.zeros_like(memory), memory),
        ]
        one, several, copied = rates = _rates(calls, nbytes, args.iters, args.warmup_iters)
        cells = "  ".join(f"{middle:7.2f} ({best:6.2f})" for middle, best in rates)
        print(
            f"{nbytes:12d}  {cells}  {one[0] / copied[0]:6.2f}  {several[0] / copied[0]:6.2f}",
            flush=True,
        )
    return 0


def _rates(
    calls: list[Callable[[], object]], nbytes: int, iterations: int, warmups: int
) -> list[tuple[float, float]]:
    """The median and the best GB/s of each call."""
    times_s: list[list[float]] = [[] for _ in calls]
    for _ in range(warmups + iterations):
        for call, times in zip(calls, times_s, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    timed = [times[warmups:] for times in times_s]
    return [(nbytes / median(times) / 1e9, nbytes / min(times) / 1e9) for times in timed]
