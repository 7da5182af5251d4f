"""The operands of each collective: checks of the arguments, and descriptions of the arrays' memory.

If `recv` is None, `all_reduce` and `reduce` are in place, and the others make new arrays. A `pair`
is the sender and the receiver.

Invalid arguments raise here, before any other peer is involved: ValueError, TypeError, or PCCLError
with INVALID_ARGUMENT, as the methods of `Communicator` say.
"""

from __future__ import annotations

import array as bytes_of
import math
import operator
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from pccl.descriptors import ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import ArgumentError, error_for
from pccl.protocol import messages as m
from pccl.protocol.ring import checksum
from pccl.runtime.client.memory import Operand, Operands, fingerprint, nothing
from pccl.tensors import (
    Array,
    Buffer,
    Exporter,
    is_finite,
    like,
    native,
    new,
    order_of,
    pair,
    same_kind,
)
from pccl.types import (
    CollectiveKind,
    DataType,
    OpName,
    QuantizationName,
    QuantizationOptions,
    ReduceOp,
    Result,
)

Arrays: TypeAlias = (
    "Array | Exporter | Sequence[Array | Exporter] | Mapping[str, Array] | Mapping[str, Exporter]"
)
A = TypeVar("A", bound="Arrays")
Root: TypeAlias = int | Literal["first"]
Made: TypeAlias = Callable[[], Any]  # returns the arrays that hold the result, in the caller's form


@dataclass(frozen=True, slots=True)
class Ranks:
    """A peer's rank among the members of its group, to its knowledge."""

    rank: int  # its own rank
    members: int  # number of members
    first: int  # the rank of the member that joined the run first
    # the checksum of the ring's order, which determines the ranks; 0: unknown
    ring: int = field(default=0, compare=False)

    @classmethod
    def of(cls, order: Sequence[int], number: int) -> Ranks:
        """A peer's rank among these peers, whose numbers are in the order of joining."""
        return cls(order.index(number), len(order), order.index(min(order)), checksum(order))


@dataclass(slots=True)  # not frozen: that takes longer, in each call
class Several:
    """The arrays of a collective in order, with their names if they came in a dict."""

    arrays: list[Array]  # as numpy or torch sees them
    names: list[str]  # the sorted keys of a dict
    is_list: bool = True  # False if a single array was given
    form: Any = None  # the argument: an array, or a list or dict of arrays
    given: Sequence[Any] = ()  # its arrays
    # the read-only ones that must be written: `arrays` has copies of them
    copied: Collection[int] = ()

    def result(self, made: Sequence[Array] | None = None) -> Any:
        """New arrays, in the form and of the libraries of the argument; None: the written ones."""
        if made is None:
            if not self.copied:
                return self.form
            pairs = zip(self.given, self.arrays, strict=True)
            each = [like(*one) if i in self.copied else one[0] for i, one in enumerate(pairs)]
        else:
            each = [like(*one) for one in zip(self.given, made, strict=True)]
        if isinstance(self.form, Mapping):
            by_name = dict(zip(self.names, each, strict=True))
            return {name: by_name[name] for name in self.form}
        return each if self.is_list else each[0]


# the arrays to send, the operands, and the function that returns the receiving arrays
Described: TypeAlias = tuple[Several, list[Operand], Made]


def all_reduce(
    send: Arrays,
    recv: Arrays | None,
    op: ReduceOp | OpName,
    options: QuantizationOptions | None = None,
    descriptor: ReduceOperandDescriptor | None = None,
    error: Array | None = None,
) -> Operands:
    """The operands of an all-reduce; in place if `recv` is None.

    `error`, for error feedback, receives the quantization error of this peer for each element of
    the sum: the contributions add up to the result plus the errors of all peers. It is a float32
    array in host memory. It must be 0 before the call, and stays 0 if the data is not quantized. If
    the call fails, its content is unspecified.
    """
    given, each, result = _by_pairs(send, recv)
    if error is not None:
        (one,) = each
        each = [Operand(one.send, one.recv, one.count, Buffer.of(error, writable=True))]
    if descriptor is not None:
        wanted = descriptor.datatype
        for dtype in {operand.send.dtype for operand in each} - {wanted}:
            why = f"the operand descriptor says {wanted.name}, the arrays are {dtype.name}"
            raise error_for(Result.INVALID_ARGUMENT, "all_reduce", why)
    what = CollectiveKind.ALL_REDUCE
    return make(what, given, each, result, op=op, options=options)


