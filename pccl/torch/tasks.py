"""What each collective of torch does on a communicator, as tasks to launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pccl import Communicator, kernels
from pccl.calls import operands
from pccl.runtime.client.memory import Operands
from pccl.torch.members import Members
from pccl.torch.pieces import flat, movable, put
from pccl.torch.reductions import Reduction
from pccl.torch.sparse import sparse_all_reduce
from pccl.torch.work import Handle, Task


def _one_or_list(pieces: list[Tensor]) -> Any:
    """A single tensor alone: small ones then travel with the votes."""
    return pieces[0] if len(pieces) == 1 else pieces


class Tasks:
    """Makes the tasks of one group. What they are given is checked before they are launched."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members

    def _launch(self, name: str, work: Operands, tag: int) -> Handle:
        return self._comm.parts.launcher.launch(name, work, tag)

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
            for tensor, piece, rows in zip(tensors, pieces, gathered, strict=False):
                piece.copy_(reduction.combine(list(rows)))
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
            for group, rows in zip(outputs, gathered, strict=True):
                for number, row in zip(rings[0], rows, strict=True):
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
