"""Measures the kernels on one core against numpy's add of float32, in memory traffic.

GB/s count all that is read and written: an addition reads two arrays and writes one. The kernel and
numpy take turns, iteration by iteration; the table shows medians and, in brackets, the fastest.
Sizes are those of the arrays that are not quantized; "int8->" dequantizes, and "int8+" is a step of
a ring: dequantize, add, quantize.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pccl.cli.bench import data, options
from pccl.ext import ffi, lib
from pccl.types import DataType, ReduceOp

if TYPE_CHECKING:
    from pccl.ext._core import CData

_FORMATS = {"int8": lib.PCCL_BLOCK_8, "int4": lib.PCCL_BLOCK_4, "uint8": lib.PCCL_MIN_MAX_8}
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
    print(f"# {'size':>10}  {'type':>8}  {'pccl':>15}  {'numpy':>15}  {'ratio':>15}  #wrong")
    print(f"# {'(B)':>10}  {'':>8}  {'(GB/s)':>15}  {'(GB/s)':>15}")
    all_wrong = 0
    for nbytes in options.sizes(args):
        kernels = [_add(name, dtype, nbytes) for name, dtype in _DTYPES.items()]
        for name in _FORMATS:
            kernels += _quantized(name, nbytes)
        for kernel in kernels:
            ours, numpys = _measure(kernel, nbytes, args.iters, args.warmup_iters)
            wrong = kernel.count_wrong()
            all_wrong += wrong
            print(
                f"{nbytes:12d}  {kernel.name:>8}  {_cell(ours)}  {_cell(numpys)}"
                f"  {_cell((ours[0] / numpys[0], ours[1] / numpys[1]))}  {wrong:6d}",
                flush=True,
            )
    return 1 if all_wrong else 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row.

    Attributes:
        call: what is timed.
        traffic: bytes that a call reads and writes.
        count_wrong: wrong elements in what the calls have left.
    """

    name: str
    call: Callable[[], object]
    traffic: int
    count_wrong: Callable[[], int]


def _add(name: str, dtype: DataType, nbytes: int) -> Kernel:
    a, b = _operands(dtype, nbytes)
    out = np.zeros_like(a)
    to, left, right = _pointers(out, a, b)

    def add() -> None:
        lib.pccl_reduce(dtype.value, ReduceOp.SUM.value, to, left, right, a.size, 1)

    wanted = data.expected(dtype, ReduceOp.SUM, 2)
    return Kernel(name, add, 3 * nbytes, lambda: data.count_wrong(out, wanted))


def _quantized(name: str, nbytes: int) -> list[Kernel]:
    """Quantize, dequantize, and a step of a ring, of float32."""
    dtype, how = DataType.FLOAT, (_FORMATS[name], DataType.FLOAT.value)
    a, b = _operands(dtype, nbytes)
    out = np.zeros_like(a)
    size = lib.pccl_quantized_size(*how, a.size)
    codes, total = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    to_codes, to_total, to_a, to_b, to_out = _pointers(codes, total, a, b, out)

    def quantize() -> None:
        lib.pccl_quantize(*how, to_codes, to_a, a.size)

    def dequantize() -> None:
        lib.pccl_dequantize(*how, to_out, to_codes, a.size)

    def step() -> None:
        lib.pccl_quantized_reduce(*how, lib.PCCL_SUM, to_total, to_b, a.size, 1, ffi.NULL)

    def far(codes: Any, peers: int) -> int:
        lib.pccl_dequantize(*how, to_out, codes, a.size)
        distance = data.error_max(dtype, ReduceOp.SUM, peers, name)
        return data.count_far(out, data.expected(dtype, ReduceOp.SUM, peers), dtype, distance)

    def far_after_step() -> int:
        lib.pccl_quantize(*how, to_total, to_a, a.size)
        step()
        return far(to_total, 2)

    quantize()  # for who dequantizes, and so that the sums below stay finite
    lib.pccl_quantize(*how, to_total, to_a, a.size)
    return [
        Kernel(name, quantize, nbytes + size, lambda: far(to_codes, 1)),
        Kernel(f"{name}->", dequantize, nbytes + size, lambda: far(to_codes, 1)),
        Kernel(f"{name}+", step, nbytes + 2 * size, far_after_step),
    ]


def _cell(rates: tuple[float, float]) -> str:
    return f"{rates[0]:6.2f} ({rates[1]:6.2f})"


def _measure(
    kernel: Kernel, nbytes: int, iterations: int, warmups: int
) -> list[tuple[float, float]]:
    """The median and the best GB/s of the kernel, and of numpy's add of float32 arrays of
    `nbytes`."""
    x, y = _operands(DataType.FLOAT, nbytes)
    z = np.zeros_like(x)
    calls: list[Callable[[], object]] = [kernel.call, lambda: np.add(x, y, out=z)]
    times_s: list[list[float]] = [[], []]
    for _ in range(warmups + iterations):
        for call, times in zip(calls, times_s, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    traffic = (kernel.traffic, 3 * nbytes)
    timed = [times[warmups:] for times in times_s]
    return [
        (nbytes / median(times) / 1e9, nbytes / min(times) / 1e9)
        for nbytes, times in zip(traffic, timed, strict=True)
    ]


def _pointers(*arrays: data.Bits) -> list[CData]:
    """The memory of arrays, which it keeps alive."""
    return [ffi.from_buffer("unsigned char[]", array) for array in arrays]


def _operands(dtype: DataType, nbytes: int) -> list[data.Bits]:
    count = nbytes // dtype.itemsize
    return [data.tiled(data.contribution(dtype, ReduceOp.SUM, i), count) for i in range(2)]