def _by_pairs(send: Arrays, recv: Arrays | None) -> Described:
    """The operands if each array of `recv` is like that of `send`; in place if it is None."""
    given = several(send, written=recv is None)
    targets = given if recv is None else matching(given, recv)
    each = [Operand(*both, both[0].count) for both in map(pair, given.arrays, targets.arrays)]
    return given, each, targets.result


def quantization_of(
    options: QuantizationOptions | None, name: QuantizationName | None
) -> QuantizationOptions | None:
    if name is None:
        return options
    if options is not None:
        raise ValueError("give quantization or quantization_options, not both")
    return QuantizationOptions.of(name)


def of_descriptors(descriptors: Sequence[ReduceOpDescriptor]) -> Operands:
    """The operands of one all-reduce of descriptors of the same kind (see `bundles`).

    Addresses are not checked.
    """
    work = descriptors[0].reduce_descriptor
    each = [_of_descriptor(descriptor) for descriptor in descriptors]
    given = Several([], [], len(each) > 1)
    options = work.quantization_options
    return make(CollectiveKind.ALL_REDUCE, given, each, op=work.op, options=options)


def _of_descriptor(descriptor: ReduceOpDescriptor) -> Operand:
    work = descriptor.reduce_descriptor
    count, dtype = work.count, work.operand_descriptor.datatype
    addresses = descriptor.sendbuf_ptr, descriptor.recvbuf_ptr
    known = descriptor._buffers or (Buffer(0, 0, dtype, None),) * 2
    send, recv = (
        Buffer.at(address, count, dtype, one.owner, one.device_type, one.layout)
        for address, one in zip(addresses, known, strict=True)
    )
    return Operand(send, recv, count)


def of_buffers(
    send: Buffer, recv: Buffer, op: ReduceOp, options: QuantizationOptions | None
) -> Operands:
    none = Several([], [], False)
    each = [Operand(send, recv, send.count)]
    return make(CollectiveKind.ALL_REDUCE, none, each, op=op, options=options)


def broadcast(arrays: Arrays, root: Root, ranks: Ranks) -> Operands:
    root = rank_of(root, ranks)
    return make(CollectiveKind.BROADCAST, *_by_pairs(arrays, None), root=root, ranks=ranks)


def all_gather(
    send: Arrays, recv: Arrays | None, ranks: Ranks, rows: Sequence[int] | None = None
) -> Operands:
    if rows is not None:
        return _uneven_all_gather(send, recv, rows, ranks)
    made = _by_slices(send, recv, ranks, gathers=True)
    return make(CollectiveKind.ALL_GATHER, *made, ranks=ranks)


def _uneven_all_gather(
    send: Arrays, recv: Arrays | None, rows: Sequence[int], ranks: Ranks
) -> Operands:
    numbers = _numbers("rows", rows, ranks)
    own, before = numbers[ranks.rank], sum(numbers[: ranks.rank])
    sent, received = (own, f"rows has for rank {ranks.rank}"), (sum(numbers), "rows add up to")
    given, each, result = _by_rows(send, recv, sent, received)
    for operand in each:
        place = operand.recv.address + before * operand.count * operand.send.dtype.itemsize
        if operand.send.overlaps(operand.recv) and operand.send.address != place:
            raise ValueError(
                f"send overlaps recv, and is not its part of rank {ranks.rank}, which begins with "
                f"row {before}"
            )
    return make(CollectiveKind.ALL_GATHER, given, each, result, ranks=ranks, rows=numbers)


def reduce_scatter(
    send: Arrays,
    recv: Arrays | None,
    op: ReduceOp | OpName,
    options: QuantizationOptions | None,
    ranks: Ranks,
) -> Operands:
    made = _by_slices(send, recv, ranks, gathers=False)
    return make(CollectiveKind.REDUCE_SCATTER, *made, op=op, options=options, ranks=ranks)


def _by_slices(send: Arrays, recv: Arrays | None, ranks: Ranks, *, gathers: bool) -> Described:
    """The operands if one array has a slice for each member, and the other is one slice.

    `recv` has the slices if the collective `gathers`; otherwise `send` has them. New arrays receive
    if `recv` is None.
    """
    given = several(send)
    sources = [Buffer.of(array) for array in given.arrays]
    shaped = _gathered if gathers else _scattered
    targets, result = _receiving(
        given, recv, lambda i: shaped(given.arrays[i], sources[i], ranks.members)
    )
    each = []
    for array, source, target in zip(given.arrays, sources, targets, strict=True):
        same_kind(array, target)
        received = Buffer.of(target, writable=True)
        if gathers:
            _check_slice("recv", received, "send", source, ranks)
        else:
            _check_slice("send", source, "recv", received, ranks)
        each.append(Operand(source, received, (source if gathers else received).count))
    return given, each, result


