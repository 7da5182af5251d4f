"""Tensors as collectives take them: flat, without gaps, of an element type that pccl has."""

from __future__ import annotations

import torch
from torch import Tensor

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
