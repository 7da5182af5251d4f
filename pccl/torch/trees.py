"""State dicts taken apart into tensors and the rest, and put together again."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pccl.shared_state import SharedState, TensorInfo
from pccl.torch.pieces import movable, put


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is in this process; any other tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_again(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer of sharded parameters, from the local parts of its tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def like(parameter: Tensor, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or part.shape != parameter.to_local().shape:
            return part
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    each = {
        index: mapped(values, partial(like, parameters[index]))
        for index, values in state["state"].items()
    }
    return {**state, "state": each}


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree of dicts, lists and tuples with changed tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(value, change) for value in tree])
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors, in the order of the tree."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(local(tensor))
        return tensor

    mapped(tree, note)
    return found


def packed(tree: Any) -> bytes:
    """A tree whose tensors have no content, as bytes."""
    file = io.BytesIO()
    torch.save(mapped(tree, lambda tensor: local(tensor).to("meta")), file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """A tree of `packed`, whose tensors have any content, on the CPU.

    Only plain values and tensors are read: the bytes come from another peer.
    """
    tree = torch.load(io.BytesIO(data), weights_only=True)
    return mapped(tree, lambda tensor: torch.empty_like(tensor, device="cpu"))


class Staged:
    """Tensors as the entries of a shared state; those that cannot be one themselves, as copies."""

    def __init__(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """The content of those that `own` names may differ; a newcomer receives it all the same."""
        self._tensors = dict(tensors)
        self._copies: dict[str, Tensor] = {}
        entries = []
        for name, tensor in self._tensors.items():
            piece = movable(tensor)
            if piece.data_ptr() != tensor.data_ptr():
                self._copies[name] = piece
            differs = name in own
            entries.append(TensorInfo.from_torch(piece, name, allow_content_inequality=differs))
        self.shared = SharedState(entries)

    @torch.no_grad()
    def put(self) -> None:
        """Gives the tensors what the copies have received."""
        for name, copy in self._copies.items():
            put(self._tensors[name], copy)