def _by_rows(
    send: Arrays, recv: Arrays | None, sent: tuple[int, str], received: tuple[int, str]
) -> Described:
    """The operands if the numbers of rows are given; an operand's count is that of a row.

    `sent` and `received` are the rows of each array of `send` and `recv`, and the source of that
    number, for errors. New arrays receive if `recv` is None.
    """
    given = several(send)
    arrays = given.arrays
    targets, result = _receiving(
        given, recv, lambda i: new((received[0], *arrays[i].shape[1:]), arrays[i])
    )
    each = []
    for source, target in zip(arrays, targets, strict=True):
        same_kind(source, target)
        read, written = Buffer.of(source), Buffer.of(target, writable=True)
        row = _row("send", source, read, *sent)
        if _row("recv", target, written, *received) != row or read.dtype is not written.dtype:
            raise ArgumentError(
                f"a row of send is {row} elements of {read.dtype.name}, and one of recv is not"
            )
        each.append(Operand(read, written, row))
    return given, each, result


def _receiving(
    given: Several, recv: Arrays | None, make_new: Callable[[int], Array]
) -> tuple[list[Array], Made]:
    """The receiving arrays, and the function that returns them to the caller; new ones if `recv` is
    None."""
    if recv is not None:
        targets = matching(given, recv)
        return targets.arrays, targets.result
    made = [make_new(i) for i in range(len(given.arrays))]
    return made, lambda: given.result(made)


def reduce(
    send: Arrays,
    recv: Arrays | None,
    root: Root,
    op: ReduceOp | OpName,
    options: QuantizationOptions | None,
    ranks: Ranks,
) -> Operands:
    at = rank_of(root, ranks)
    made = _by_pairs(send, recv) if ranks.rank == at else _only_sent(send)
    return make(CollectiveKind.REDUCE, *made, op=op, options=options, root=at, ranks=ranks)


def gather(send: Arrays, recv: Arrays | None, root: Root, ranks: Ranks) -> Operands:
    at = rank_of(root, ranks)
    rows, takes = _only(at, ranks), ranks.rank == at
    made = _by_slices(send, recv, ranks, gathers=True) if takes else _only_sent(send, nothing)
    each_rank = _one_each(ranks) if takes else ()
    return make(
        CollectiveKind.GATHER, *made, root=at, ranks=ranks, send_rows=rows, recv_rows=each_rank
    )


def scatter(send: Arrays | None, recv: Arrays | None, root: Root, ranks: Ranks) -> Operands:
    at = rank_of(root, ranks)
    if ranks.rank == at:
        if send is None:
            raise ValueError(f"send is needed on the root, which is this peer, of rank {at}")
        made, each_rank = _by_slices(send, recv, ranks, gathers=False), _one_each(ranks)
    else:
        if recv is None:
            raise ValueError(f"recv is needed on all peers but the root, which has rank {at}")
        made, each_rank = _only_received(recv), ()
    rows = _only(at, ranks)
    return make(
        CollectiveKind.SCATTER, *made, root=at, ranks=ranks, send_rows=each_rank, recv_rows=rows
    )


