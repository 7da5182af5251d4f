"""Every collective of torch, on every element type, with every reduction: right, or refused.

The oracle is Python's arithmetic on exact numbers, turned into the type at the end. What is refused
is refused on all members before anything is sent, and the next call is right.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions
from training.groups import Groups

from pccl.torch import ProcessGroup

SIZE = 3
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
COMPLEX = [torch.complex64, torch.complex128]
OTHERS = [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTS, *COMPLEX, *OTHERS]
R = dist.ReduceOp
OPS: dict[str, Any] = {
    **{op.name: op for op in (R.SUM, R.AVG, R.MIN, R.MAX, R.PRODUCT, R.BAND, R.BOR, R.BXOR)},
    "PREMUL_SUM by 2.0": dist._make_nccl_premul_sum(2.0),
    "PREMUL_SUM by 0.5": dist._make_nccl_premul_sum(0.5),
    "PREMUL_SUM by a tensor": dist._make_nccl_premul_sum(torch.tensor([4])),
}
NUMBERS = [[100, 3, 0, 7, 1, 2], [120, 2, 5, 1, 1, 4], [127, 4, 3, 6, 0, 8]]


def numbers(rank: int, dtype: torch.dtype, length: int = 6) -> list[Any]:
    """A member's input: sums exceed the range of small integers; floats stay exact."""
    mine: list[Any] = [NUMBERS[rank][i % 6] for i in range(length)]
    if dtype == torch.bool:
        return [n % 2 == 0 for n in mine]
    if dtype.is_complex:
        return [complex(n, n - 2) for n in mine]
    if dtype in INTS:
        info = torch.iinfo(dtype)
        top = [info.max - rank, info.min + rank]
        return [*mine[: length - 2], *top]
    return mine


