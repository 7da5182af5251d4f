"""Turns the arguments of rooted collectives, of exchanges and of uneven gathers into buffers.

Only one peer, the root, needs an array for a reduction or for what is gathered, and only the root
has what is scattered. Invalid arguments raise here, before any other peer is involved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from pccl.calls import operands
from pccl.calls.operands import A, Arrays, Ranks, Root, Several
from pccl.protocol.messages import CollectiveKind
from pccl.runtime.client.memory import Operand, Operands
from pccl.tensors.arrays import Array, Buffer, new, order_of, pair, same_kind
from pccl.types import QuantizationOptions, ReduceOp


def all_gather(
    send: A, recv: A | None, rows: Sequence[int] | None, ranks: Ranks
) -> tuple[Operands, A]:
    """The operands of an all-gather, and what receives: new arrays where `recv` is None.

    Raises:
        ValueError, AssertionError: the arrays do not fit each other, or the numbers of rows.
        TypeError: such a number is none.
    """
    if rows is None:
        return operands.all_gather(send, recv, ranks)
    numbers = _numbers("rows", rows, ranks)
    own, before, total = numbers[ranks.rank], sum(numbers[: ranks.rank]), sum(numbers)
    given = operands.several(send)
    if recv is None:
        made = [new((total, *array.shape[1:]), array) for array in given.arrays]
        recv = operands.in_the_form_of(send, given, made)
    targets = operands.matching(given, recv)
    each = []
    for source, target in zip(given.arrays, targets.arrays, strict=True):
        same_kind(source, target)
        sent, received = Buffer.of(source), Buffer.of(target, writable=True)
        row = _row("send", source, sent, own, f"rows has for rank {ranks.rank}")
        _check_rows_alike(
            sent, received, row, _row("recv", target, received, total, "rows add up to")
        )
        place = received.address + before * row * sent.dtype.itemsize
        if sent.overlaps(received) and sent.address != place:
            raise ValueError(
                f"send overlaps recv, and is not its part of rank {ranks.rank}, which begins with "
                f"row {before}"
            )
        each.append(Operand(sent, received, row))
    work = operands.make(CollectiveKind.ALL_GATHER, given, each, ranks=ranks)
    return replace(work, work=structs.replace(work.work, rows=numbers)), recv


def reduce(
    send: Arrays,
    recv: Arrays | None,
    root: Root,
    op: ReduceOp | str,
    options: QuantizationOptions | None,
    ranks: Ranks,
) -> Operands:
    """The operands of a reduce; in place on the root where `recv` is None.

    Raises:
        ValueError, AssertionError: the arrays do not match each other, or `op` is unknown.
        PCCLError: INVALID_ARGUMENT: they cannot be quantized like this.
        TypeError: `root` is no rank.
    """
    at = operands.rank_of(root, ranks)
    given = operands.several(send)
    if ranks.rank == at:
        targets = given if recv is None else operands.matching(given, recv)
        pairs = [pair(*each) for each in zip(given.arrays, targets.arrays, strict=True)]
        each = [Operand(source, target, source.count) for source, target in pairs]
    else:
        each = _only_given(given)
    chosen = operands.reduce_op(op)
    what = CollectiveKind.REDUCE
    return operands.make(what, given, each, op=chosen, options=options, root=at, ranks=ranks)


def gather(send: A, recv: A | None, root: Root, ranks: Ranks) -> tuple[Operands, A | None]:
    """The operands of a gather, and what receives on the root: new arrays where `recv` is None.

    Raises:
        ValueError, AssertionError: the arrays do not fit each other.
        TypeError: `root` is no rank.
    """
    at = operands.rank_of(root, ranks)
    given = operands.several(send)
    result: A | None = None
    if ranks.rank == at:
        work, result = operands.all_gather(send, recv, ranks)
        each = list(work.each)
    else:
        each = _only_given(given)
    work = operands.make(CollectiveKind.GATHER, given, each, root=at, ranks=ranks)
    recv_rows = _one_each(ranks) if ranks.rank == at else ()
    return replace(work, send_rows=_only(at, ranks), recv_rows=recv_rows), result


def scatter(
    send: Arrays | None, recv: A | None, root: Root, ranks: Ranks
) -> tuple[Operands, A | Arrays]:
    """The operands of a scatter, and what receives: on the root, new arrays where `recv` is None.

    Raises:
        ValueError, AssertionError: the arrays do not fit each other, or one is missing.
        TypeError: `root` is no rank.
    """
    at = operands.rank_of(root, ranks)
    if ranks.rank == at:
        return _scatter_root(send, recv, ranks)
    if recv is None:
        raise ValueError(f"recv is needed on all peers but the root, which has rank {at}")
    given = operands.several(recv)
    blocks = [Buffer.of(array, writable=True) for array in given.arrays]
    each = [Operand(_nothing(block), block, block.count) for block in blocks]
    work = operands.make(CollectiveKind.SCATTER, given, each, root=at, ranks=ranks)
    return replace(work, recv_rows=_only(at, ranks)), recv


def _scatter_root(send: Arrays | None, recv: A | None, ranks: Ranks) -> tuple[Operands, A | Arrays]:
    if send is None:
        raise ValueError(f"send is needed on the root, which is this peer, of rank {ranks.rank}")
    given = operands.several(send)
    wholes = [Buffer.of(array) for array in given.arrays]
    result: A | Arrays
    if recv is None:
        pairs = zip(given.arrays, wholes, strict=True)
        made = [operands.scattered(array, whole, ranks.members) for array, whole in pairs]
        result = operands.in_the_form_of(send, given, made)
    else:
        result = recv
    targets = operands.matching(given, result)
    each = []
    for source, whole, target in zip(given.arrays, wholes, targets.arrays, strict=True):
        same_kind(source, target)
        block = Buffer.of(target, writable=True)
        operands.check_block("send", whole, "recv", block, ranks)
        each.append(Operand(whole, block, block.count))
    work = operands.make(CollectiveKind.SCATTER, given, each, root=ranks.rank, ranks=ranks)
    own = _only(ranks.rank, ranks)
    return replace(work, send_rows=_one_each(ranks), recv_rows=own), result


def all_to_all(
    send: A,
    recv: A | None,
    send_rows: Sequence[int] | None,
    recv_rows: Sequence[int] | None,
    ranks: Ranks,
) -> tuple[Operands, A]:
    """The operands of an all-to-all, and what receives: new arrays where `recv` is None.

    Raises:
        ValueError, AssertionError: the arrays do not fit each other, or the numbers of rows.
        TypeError: such a number is none.
    """
    if send_rows is not None and recv_rows is not None:
        return _uneven_all_to_all(send, recv, send_rows, recv_rows, ranks)
    if send_rows is not None or recv_rows is not None:
        raise ValueError("give both send_rows and recv_rows, or neither")
    given = operands.several(send)
    if recv is None:
        recv = operands.in_the_form_of(send, given, [_like(array) for array in given.arrays])
    targets = operands.matching(given, recv)
    each = []
    for source, target in zip(given.arrays, targets.arrays, strict=True):
        sent, received = pair(source, target)
        if sent.overlaps(received):
            raise ValueError("send and recv overlap: an all_to_all cannot be in place")
        _check_rows(source, sent, ranks.members)
        each.append(Operand(sent, received, sent.count // ranks.members))
    work = operands.make(CollectiveKind.ALL_TO_ALL, given, each, ranks=ranks)
    rows = _one_each(ranks)
    return replace(work, send_rows=rows, recv_rows=rows), recv


def _uneven_all_to_all(
    send: A,
    recv: A | None,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    ranks: Ranks,
) -> tuple[Operands, A]:
    gives, takes = _numbers("send_rows", send_rows, ranks), _numbers("recv_rows", recv_rows, ranks)
    given = operands.several(send)
    if recv is None:
        made = [new((sum(takes), *array.shape[1:]), array) for array in given.arrays]
        recv = operands.in_the_form_of(send, given, made)
    targets = operands.matching(given, recv)
    each = []
    for source, target in zip(given.arrays, targets.arrays, strict=True):
        same_kind(source, target)
        sent, received = Buffer.of(source), Buffer.of(target, writable=True)
        row = _row("send", source, sent, sum(gives), "send_rows says")
        taken = _row("recv", target, received, sum(takes), "recv_rows says")
        _check_rows_alike(sent, received, row, taken)
        if sent.overlaps(received):
            raise ValueError("send and recv overlap: an all_to_all cannot be in place")
        each.append(Operand(sent, received, row))
    work = operands.make(CollectiveKind.ALL_TO_ALL, given, each, ranks=ranks)
    return replace(work, send_rows=gives, recv_rows=takes, uneven=True), recv


def _numbers(name: str, rows: Sequence[int], ranks: Ranks) -> tuple[int, ...]:
    numbers = tuple(map(operator.index, rows))
    if len(numbers) != ranks.members or any(not 0 <= n < 1 << 48 for n in numbers):
        raise ValueError(
            f"{name} is {list(numbers)}: it must have a number of rows for each of the "
            f"{ranks.members} peers of the group"
        )
    return numbers


def _check_rows_alike(send: Buffer, recv: Buffer, row: int, other: int) -> None:
    if send.dtype is not recv.dtype or row != other:
        raise AssertionError(
            f"a row of send is {row} elements of {send.dtype.name}, and one of recv is not"
        )


def _row(name: str, array: Array, buffer: Buffer, rows: int, as_what: str) -> int:
    """The elements of a row of an array, which must have so many rows."""
    if len(array.shape) == 0 or array.shape[0] != rows or buffer.layout is not None:
        raise AssertionError(
            f"{name} has the shape {tuple(array.shape)}, and lies in memory {buffer.order}: it "
            f"must have {rows} rows, as {as_what}, in C's order"
        )
    return math.prod(array.shape[1:])


def _check_rows(array: Array, whole: Buffer, members: int) -> None:
    """Checks that an array consists of a part for each member, one after the other."""
    mixed = whole.layout is not None and whole.layout.part(members) is None
    if len(array.shape) == 0 or array.shape[0] % members or mixed:
        lies = f", and lies in memory as {whole.order}" if mixed else ""
        raise AssertionError(
            f"send has the shape {tuple(array.shape)}{lies}: its first dimension must be a "
            f"multiple of the {members} peers of the group, and the outermost one in memory"
        )


def _like(array: Array) -> Array:
    order = None if Buffer.of(array).layout is None else order_of(array)
    return new(tuple(array.shape), array, order)


def send(arrays: Arrays, pair: tuple[int, int]) -> Operands:
    """The operands of a send, by a pair of peers.

    Raises:
        ValueError, AssertionError: the arrays cannot be sent.
    """
    given = operands.several(arrays)
    work = operands.make(CollectiveKind.SEND, given, _only_given(given))
    return replace(work, send_rows=(0, 1), pair=pair)  # by positions: it sends to the other one


def recv(arrays: Arrays, pair: tuple[int, int]) -> Operands:
    """The operands of a recv, by a pair of peers.

    Raises:
        ValueError, AssertionError: the arrays cannot be written to.
    """
    given = operands.several(arrays)
    buffers = [Buffer.of(array, writable=True) for array in given.arrays]
    each = [Operand(_nothing(buffer), buffer, buffer.count) for buffer in buffers]
    work = operands.make(CollectiveKind.SEND, given, each)
    return replace(work, recv_rows=(1, 0), pair=pair)


def _only_given(given: Several) -> list[Operand]:
    """The operands of a peer that receives nothing."""
    buffers = [Buffer.of(array) for array in given.arrays]
    return [Operand(buffer, _nothing(buffer), buffer.count) for buffer in buffers]


def _nothing(like: Buffer) -> Buffer:
    """No memory, in the place of a buffer of that dtype."""
    return Buffer.at(0, 0, like.dtype, None, like.device_type)


def _only(rank: int, ranks: Ranks) -> tuple[int, ...]:
    """One row for that rank, or from it."""
    return tuple(int(each == rank) for each in range(ranks.members))


def _one_each(ranks: Ranks) -> tuple[int, ...]:
    """A row for each rank, or from each."""
    return (1,) * ranks.members