def all_to_all(
    send: Arrays,
    recv: Arrays | None,
    send_rows: Sequence[int] | None,
    recv_rows: Sequence[int] | None,
    ranks: Ranks,
) -> Operands:
    if send_rows is not None and recv_rows is not None:
        gives = _numbers("send_rows", send_rows, ranks)
        takes = _numbers("recv_rows", recv_rows, ranks)
        sent, received = (sum(gives), "send_rows says"), (sum(takes), "recv_rows says")
        given, each, result = _by_rows(send, recv, sent, received)
    elif send_rows is not None or recv_rows is not None:
        raise ValueError("give both send_rows and recv_rows, or neither")
    else:
        given = several(send)
        targets, result = _receiving(given, recv, lambda i: _like(given.arrays[i]))
        gives = takes = _one_each(ranks)
        each = []
        for source, target in zip(given.arrays, targets, strict=True):
            read, written = pair(source, target)
            _check_rows(source, read, ranks.members)
            each.append(Operand(read, written, read.count // ranks.members))
    if any(operand.send.overlaps(operand.recv) for operand in each):
        raise ValueError("send and recv overlap: an all_to_all cannot be in place")
    what, uneven = CollectiveKind.ALL_TO_ALL, send_rows is not None
    return make(
        what, given, each, result, ranks=ranks, send_rows=gives, recv_rows=takes, uneven=uneven
    )


def barrier() -> Operands:
    return Operands(m.Spec(CollectiveKind.BARRIER, 0, 0, 0), ())


def vote(ok: bool) -> tuple[Operands, MutableSequence[int]]:
    """The operands of a vote, and its memory, whose only number is then 1 if all voted ok."""
    return _one_number("B", ok, DataType.UINT8, ReduceOp.MIN)


def accusation(arrays: Arrays, number: int) -> tuple[Operands, MutableSequence[int]]:
    """The operands of a check for finite numbers, and its memory.

    Afterwards its only number is -1, or the `number` of a peer that has an infinity or a NaN.
    """
    accused = -1 if all(map(is_finite, several(arrays).arrays)) else number
    return _one_number("q", accused, DataType.INT64, ReduceOp.MAX)


def _one_number(
    code: str, number: int, dtype: DataType, op: ReduceOp
) -> tuple[Operands, MutableSequence[int]]:
    memory = bytes_of.array(code, [number])
    place = Buffer.at(memory.buffer_info()[0], 1, dtype, memory)
    return of_buffers(place, place, op, None), memory


def reduce_op(op: ReduceOp | OpName) -> ReduceOp:
    """The operation with this name, in upper or lower case; "mean" is "avg". Or `op` itself."""
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp[{"MEAN": "AVG"}.get(op.upper(), op.upper())]
    except (KeyError, AttributeError):
        names = ", ".join(each.name.lower() for each in ReduceOp)
        raise ValueError(f"op is {op!r}: it may be {names}") from None


def rank_of(root: Root, ranks: Ranks) -> int:
    if root == "first":
        return ranks.first
    if isinstance(root, str):
        raise ValueError(f'root is {root!r}: it may be a rank, or "first"')
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f'root is {root!r}: it must be a rank, or "first"') from None
    if not 0 <= rank < ranks.members:
        raise ValueError(f"root is {rank}: ranks are 0 to {ranks.members - 1}")
    return rank


def several(arrays: Arrays, *, written: bool = False) -> Several:
    """An array, or a list or dict of them; `written` if the call writes to them."""
    names: list[str] = []
    found: list[Any]
    if isinstance(arrays, Mapping):
        names = sorted(arrays)
        if any(not isinstance(name, str) or len(name) > m.NAME_CHARS_MAX for name in names):
            raise ValueError(
                f"the keys of a dict of arrays are texts of up to {m.NAME_CHARS_MAX} characters"
            )
        found = [arrays[name] for name in names]
    elif isinstance(arrays, list | tuple):
        found = list(arrays)
    else:
        array, is_copy = native(arrays, written=written)
        return Several([array], [], False, arrays, [arrays], (0,) if is_copy else ())
    if not 0 < len(found) <= m.PARTS_MAX:
        raise ValueError(f"{len(found)} arrays: it must be 1 to {m.PARTS_MAX}")
    each: list[Array] = []
    copied = []
    for i, one in enumerate(found):
        try:
            array, is_copy = native(one, written=written)
        except ValueError as error:
            place = f"the value of {names[i]!r}" if names else f"number {i} of the list"
            raise type(error)(f"{place}: {error}") from None
        each.append(array)
        if is_copy:
            copied.append(i)
    return Several(each, names, True, arrays, found, copied)


def matching(given: Several, recv: Arrays) -> Several:
    """The receiving arrays. Raises ValueError unless they have the form of `given`."""
    found = several(recv)
    if found.names != given.names:
        raise ArgumentError("send and recv must be dicts with the same keys, or neither a dict")
    if len(found.arrays) != len(given.arrays):
        raise ArgumentError(f"send has {len(given.arrays)} arrays, recv {len(found.arrays)}")
    return found


def _gathered(array: Array, block: Buffer, members: int) -> Array:
    """A new array with room for each member's array like this, by rank, each in this memory
    order."""
    order = None if block.layout is None else [0, *(1 + i for i in order_of(array))]
    return new((members, *array.shape), array, order)


def _scattered(array: Array, whole: Buffer, members: int) -> Array:
    """A new array for one member's slice. Raises ValueError if the array cannot be divided."""
    if len(array.shape) == 0 or array.shape[0] % members:
        raise ArgumentError(
            f"send has the shape {tuple(array.shape)}: its first dimension must be a multiple of "
            f"the {members} peers of the group"
        )
    order = None if whole.layout is None else order_of(array)
    return new((array.shape[0] // members, *array.shape[1:]), array, order)


def _check_slice(
    whole_name: str, whole: Buffer, block_name: str, block: Buffer, ranks: Ranks
) -> None:
    """Checks that `whole` consists of one slice for each member, each of them like `block`."""
    if whole.dtype is not block.dtype:
        raise ArgumentError(
            f"{whole_name} is {whole.dtype.name}, {block_name} is {block.dtype.name}"
        )
    if whole.count != ranks.members * block.count:
        raise ArgumentError(
            f"{whole_name} has {whole.count} elements, {block_name} {block.count}: it must be "
            f"{ranks.members} times as many, one for each peer of the group"
        )
    part = None if whole.layout is None else whole.layout.part(ranks.members)
    if part != block.layout or (part is None) != (whole.layout is None):
        raise ArgumentError(
            f"the order in memory of {whole_name} is {whole.order}, of {block_name} {block.order}: "
            f"its {ranks.members} parts must lie one after the other, each like {block_name}. Pass "
            "send in C's order, as a copy if need be, and no recv"
        )
    place = whole.address + ranks.rank * block.nbytes
    if whole.overlaps(block) and block.address != place:
        raise ValueError(
            f"{block_name} overlaps {whole_name}, and is not the part of it of rank {ranks.rank}"
        )


def _check_apart(each: Sequence[Operand]) -> None:
    """Checks that no operand writes to the memory of another one."""
    read, written_to = [], []  # (begin, end, whether it is written)
    for operand in each:
        begin, first = operand.send.address, operand.recv.address
        stop, last = begin + operand.send.nbytes, first + operand.recv.nbytes
        if begin == first or (begin < last and first < stop):  # in place: nested
            first, last = min(begin, first), max(stop, last)
        elif begin < stop:
            read.append((begin, stop, False))
        if first < last:
            written_to.append((first, last, True))
    end = written_end = 0
    for begin, stop, written in sorted(read + written_to):  # fast: usually two sorted runs
        if begin < written_end or (written and begin < end):
            raise ValueError("arrays of the list or dict overlap, and one of them is written to")
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end


def make(
    what: CollectiveKind,
    given: Several,
    each: list[Operand],
    result: Made = nothing,
    *,
    op: ReduceOp | OpName | None = None,
    options: QuantizationOptions | None = None,
    root: int = 0,
    ranks: Ranks | None = None,
    rows: tuple[int, ...] = (),
    send_rows: tuple[int, ...] = (),
    recv_rows: tuple[int, ...] = (),
    uneven: bool = False,
    pair: tuple[int, ...] = (),
) -> Operands:
    """The operands of a collective over these arrays; `ranks` if it depends on ranks.

    `result` returns what the collective gives its caller.
    """
    redop = None if op is None else reduce_op(op)
    quantized = 0, 0
    if options is not None:
        for dtype in {operand.send.dtype for operand in each}:
            try:
                quantized = fingerprint(options, dtype, redop or ReduceOp.SUM)
            except ValueError as error:
                raise error_for(Result.INVALID_ARGUMENT, what, str(error)) from None
    parts = tuple(map(_part, each, given.names or [""] * len(each)))
    one = parts[0]
    if given.is_list:
        _check_apart(each)
        _check_size(parts)
        one = m.Part(0, 0)
    else:
        parts = ()
    members, ring = (ranks.members, ranks.ring) if ranks is not None else (0, 0)
    arrays = one.dtype, one.count, *quantized, root, members, parts, one.layout, rows, ring
    spec = m.Spec(what, 0 if redop is None else redop.value, *arrays)
    return Operands(spec, tuple(each), send_rows, recv_rows, uneven, pair=pair, result=result)


def _part(operand: Operand, name: str) -> m.Part:
    """The facts about one array, or one of its slices, that all peers must agree on."""
    send, recv = operand.send, operand.recv
    block = recv if 0 < recv.count < send.count or not send.count else send
    layout = "" if block.layout is None else str(block.layout)
    return m.Part(block.dtype.value, operand.count, name, layout)


def _check_size(parts: tuple[m.Part, ...]) -> None:
    texts = sum(len(part.name.encode()) + len(part.layout) for part in parts)
    nbytes = m.PART_BYTES_MAX * len(parts) + texts
    if nbytes > m.LIST_BYTES_MAX:
        raise ValueError(
            f"{len(parts)} arrays take {nbytes} bytes of a message to the master, with their keys: "
            f"it must be at most {m.LIST_BYTES_MAX}. Use shorter keys, or fewer, larger arrays"
        )


def _numbers(name: str, rows: Sequence[int], ranks: Ranks) -> tuple[int, ...]:
    numbers = tuple(map(operator.index, rows))
    if len(numbers) != ranks.members or any(not 0 <= n < 1 << 48 for n in numbers):
        raise ValueError(
            f"{name} is {list(numbers)}: it must have a number of rows for each of the "
            f"{ranks.members} peers of the group"
        )
    return numbers


def _row(name: str, array: Array, buffer: Buffer, rows: int, as_what: str) -> int:
    """The elements of a row of an array, which must have this number of rows."""
    if len(array.shape) == 0 or array.shape[0] != rows or buffer.layout is not None:
        raise ArgumentError(
            f"{name} has the shape {tuple(array.shape)}, and lies in memory {buffer.order}: it "
            f"must have {rows} rows, as {as_what}, in C's order"
        )
    return math.prod(array.shape[1:])


def _check_rows(array: Array, whole: Buffer, members: int) -> None:
    """Checks that an array consists of a part for each member, one after the other."""
    mixed = whole.layout is not None and whole.layout.part(members) is None
    if len(array.shape) == 0 or array.shape[0] % members or mixed:
        lies = f", and lies in memory as {whole.order}" if mixed else ""
        raise ArgumentError(
            f"send has the shape {tuple(array.shape)}{lies}: its first dimension must be a "
            f"multiple of the {members} peers of the group, and the outermost one in memory"
        )


def _like(array: Array) -> Array:
    order = None if Buffer.of(array).layout is None else order_of(array)
    return new(tuple(array.shape), array, order)


def send(arrays: Arrays, pair: tuple[int, int]) -> Operands:
    rows = (0, 1)  # by position in `pair`
    return make(CollectiveKind.SEND, *_only_sent(arrays), send_rows=rows, pair=pair)


def recv(arrays: Arrays, pair: tuple[int, int]) -> Operands:
    return make(CollectiveKind.SEND, *_only_received(arrays), recv_rows=(1, 0), pair=pair)


def _only_sent(arrays: Arrays, result: Made | None = None) -> Described:
    given = several(arrays)
    buffers = map(Buffer.of, given.arrays)
    each = [Operand(one, _nothing(one), one.count) for one in buffers]
    return given, each, result or given.result


def _only_received(arrays: Arrays) -> Described:
    given = several(arrays, written=True)
    buffers = [Buffer.of(array, writable=True) for array in given.arrays]
    return given, [Operand(_nothing(one), one, one.count) for one in buffers], given.result


def _nothing(like: Buffer) -> Buffer:
    """An empty buffer with the dtype and device of another."""
    return Buffer.at(0, 0, like.dtype, None, like.device_type)


def _only(rank: int, ranks: Ranks) -> tuple[int, ...]:
    return tuple(int(each == rank) for each in range(ranks.members))


def _one_each(ranks: Ranks) -> tuple[int, ...]:
    return (1,) * ranks.members


# The votes at the start and at the end take as long for a few bytes as for many, and a model of 150
# tensors would spend most of its time on them. So several all-reduces become one bundle. Bundles
# depend only on the descriptors, so all peers make the same ones.
BUNDLE_BYTES = 64 << 20  # a larger list makes several concurrent bundles
BUNDLE_PARTS = 1024  # most descriptors in a bundle


def bundles(descriptors: Sequence[ReduceOpDescriptor]) -> list[list[ReduceOpDescriptor]]:
    """Cuts the list into bundles of the same operation, element type and quantization."""
    made: list[list[ReduceOpDescriptor]] = []
    nbytes = 0
    for descriptor in descriptors:
        nbytes += (size := _nbytes(descriptor))
        alike = bool(made) and _kind(made[-1][0]) == _kind(descriptor)
        if alike and nbytes <= BUNDLE_BYTES and len(made[-1]) < BUNDLE_PARTS:
            made[-1].append(descriptor)
        else:
            made.append([descriptor])
            nbytes = size
    return made


def _nbytes(descriptor: ReduceOpDescriptor) -> int:
    work = descriptor.reduce_descriptor
    return work.count * work.operand_descriptor.datatype.itemsize


def _kind(descriptor: ReduceOpDescriptor) -> tuple[object, ...]:
    work = descriptor.reduce_descriptor
    return work.op, work.operand_descriptor.datatype, work.quantization_options
