"""Measures the reduce kernels on one core against numpy's add of float32, in memory traffic.

An addition reads two arrays and writes one: GB/s count all three. The kernel and numpy take turns,
iteration by iteration; the table shows medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from pccl.cli.bench import data, options
from pccl.ext import ffi, lib
from pccl.types import DataType, ReduceOp

_DTYPES = {
    "float": DataType.FLOAT,
    "double": DataType.DOUBLE,
    "half": DataType.FLOAT16,
    "bfloat16": DataType.BFLOAT16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl bench kernels`."""
    options.add_sizes(parser, "1M", "128M", 128)
    options.add_iterations(parser, 20, 5)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if an element was wrong."""
    print(f"# {'size':>10}  {'type':>8}  {'pccl':>6}  {'numpy':>6}  {'ratio':>6}  #wrong")
    print(f"# {'(B)':>10}  {'':>8}  {'(GB/s)':>6}  {'(GB/s)':>6}")
    all_wrong = 0
    for nbytes in options.sizes(args):
        for name, dtype in _DTYPES.items():
            ours, numpys, wrong = _measure(dtype, nbytes, args.iters, args.warmup_iters)
            all_wrong += wrong
            print(
                f"{nbytes:12d}  {name:>8}  {ours:6.2f}  {numpys:6.2f}"
                f"  {ours / numpys:6.2f}  {wrong:6d}",
                flush=True,
            )
    return 1 if all_wrong else 0


def _measure(
    dtype: DataType, nbytes: int, iterations: int, warmups: int
) -> tuple[float, float, int]:
    """GB/s of the kernel and of numpy over the same number of bytes, and wrong elements."""
    a, b = _operands(dtype, nbytes)
    x, y = _operands(DataType.FLOAT, nbytes)
    out, z = np.zeros_like(a), np.zeros_like(x)
    to, left, right = (ffi.cast("void *", array.ctypes.data) for array in (out, a, b))

    def add() -> None:
        lib.pccl_reduce(dtype.value, ReduceOp.SUM.value, to, left, right, a.size, 1)

    calls: list[Callable[[], object]] = [add, lambda: np.add(x, y, out=z)]
    times_s: list[list[float]] = [[], []]
    for _ in range(warmups + iterations):
        for call, times in zip(calls, times_s, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    ours, numpys = (3 * nbytes / median(times[warmups:]) / 1e9 for times in times_s)
    return ours, numpys, data.count_wrong(out, data.expected(dtype, ReduceOp.SUM, 2))


def _operands(dtype: DataType, nbytes: int) -> list[data.Bits]:
    count = nbytes // dtype.itemsize
    return [data.tiled(data.contribution(dtype, ReduceOp.SUM, i), count) for i in range(2)]
