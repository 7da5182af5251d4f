"""Measures the kernels on one core against numpy's add of float32, in memory traffic.

GB/s count all bytes read and written: an addition reads two arrays and writes one. The kernel and
numpy take turns, iteration by iteration; the table shows medians and, in brackets, the fastest.
Sizes are those of the unquantized arrays (float32 for quantization). "step" is a step of a ring:
dequantize, add, quantize.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pccl.cli.arguments import option
from pccl.cli.bench import options, trials
from pccl.ext import ffi, lib
from pccl.runtime.digest import digests
from pccl.types import DataType, QuantizationName, ReduceOp

if TYPE_CHECKING:
    from pccl.ext._core import CData


_FORMATS: dict[QuantizationName, int] = {
    "int8": lib.PCCL_BLOCK_8,
    "int4": lib.PCCL_BLOCK_4,
    "uint8": lib.PCCL_MIN_MAX_8,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_sizes(parser, "1M", "128M", 128)
    options.add_iterations(parser, 20, 5)
    choices = [*(op.name.lower() for op in ReduceOp), "all"]
    option(parser, "-o --op", "operation", "sum", choices=choices)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if an element was wrong."""
    print(f"# {'size':>10}  {'kernel':>16}  {'pccl':>15}  {'numpy':>15}  {'ratio':>15}  #wrong")
    print(f"# {'(B)':>10}  {'':>16}  {'(GB/s)':>15}  {'(GB/s)':>15}")
    all_wrong = 0
    ops = list(ReduceOp) if args.op == "all" else [ReduceOp[args.op.upper()]]
    for nbytes in options.sizes(args):
        kernels = [_reduce(dtype, op, nbytes) for op in ops for dtype in DataType]
        for name in _FORMATS:
            kernels += _quantized(name, nbytes)
        x, y = _operands(DataType.FLOAT, nbytes)
        add = partial(np.add, x, y, out=np.zeros_like(x))
        for kernel in kernels:
            ours, numpys = _rates([kernel.call, add], [kernel.traffic, 3 * nbytes], args)
            wrong = kernel.count_wrong()
            all_wrong += wrong
            print(
                f"{nbytes:12d}  {kernel.name:>16}  {_cell(ours)}  {_cell(numpys)}"
                f"  {_cell((ours[0] / numpys[0], ours[1] / numpys[1]))}  {wrong:6d}",
                flush=True,
            )
    return 1 if all_wrong else 0


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    call: Callable[[], object]  # what is timed
    traffic: int  # bytes that a call reads and writes
    count_wrong: Callable[[], int]  # counts the wrong elements of the results


def _reduce(dtype: DataType, op: ReduceOp, nbytes: int) -> Kernel:
    a, b = _operands(dtype, nbytes, op)
    out = np.zeros_like(a)
    to, left, right = _pointers(out, a, b)

    def reduce() -> None:
        lib.pccl_reduce(dtype.value, op.value, to, left, right, a.size, 2)

    wanted = trials.expected(dtype, op, 2)
    name = f"{op.name.lower()} {dtype.common_name}"
    return Kernel(name, reduce, 3 * nbytes, lambda: trials.count_wrong(out, wanted))


def _quantized(name: QuantizationName, nbytes: int) -> list[Kernel]:
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
        distance = trials.error_max(dtype, ReduceOp.SUM, peers, name)
        return trials.count_far(out, trials.expected(dtype, ReduceOp.SUM, peers), dtype, distance)

    def far_after_step() -> int:
        lib.pccl_quantize(*how, to_total, to_a, a.size)
        step()
        return far(to_total, 2)

    quantize()  # the input of `dequantize`; and the sums below stay finite
    lib.pccl_quantize(*how, to_total, to_a, a.size)
    return [
        Kernel(f"quantize {name}", quantize, nbytes + size, lambda: far(to_codes, 1)),
        Kernel(f"dequantize {name}", dequantize, nbytes + size, lambda: far(to_codes, 1)),
        Kernel(f"step {name}", step, nbytes + 2 * size, far_after_step),
    ]


def _cell(rates: tuple[float, float]) -> str:
    return f"{rates[0]:6.2f} ({rates[1]:6.2f})"


def _pointers(*arrays: trials.Bits) -> list[CData]:
    """Pointers to the memory of arrays; they keep the arrays alive."""
    return [ffi.from_buffer("unsigned char[]", array) for array in arrays]


def _operands(dtype: DataType, nbytes: int, op: ReduceOp = ReduceOp.SUM) -> list[trials.Bits]:
    count = nbytes // dtype.itemsize
    return [trials.tiled(trials.contribution(dtype, op, i), count) for i in range(2)]


def add_digest_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_sizes(parser, "1M", "1G", 32)
    options.add_iterations(parser, 7, 2)


def run_digest(args: argparse.Namespace) -> int:
    """Measures the digest of shared state (XXH3-128 by leaves) against numpy's copy of the memory.

    GB/s count each hashed or copied byte once. Three calls take turns, iteration by iteration: the
    digest by one thread, the digest by as many threads as pccl would use, and the copy. The table
    shows medians and, in brackets, the fastest.
    """
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
        one, several, copied = rates = _rates(calls, [nbytes] * 3, args)
        cells = "  ".join(f"{middle:7.2f} ({best:6.2f})" for middle, best in rates)
        print(
            f"{nbytes:12d}  {cells}  {one[0] / copied[0]:6.2f}  {several[0] / copied[0]:6.2f}",
            flush=True,
        )
    return 0


def _rates(
    calls: list[Callable[[], object]], traffic: list[int], args: argparse.Namespace
) -> list[tuple[float, float]]:
    """The median and the best GB/s of calls that take turns, each with its bytes."""
    turns = {str(i): (lambda: None, call) for i, call in enumerate(calls)}
    times_s = trials.in_turns(turns, args.iters, args.warmup_iters).values()
    return [
        (nbytes / median(times) / 1e9, nbytes / min(times) / 1e9)
        for nbytes, times in zip(traffic, times_s, strict=True)
    ]
