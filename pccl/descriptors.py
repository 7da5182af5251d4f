"""The descriptors of the collectives of `Communicator.all_reduce_multiple_with_retry`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pccl.tensors import Array, Buffer, pair
from pccl.types import DataType, DistributionHint, QuantizationOptions, ReduceOp

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(slots=True)
class ReduceOperandDescriptor:
    """The element type of a collective.

    >>> ReduceOperandDescriptor(DataType.FLOAT).datatype.itemsize
    4

    Attributes:
        datatype: must be that of the arrays.
        distribution_hint: not used.
    """

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(slots=True)
class ReduceDescriptor:
    """One collective of `Communicator.all_reduce_multiple_with_retry`.

    >>> floats = ReduceOperandDescriptor(DataType.FLOAT)
    >>> ReduceDescriptor(1000, ReduceOp.AVG, 7, floats, None).count
    1000

    Attributes:
        count: number of elements.
        op: the operation.
        tag: distinguishes collectives that run at the same time.
        operand_descriptor: the element type.
        quantization_options: None: not quantized.
    """

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions | None


@dataclass(slots=True)
class ReduceOpDescriptor:
    """One collective of `Communicator.all_reduce_multiple_with_retry` and its memory.

    >>> import numpy as np
    >>> x = np.ones(1000, np.float32)
    >>> floats = ReduceOperandDescriptor(DataType.FLOAT)
    >>> work = ReduceDescriptor(x.size, ReduceOp.AVG, 7, floats, None)
    >>> described = ReduceOpDescriptor.from_numpy(x, x, work)
    >>> described.sendbuf_ptr == described.recvbuf_ptr  # in place
    True

    Attributes:
        sendbuf_ptr: address of `reduce_descriptor.count` elements.
        recvbuf_ptr: address of as many elements; the same address means in place.
        reduce_descriptor: what the collective does.
    """

    sendbuf_ptr: int
    recvbuf_ptr: int
    reduce_descriptor: ReduceDescriptor
    # The memory of the arrays that were described; None: only addresses were given.
    _buffers: tuple[Buffer, Buffer] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def from_torch(
        send: torch.Tensor, recv: torch.Tensor, reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """Describes a collective of two tensors, and keeps them alive.

        Raises:
            ValueError: the tensors do not match (`pccl.tensors.pair`); or their dtype or
                count contradicts `reduce_descriptor`.
        """
        return _describe(send, recv, reduce_descriptor)

    @staticmethod
    def from_numpy(
        send: np.ndarray[Any, Any], recv: np.ndarray[Any, Any], reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """Describes a collective of two numpy arrays; otherwise like `from_torch`."""
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
    return ReduceOpDescriptor(source.address, target.address, work, (source, target))
