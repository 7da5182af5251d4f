"""torch's collectives with a root, and its exchanges of rows, as tasks to launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pccl import Communicator
from pccl.calls import rows
from pccl.runtime.client.memory import Operands
from pccl.torch.members import Members
from pccl.torch.pieces import flat, movable, put
from pccl.torch.reductions import Reduction
from pccl.torch.work import Handle, Task


class ExchangeTasks:
    """Makes the tasks of one group. Ranks are torch's."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members

    def _launch(self, name: str, work: Operands, tag: int) -> Handle:
        return self._comm.parts.launcher.launch(name, work, tag)

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
            work = rows.reduce(piece, None, at, op, None, self._members.ranks(ring))
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
            work, _ = rows.gather(piece, whole, ring.index(target), self._members.ranks(ring))
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
            work, _ = rows.scatter(send, target, ring.index(source), self._members.ranks(ring))
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
            work, _ = rows.all_to_all(send, recv, gives, takes, self._members.ranks(ring))
            return self._launch("all_to_all", work, tag)

        def settle() -> None:
            for row, number in received:
                put(outputs[order.index(number)], row)

        def alone() -> None:
            received[:] = [(sent[0], order[0])]

        return Task("all_to_all", launch, list(outputs), alone, settle)
