"""What `Communicator.all_reduce_multiple_with_retry` is told of each of its collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pccl.tensors.arrays import Array, pair
from pccl.tensors.layout import Layout
from pccl.types import DataType, DistributionHint, QuantizationOptions, ReduceOp

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(slots=True)
class ReduceOperandDescriptor:
    """What the elements of a collective are.

    Attributes:
        datatype: must be that of the arrays.
        distribution_hint: for quantizers.
    """

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(slots=True)
class ReduceDescriptor:
    """What one collective of `Communicator.all_reduce_multiple_with_retry` does.

    Attributes:
        count: elements.
        op: what is computed.
        tag: tells collectives that are under way at the same time apart.
        operand_descriptor: what the elements are.
        quantization_options: None is not quantized.
    """

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions | None


@dataclass(slots=True)
class ReduceOpDescriptor:
    """One collective of `Communicator.all_reduce_multiple_with_retry` and its memory.

    Attributes:
        sendbuf_ptr: address of `reduce_descriptor.count` elements.
        recvbuf_ptr: address of as many; the same one is in place.
        reduce_descriptor: what to do.
    """

    sendbuf_ptr: int
    recvbuf_ptr: int
    reduce_descriptor: ReduceDescriptor
    _owners: tuple[object, ...] = field(default=(), repr=False, compare=False)
    _layout: Layout | None = field(default=None, repr=False, compare=False)  # of both arrays

    @staticmethod
    def from_torch(
        send: torch.Tensor, recv: torch.Tensor, reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """Describes a collective of two tensors, and keeps them alive.

        Raises:
            ValueError, AssertionError: the tensors do not go together (`pccl.tensors.arrays.pair`).
            ValueError: they have another dtype, or fewer elements, than `reduce_descriptor` says.
        """
        return _describe(send, recv, reduce_descriptor)

    @staticmethod
    def from_numpy(
        send: np.ndarray[Any, Any], recv: np.ndarray[Any, Any], reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """Describes a collective of two arrays; otherwise as `from_torch`."""
        return _describe(send, recv, reduce_descriptor)


def _describe(send: Array, recv: Array, work: ReduceDescriptor) -> ReduceOpDescriptor:
    source, target = pair(send, recv)
    wanted = work.operand_descriptor.datatype
    if source.dtype is not wanted:
        raise ValueError(f"the descriptor says {wanted.name}, the arrays are {source.dtype.name}")
    if source.count < work.count:
        raise ValueError(
            f"the descriptor says {work.count} elements, the arrays have {source.count}"
        )
    if source.layout is not None and source.count > work.count:
        raise ValueError(
            f"the descriptor says {work.count} elements, the first of {source.count} of arrays "
            f"that do not lie in C's order ({source.order}): describe all, or a part of a copy"
        )
    owners = send, recv
    return ReduceOpDescriptor(source.address, target.address, work, owners, source.layout)
