"""Converts tensors and reductions of torch to forms that pccl can move and reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

import pccl
from pccl.types import DataType


def flat(tensor: Tensor) -> Tensor:
    """All elements in one dimension: a view of a contiguous tensor, or a copy of any other."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        raise ValueError(f"a tensor of layout {dense.layout} cannot be sent: pass a dense one")
    dense = dense.resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).view(-1)


def movable(tensor: Tensor) -> Tensor:
    """Like `flat`, but elements of a dtype that pccl cannot reduce become bytes."""
    elements = flat(tensor)
    try:
        DataType.from_torch_dtype(elements.dtype)
    except ValueError:
        return elements.view(torch.uint8)
    return elements


def moved_size(tensor: Tensor) -> int:
    """The number of elements of `movable(tensor)`."""
    return movable(tensor.new_empty(1)).numel() * tensor.numel()


def reducible(tensor: Tensor) -> Tensor:
    """Like `flat`, but bools become bytes. Raises ValueError: pccl cannot reduce the dtype."""
    elements = flat(tensor)
    if tensor.dtype == torch.bool:
        return elements.view(torch.uint8)
    DataType.from_torch_dtype(elements.dtype)
    return elements


def put(tensor: Tensor, piece: Tensor) -> None:
    """Copies `piece`, the `flat` or `movable` form of `tensor`, back unless it is a view."""
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
# of bools, which are bytes of 0 and 1
_OF_BOOL = {
    pccl.ReduceOp.SUM: pccl.ReduceOp.MAX,
    pccl.ReduceOp.PROD: pccl.ReduceOp.MIN,
    pccl.ReduceOp.MAX: pccl.ReduceOp.MAX,
    pccl.ReduceOp.MIN: pccl.ReduceOp.MIN,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of torch.

    Attributes:
        op: pccl's operation; None: pccl has none.
        factor: the factor of each member's contribution; None: 1.
        bitwise: a function that combines two contributions, if pccl has no operation.
    """

    op: pccl.ReduceOp | None
    factor: float | Tensor | None = None
    bitwise: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, op: object) -> Reduction:
        """The reduction for torch's ReduceOp, or a member of its enumeration."""
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

    def for_dtypes(self, tensors: Sequence[Tensor]) -> pccl.ReduceOp:
        """pccl's operation on the elements of all these tensors. Raises ValueError: it has none."""
        op, dtypes = self.op, {tensor.dtype for tensor in tensors}
        assert op is not None
        unlike = [dtype for dtype in dtypes if dtype.is_complex]
        if unlike and op not in (pccl.ReduceOp.SUM, pccl.ReduceOp.AVG):
            raise ValueError(f"{op.name} of {unlike[0]} is not supported: complex numbers add up")
        if torch.bool not in dtypes:
            return op
        if op not in _OF_BOOL:
            raise ValueError(f"{op.name} of torch.bool is not defined")
        if len(dtypes) > 1 and _OF_BOOL[op] is not op:
            raise ValueError("bools and numbers cannot be reduced by one call")
        return _OF_BOOL[op]

    def given(self, tensor: Tensor, *, copied: bool = False) -> Tensor:
        """This member's contribution: the tensor's own memory, if possible and not `copied`."""
        piece = reducible(tensor)
        return self.scaled(piece.clone() if copied else piece, tensor.dtype)

    def combine(self, contributions: Sequence[Tensor]) -> Tensor:
        assert self.bitwise is not None
        return reduce(self.bitwise, contributions)

    def scaled(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements of a tensor of `dtype`, times the factor.

        Raises ValueError: the dtype cannot hold the products, or cannot be added.
        """
        if self.factor is None:
            return piece
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
        products = wide * factor.to(torch.int64)  # modulo 2**64, which is correct for every dtype
        return products.view(dtype) if dtype == torch.uint64 else products.to(dtype)
