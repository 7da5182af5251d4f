"""The sum of sparse tensors, such as gradients of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import pccl
from pccl import Communicator
from pccl.calls import operands
from pccl.torch.members import Members
from pccl.torch.reductions import Reduction
from pccl.torch.work import Handle, Task


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
        return comm.parts.launcher.launch("all_reduce", work, tag)

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