def made(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    if dtype in OTHERS[1:]:
        return torch.tensor(values, dtype=torch.float32).to(dtype)
    return torch.tensor(values, dtype=dtype)


def wrapped(value: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min


def reduced(name: str, dtype: torch.dtype, columns: list[tuple[Any, ...]]) -> list[Any] | None:
    """The result for each element; None: this must be refused."""
    kind, _, factor = name.partition(" by ")
    whole, is_bool = dtype in INTS, dtype == torch.bool
    if kind in ("BAND", "BOR", "BXOR"):
        if not whole and not is_bool:
            return None
        how = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}[kind]
        return [functools.reduce(how, column) for column in columns]
    if dtype in OTHERS[1:]:
        return None
    if is_bool:
        some: dict[str, Callable[[Any], bool]] = {
            **{"SUM": any, "MAX": any},
            **{"PRODUCT": all, "MIN": all},
        }
        return [some[kind](column) for column in columns] if kind in some else None
    if kind == "PREMUL_SUM":
        if whole and factor != "a tensor":
            return None
        times = {"2.0": 2.0, "0.5": 0.5, "a tensor": 4}[factor]
        columns, kind = [tuple(n * times for n in column) for column in columns], "SUM"
    if kind == "SUM":
        sums = [sum(column) for column in columns]
        return [wrapped(s, dtype) for s in sums] if whole else sums
    if kind == "AVG":
        if whole:
            return [int(Fraction(sum(column), len(column))) for column in columns]  # towards 0
        return [sum(column) / len(column) for column in columns]
    if dtype.is_complex:
        return None
    if kind == "PRODUCT":
        products = [functools.reduce(operator.mul, column) for column in columns]
        return [wrapped(p, dtype) for p in products] if whole else products
    return [(min if kind == "MIN" else max)(column) for column in columns]


@functools.cache
def result(name: str, dtype: torch.dtype, length: int) -> Tensor | None:
    """`reduced` of what all members give."""
    given = [numbers(rank, dtype, length) for rank in range(SIZE)]
    values = reduced(name, dtype, list(zip(*given, strict=True)))
    return None if values is None else made(values, dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    if found.dtype in (*FLOATS, *COMPLEX):
        eps = torch.finfo(found.dtype).eps
        return torch.allclose(found, expected, rtol=4 * eps, atol=0)
    return bool(torch.equal(found.view(torch.uint8), expected.view(torch.uint8)))


def options(make: Any, op: Any, root: int | None = None) -> Any:
    made_options = make()
    made_options.reduceOp = op
    if root is not None:
        made_options.rootRank = root
    return made_options


def all_reduce(group: ProcessGroup, op: Any, mine: Tensor) -> Tensor:
    group.allreduce([mine], options(dist.AllreduceOptions, op)).wait()
    return mine


def coalesced(group: ProcessGroup, op: Any, mine: Tensor) -> Tensor:
    halves = [half.clone() for half in mine.view(torch.uint8).chunk(2)]
    halves = [half.view(mine.dtype) for half in halves]
    group.allreduce_coalesced(halves, options(dist.AllreduceOptions, op)).wait()
    return torch.cat([half.view(torch.uint8) for half in halves]).view(mine.dtype)


def reduce(group: ProcessGroup, op: Any, mine: Tensor) -> Tensor | None:
    before = mine.clone()
    group.reduce([mine], options(dist.ReduceOptions, op, root=1)).wait()
    if group.rank() == 1:
        return mine
    assert torch.equal(mine.view(torch.uint8), before.view(torch.uint8))
    return None


def reduce_scatter(group: ProcessGroup, op: Any, mine: Tensor) -> Tensor:
    """Everyone is given the whole of what all have, so that all results can be compared."""
    found = torch.empty_like(mine)
    group.reduce_scatter(
        [found], [[mine.clone() for _ in range(SIZE)]], options(ReduceScatterOptions, op)
    ).wait()
    return found


def reduce_scatter_single(group: ProcessGroup, op: Any, mine: Tensor) -> Tensor:
    found = torch.empty_like(mine)
    whole = mine.view(torch.uint8).repeat(SIZE).view(mine.dtype)
    group.reduce_scatter_single(found, whole, options(ReduceScatterOptions, op)).wait()
    return found


REDUCTIONS = [all_reduce, coalesced, reduce, reduce_scatter, reduce_scatter_single]


@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("length", [6, 60_000], ids=["with the votes", "around the ring"])
def test_reductions(call: Callable[..., Tensor | None], length: int, three: Groups) -> None:
    dtypes = DTYPES if length == 6 else [torch.float16, torch.uint8, torch.int64, torch.complex64]
    wanted = {(dtype, name): result(name, dtype, length) for dtype in dtypes for name in OPS}
    wrong = []

    def job(group: ProcessGroup) -> None:
        for dtype in dtypes:
            mine = made(numbers(group.rank(), dtype, length), dtype)
            for name, op in OPS.items():
                right = wanted[dtype, name]
                what = f"{name} of {dtype} on rank {group.rank()}"
                try:
                    found = call(group, op, mine.clone())
                except (ValueError, TypeError) as error:
                    if right is not None:
                        wrong.append(f"{what}: {error}")
                    continue
                if right is None:
                    wrong.append(f"{what}: not refused, {found}")
                elif found is not None and not same(found, right):
                    wrong.append(f"{what}: {found[-6:]}, not {right[-6:]}")

    three.each(job)
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("length", [6, 60_000], ids=["with the votes", "around the ring"])
def test_collectives_that_only_move_data_are_right_for_every_dtype(
    length: int, three: Groups
) -> None:
    given = {
        dtype: [made(numbers(r, dtype, length), dtype) for r in range(SIZE)] for dtype in DTYPES
    }

    def job(group: ProcessGroup) -> None:
        rank, others = group.rank(), range(SIZE)
        for dtype in DTYPES:
            row = [each.clone() for each in given[dtype]]

            def check(name: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
                for one, other in zip(found, wanted, strict=True):
                    a, b = one.contiguous().view(torch.uint8), other.view(torch.uint8)
                    assert torch.equal(a.view(-1), b.view(-1)), (name, dtype)  # noqa: B023

            def empty() -> list[Tensor]:
                return [torch.empty_like(each) for each in row]  # noqa: B023

            mine, outputs = row[rank].clone(), empty()
            group.allgather([outputs], [mine]).wait()
            check("all_gather", outputs, row)
            whole = torch.empty(SIZE * length, dtype=dtype)
            group.all_gather_single(whole, mine).wait()
            check("all_gather_single", whole.split(length), row)
            sent = row[rank].clone()
            group.broadcast([sent], 1).wait()
            check("broadcast", [sent], [row[1]])
            outputs = empty()
            group.gather(outputs if rank == 2 else [], mine, 2).wait()
            check("gather", outputs if rank == 2 else [], row if rank == 2 else [])
            found = torch.empty_like(mine)
            group.scatter([found], row if rank == 0 else [], 0).wait()
            check("scatter", [found], [row[rank]])
            outputs = empty()
            group.alltoall(outputs, [mine.clone() for _ in others]).wait()
            check("all_to_all", outputs, row)
            whole = torch.empty(SIZE * length, dtype=dtype)
            every = torch.cat([mine.view(torch.uint8)] * SIZE).view(dtype)
            group.all_to_all_single(whole, every, [], []).wait()
            check("all_to_all_single", whole.split(length), row)
            found, right, left = torch.empty_like(mine), (rank + 1) % SIZE, (rank - 1) % SIZE
            sending = group.send([mine], right)
            group.recv([found], left).wait()
            sending.wait()
            check("send and recv", [found], [row[left]])
            group.barrier().wait()

    three.each(job)
