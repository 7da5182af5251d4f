"""What each collective of torch does on a communicator, as tasks to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

import pccl
from pccl import Communicator, extension, kernels, operands
from pccl.extension import Operands
from pccl.torch.members import Members
from pccl.torch.work import Handle, Task
from pccl.types import DataType


def flat(tensor: Tensor) -> Tensor:
    """All elements in one dimension; a view if they lie in C's order, or else a copy."""
    lying = tensor.detach()
    if lying.layout != torch.strided:
        raise ValueError(f"a tensor of layout {lying.layout} cannot be sent: pass a dense one")
    lying = lying.resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(lying) if lying.is_complex() else lying).view(-1)


def movable(tensor: Tensor) -> Tensor:
    """Like `flat`; elements of a type that pccl does not compute with are bytes."""
    lying = flat(tensor)
    try:
        DataType.from_torch_dtype(lying.dtype)
    except ValueError:
        return lying.view(torch.uint8)
    return lying


def put(tensor: Tensor, piece: Tensor) -> None:
    """Gives a tensor the elements of what `flat` or `movable` has made of it, if that is a copy."""
    target = tensor.detach()
    if target.data_ptr() == piece.data_ptr():
        return
    target.copy_(piece.view(target.dtype).view(target.shape))


_SAME = {
    ReduceOp.SUM: pccl.ReduceOp.SUM,
    ReduceOp.AVG: pccl.ReduceOp.AVG,
    ReduceOp.MIN: pccl.ReduceOp.MIN,
    ReduceOp.MAX: pccl.ReduceOp.MAX,
    ReduceOp.PRODUCT: pccl.ReduceOp.PROD,
    ReduceOp.PREMUL_SUM: pccl.ReduceOp.SUM,
}
_BITWISE: dict[object, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# of truth values, which are bytes of 0 and 1
_OF_BOOL = {
    pccl.ReduceOp.SUM: pccl.ReduceOp.MAX,
    pccl.ReduceOp.PROD: pccl.ReduceOp.MIN,
    pccl.ReduceOp.MAX: pccl.ReduceOp.MAX,
    pccl.ReduceOp.MIN: pccl.ReduceOp.MIN,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is done to the contributions.

    Attributes:
        op: pccl's operation; None: it has none.
        factor: by which each member multiplies what it gives; None: by nothing.
        bitwise: what combines two contributions where pccl has no operation.
    """

    op: pccl.ReduceOp | None
    factor: float | Tensor | None = None
    bitwise: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, op: object) -> Reduction:
        """The one of torch's ReduceOp, or of a member of its enumeration.

        Raises:
            ValueError: there is none.
        """
        kind = getattr(op, "op", op)
        if kind in _SAME:
            factor = None
            if kind == ReduceOp.PREMUL_SUM:
                if not isinstance(op, ReduceOp):
                    raise ValueError("PREMUL_SUM needs a factor: dist._make_nccl_premul_sum(f)")
                state: Any = op.__getstate__()  # the operation, and its factor
                factor = state[1]
            return cls(_SAME[kind], factor)
        if kind in _BITWISE:
            return cls(None, bitwise=_BITWISE[kind])
        raise ValueError(f"{op} is not a reduction that torch.distributed defines")

    def for_dtype(self, dtype: torch.dtype) -> pccl.ReduceOp:
        """pccl's operation on elements of a type.

        Raises:
            ValueError: there is none.
        """
        assert self.op is not None
        if dtype.is_complex and self.op not in (pccl.ReduceOp.SUM, pccl.ReduceOp.AVG):
            raise ValueError(f"{self.op.name} of {dtype} is not supported: complex numbers add up")
        if dtype != torch.bool:
            return self.op
        if self.op not in _OF_BOOL:
            raise ValueError(f"{self.op.name} of torch.bool is not defined")
        return _OF_BOOL[self.op]

    def scaled(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """What a member gives: `piece`, the elements of a tensor of `dtype`, times the factor.

        Raises:
            ValueError: the type cannot hold the products, or cannot be added.
        """
        if self.factor is None:
            return piece
        DataType.from_torch_dtype(piece.dtype)  # which pccl can add
        factor = torch.as_tensor(self.factor)
        whole = not dtype.is_floating_point and not dtype.is_complex
        if dtype == torch.bool or factor.is_complex() or (whole and factor.is_floating_point()):
            raise ValueError(
                f"PREMUL_SUM of {dtype} by a factor of {factor.dtype} is not supported: {dtype} "
                "cannot hold the products"
            )
        factor = factor.to(piece.device)
        if not whole:
            return (piece * factor).to(piece.dtype)
        wide = piece.view(torch.int64) if dtype == torch.uint64 else piece.to(torch.int64)
        products = wide * factor.to(torch.int64)  # modulo 2**64, and so right in every type
        return products.view(dtype) if dtype == torch.uint64 else products.to(dtype)

    def combine(self, contributions: Sequence[Tensor]) -> Tensor:
        """The bitwise combination of all."""
        assert self.bitwise is not None
        return reduce(self.bitwise, contributions)


def sparse_all_reduce(
    comm: Communicator, members: Members, tensor: Tensor, reduction: Reduction
) -> Task:
    """Sums up sparse tensors (COO) of any numbers of elements: gathers them, and adds up.

    The members first agree upon the largest number of elements, to which all fill up. It is
    launched again if a peer is lost.
    """
    if reduction.op not in (pccl.ReduceOp.SUM, pccl.ReduceOp.AVG):
        raise ValueError("sparse tensors can be summed or averaged, and nothing else")
    given = tensor.detach().coalesce()
    indices, values = given.indices().t().contiguous(), given.values().contiguous()
    values = reduction.scaled(values, values.dtype)
    gathered: list[list[Tensor]] = []

    def launch(tag: int) -> Handle:
        room = _largest(comm, len(values), tag)
        count = torch.tensor([len(values)])
        sent = [count, _filled(indices, room), _filled(values, room)]
        ring = members.ring()
        gathered[:] = [[each.new_empty((len(ring), *each.shape)) for each in sent]]
        work, _ = operands.all_gather(sent, gathered[0], members.ranks(ring))
        return extension.launch(comm, "all_reduce", work, tag)

    def settle() -> None:
        if not gathered:
            return
        counts, places, numbers = gathered[0]
        parts = [
            torch.sparse_coo_tensor(
                place[:count].t(), number[:count], given.shape, check_invariants=True
            )
            for count, place, number in zip(counts.view(-1), places, numbers, strict=True)
        ]
        total: Any = sum(parts[1:], parts[0]).coalesce()
        tensor.copy_(total / len(parts) if reduction.op is pccl.ReduceOp.AVG else total)

    return Task("all_reduce", launch, [tensor], gathered.clear, settle, again=True)


def _largest(comm: Communicator, number: int, tag: int) -> int:
    """The largest of all members' numbers."""
    largest = torch.tensor([number])
    handle = comm.all_reduce_async(largest, op="max", tag=tag)
    if not handle.wait()[0]:
        assert handle.error is not None
        raise handle.error
    return int(largest)


def _filled(piece: Tensor, count: int) -> Tensor:
    return torch.cat([piece, piece.new_zeros((count - len(piece), *piece.shape[1:]))])


def _one_or_list(pieces: list[Tensor]) -> Any:
    """A single tensor alone: small ones then travel with the votes."""
    return pieces[0] if len(pieces) == 1 else pieces


class Tasks:
    """Makes the tasks of one group. What they are given is checked before they are launched."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members

    def _launch(self, name: str, work: Operands, tag: int) -> Handle:
        return extension.launch(self._comm, name, work, tag)

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        reduction: Reduction,
        quantization: str | None = None,
    ) -> Task:
        """Reduces tensors, in place. It is launched again if a peer is lost."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            return sparse_all_reduce(self._comm, self._members, tensors[0], reduction)
        if reduction.bitwise is not None:
            return self._all_reduce_bitwise(tensors, reduction)
        pieces = [self._given(tensor, reduction) for tensor in tensors]
        ops = {reduction.for_dtype(tensor.dtype) for tensor in tensors}
        if len(ops) > 1:
            raise ValueError("truth values and numbers cannot be reduced by one call")
        op = ops.pop()

        def launch(tag: int) -> Handle:
            what = _one_or_list(pieces)
            return self._comm.all_reduce_async(what, op=op, tag=tag, quantization=quantization)

        def settle() -> None:
            for tensor, piece in zip(tensors, pieces, strict=True):
                put(tensor, piece)

        return Task("all_reduce", launch, list(tensors), settle=settle, again=True)

    @staticmethod
    def _given(tensor: Tensor, reduction: Reduction) -> Tensor:
        """What is reduced for a tensor: its own memory, if possible."""
        piece = movable(tensor) if tensor.dtype == torch.bool else flat(tensor)
        return reduction.scaled(piece, tensor.dtype)

    def _all_reduce_bitwise(self, tensors: Sequence[Tensor], reduction: Reduction) -> Task:
        """As a gather: pccl has no such operation."""
        if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            raise ValueError("bitwise operations are for integers and truth values")
        pieces = [movable(tensor) for tensor in tensors]
        gathered: list[Tensor] = []

        def launch(tag: int) -> Handle:
            ring = self._members.ring()
            gathered[:] = [piece.new_empty((len(ring), piece.numel())) for piece in pieces]
            work, _ = operands.all_gather(pieces, gathered, self._members.ranks(ring))
            return self._launch("all_reduce", work, tag)

        def settle() -> None:
            for tensor, piece, given in zip(tensors, pieces, gathered, strict=False):
                piece.copy_(reduction.combine(list(given)))
                put(tensor, piece)

        return Task("all_reduce", launch, list(tensors), gathered.clear, settle, again=True)

    def quantized_mean(self, target: Tensor, payload: Tensor, format: kernels.Format) -> Task:
        """Gathers what all members have quantized; the mean, computed in float32, goes to `target`.

        It is launched again if a peer is lost.
        """
        gathered: list[Tensor] = [payload[None]]

        def launch(tag: int) -> Handle:
            ring = self._members.ring()
            gathered[:] = [payload.new_empty((len(ring), payload.numel()))]
            work, _ = operands.all_gather(payload, gathered[0], self._members.ranks(ring))
            return self._launch("all_gather", work, tag)

        def alone() -> None:
            gathered[:] = [payload[None]]

        def settle() -> None:
            rows = gathered[0]
            whole = flat(target)
            straight = whole.is_cpu and whole.dtype == torch.float32
            straight &= format != "sparse"  # which may turn out to be invalid: it changes nothing
            mean = whole if straight else torch.empty(whole.numel(), dtype=torch.float32)
            kernels.mean(mean, list(rows), format)
            if straight:
                put(target, mean)
            else:
                target.copy_(mean.view(target.shape))

        return Task("all_gather", launch, [target], alone, settle, again=True)

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> Task:
        """Copies the tensors of one member to all."""
        if not 0 <= root < self._members.size:
            raise ValueError(f"root is {root}: ranks are 0 to {self._members.size - 1}")
        pieces = [movable(tensor) for tensor in tensors]
        source = self._members.order[root]

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            at = ring.index(source)
            work = operands.broadcast(_one_or_list(pieces), at, self._members.ranks(ring))
            return self._launch("broadcast", work, tag)

        def settle() -> None:
            for tensor, piece in zip(tensors, pieces, strict=True):
                put(tensor, piece)

        return Task("broadcast", launch, list(tensors), settle=settle)

    def all_gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Task:
        """Gathers each input of all members: `outputs[i][r]` is the i-th input of rank r."""
        order = self._members.order
        for group in outputs:
            self._check_count("output tensors", len(group))
        pieces = [movable(tensor) for tensor in inputs]
        gathered = [piece.new_empty((len(order), piece.numel())) for piece in pieces]
        rings: list[tuple[int, ...]] = []

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            rings[:] = [ring]
            work, _ = operands.all_gather(
                _one_or_list(pieces), _one_or_list(gathered), self._members.ranks(ring)
            )
            return self._launch("all_gather", work, tag)

        def settle() -> None:
            for group, given in zip(outputs, gathered, strict=True):
                for number, row in zip(rings[0], given, strict=True):
                    put(group[order.index(number)], row)

        def alone() -> None:
            for (output,), piece in zip(outputs, pieces, strict=True):
                put(output, piece)
            rings.clear()

        result = [list(group) for group in outputs]
        return Task("all_gather", launch, result, alone, lambda: settle() if rings else None)

    def all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Task:
        """Gathers each input of all members, in one output each, by rank."""
        size = self._members.size
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != size * given.numel():
                raise ValueError(
                    f"the output has {output.numel()} elements, the input {given.numel()}: it must "
                    f"be {size} times as many, one for each member"
                )
            if output.dtype != given.dtype:
                raise ValueError(f"the output is {output.dtype}, the input {given.dtype}")
        order = self._members.order
        pieces = [movable(tensor) for tensor in inputs]
        wholes = [movable(tensor) for tensor in outputs]
        rings: list[tuple[int, ...]] = []

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            rings[:] = [ring]
            work, _ = operands.all_gather(
                _one_or_list(pieces), _one_or_list(wholes), self._members.ranks(ring)
            )
            return self._launch("all_gather", work, tag)

        def settle() -> None:
            for output, whole in zip(outputs, wholes, strict=True):
                if rings and rings[0] != order:  # the rows lie in the order of the ring
                    rows = whole.view(size, -1)
                    rows.copy_(rows[[rings[0].index(number) for number in order]])
                put(output, whole)

        def alone() -> None:
            rings.clear()
            for whole, piece in zip(wholes, pieces, strict=True):
                whole.copy_(piece)

        return Task("all_gather", launch, list(outputs), alone, settle)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        reduction: Reduction,
    ) -> Task:
        """Reduces; `outputs[i]` gets the sum of all members' `inputs[i][r]`, on rank r."""
        if reduction.bitwise is not None:
            raise ValueError("a bitwise reduce_scatter is not supported: use all_reduce")
        order = self._members.order
        for group in inputs:
            self._check_count("input tensors", len(group))
        targets = [self._given(tensor, Reduction(reduction.op)) for tensor in outputs]
        sources = [[self._given(tensor, reduction) for tensor in group] for group in inputs]
        ops = {reduction.for_dtype(tensor.dtype) for tensor in outputs}
        if len(ops) > 1:
            raise ValueError("truth values and numbers cannot be reduced by one call")
        op = ops.pop()

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            wholes = [torch.cat([group[order.index(n)] for n in ring]) for group in sources]
            work, _ = operands.reduce_scatter(
                _one_or_list(wholes), _one_or_list(targets), op, None, self._members.ranks(ring)
            )
            return self._launch("reduce_scatter", work, tag)

        def settle() -> None:
            for output, target in zip(outputs, targets, strict=True):
                put(output, target)

        def alone() -> None:
            for target, (source,) in zip(targets, sources, strict=True):
                target.copy_(source)

        return Task("reduce_scatter", launch, list(outputs), alone, settle)

    def reduce_scatter_single(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction
    ) -> Task:
        """Reduces each input, whose r-th part rank r gets."""
        size = self._members.size
        for output, given in zip(outputs, inputs, strict=True):
            if given.numel() != size * output.numel():
                raise ValueError(
                    f"the input has {given.numel()} elements, the output {output.numel()}: it must "
                    f"be {size} times as many, one part for each member"
                )
            if output.dtype != given.dtype:
                raise ValueError(f"the output is {output.dtype}, the input {given.dtype}")
        rows = [list(given.detach().reshape(-1).view(size, -1).unbind()) for given in inputs]
        return self.reduce_scatter(outputs, rows, reduction)

    def barrier(self) -> Task:
        """Waits for all."""
        return Task("barrier", lambda tag: self._comm.barrier_async(tag=tag), [], again=True)

    def _check_count(self, what: str, count: int) -> None:
        if count != self._members.size:
            raise ValueError(
                f"{count} {what}: it must be one for each of the {self._members.size} members"
            )


class ExchangeTasks:
    """Makes the tasks of one group. Ranks are torch's."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members

    def _launch(self, name: str, work: Operands, tag: int) -> Handle:
        return extension.launch(self._comm, name, work, tag)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._members.size:
            raise ValueError(f"rank {rank}: ranks are 0 to {self._members.size - 1}")
        return self._members.order[rank]

    def _in_ring_order(self, pieces: Sequence[Tensor], ring: Sequence[int]) -> Tensor:
        """Pieces by torch's rank, one after the other by the position in the ring."""
        order = self._members.order
        return torch.cat([pieces[order.index(number)] for number in ring])

    def _hand_out(self, outputs: Sequence[Tensor], whole: Tensor, ring: Sequence[int]) -> None:
        order = self._members.order
        for number, row in zip(ring, whole, strict=True):
            put(outputs[order.index(number)], row)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Task:
        """Reduces; only the root's tensor gets the result."""
        if reduction.bitwise is not None:
            raise ValueError("a bitwise reduce is not supported: use all_reduce")
        given = movable(tensor) if tensor.dtype == torch.bool else flat(tensor)
        piece = reduction.scaled(given.clone(), tensor.dtype)
        op, target = reduction.for_dtype(tensor.dtype), self._peer(root)

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            at = ring.index(target)
            work = operands.reduce(piece, None, at, op, None, self._members.ranks(ring))
            return self._launch("reduce", work, tag)

        def settle() -> None:
            if target == self._members.own:
                put(tensor, piece)

        return Task("reduce", launch, [tensor], settle=settle)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Task:
        """Gathers one tensor of each member on the root, whose `outputs` get them by rank."""
        target, size = self._peer(root), self._members.size
        mine = target == self._members.own
        if mine and len(outputs) != size:
            raise ValueError(f"{len(outputs)} output tensors: it must be one for each of {size}")
        piece = movable(tensor)
        whole = piece.new_empty((size, piece.numel())) if mine else None
        rings: list[tuple[int, ...]] = []

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            rings[:] = [ring]
            work, _ = operands.gather(piece, whole, ring.index(target), self._members.ranks(ring))
            return self._launch("gather", work, tag)

        def settle() -> None:
            if whole is not None and rings:
                self._hand_out(outputs, whole, rings[0])

        def alone() -> None:
            rings.clear()
            put(outputs[0], piece)

        return Task("gather", launch, [list(outputs)], alone, settle)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Task:
        """Gives each member one of the root's `inputs`, by rank."""
        source, size = self._peer(root), self._members.size
        mine = source == self._members.own
        if mine and len(inputs) != size:
            raise ValueError(f"{len(inputs)} input tensors: it must be one for each of {size}")
        pieces = [movable(tensor) for tensor in inputs] if mine else []
        target = movable(output)

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            send = self._in_ring_order(pieces, ring) if mine else None
            work, _ = operands.scatter(send, target, ring.index(source), self._members.ranks(ring))
            return self._launch("scatter", work, tag)

        def alone() -> None:
            target.copy_(pieces[0])

        return Task("scatter", launch, [output], alone, lambda: put(output, target))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Task:
        """Gives each member one of `inputs`, and takes one of `outputs` from each, by rank.

        They may differ in size, and be empty.
        """
        size = self._members.size
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != size:
                raise ValueError(
                    f"{len(tensors)} {what} tensors: it must be one for each of {size}"
                )
        order = self._members.order
        sent, targets = [movable(t) for t in inputs], [movable(t) for t in outputs]
        received: list[tuple[Tensor, int]] = []  # and whose it is

        def launch(tag: int) -> Handle:
            ring = self._members.known_ring()
            gives = [sent[order.index(number)].numel() for number in ring]
            takes = [targets[order.index(number)].numel() for number in ring]
            send = self._in_ring_order(sent, ring)
            recv = send.new_empty(sum(takes))
            received[:] = zip(torch.split(recv, takes), ring, strict=True)
            work, _ = operands.all_to_all(send, recv, gives, takes, self._members.ranks(ring))
            return self._launch("all_to_all", work, tag)

        def settle() -> None:
            for row, number in received:
                put(outputs[order.index(number)], row)

        def alone() -> None:
            received[:] = [(sent[0], order[0])]

        return Task("all_to_all", launch, list(outputs), alone, settle)
