"""The steps of an elastic training: what all replicas have in common, and newcomers between two
steps.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pccl import PeerLostError, Result, SharedStateSyncStrategy, extension
from pccl.shared_state import SharedState, TensorInfo
from pccl.torch.group import ProcessGroup
from pccl.torch.tensors import movable, put
from pccl.torch.work import in_pool


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
    """Maps the tensors of a tree of dicts, lists and tuples."""
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


_log = logging.getLogger("pccl.torch")


class Stateful(Protocol):
    """What has a state, as optimizers, schedulers and data loaders of torch do."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Takes over a state."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the first member says of a synchronisation."""

    origin: int
    begun: bool
    revision: int
    steps: int
    states: dict[str, Any]
    layout: list[tuple[str, list[int], str]]


class Phase:
    """The state that all replicas of a model share, and the number of the step they are in.

    Attributes:
        steps: steps that have begun since the run did; the same on all replicas.

    Args:
        group: the replicas.
        module: its parameters and persistent buffers are shared.
        states: what else a newcomer receives, by name.
    """

    def __init__(
        self,
        group: ProcessGroup,
        module: torch.nn.Module,
        states: Mapping[str, Stateful],
    ) -> None:
        self.steps = 0
        self._group = group
        self._module = module
        self._states = dict(states)
        self._begun = False
        self._revision = 0
        self._pending: Future[bool] | None = None

    def step(self) -> None:
        """The next step begins: newcomers that have come since the last one are in it.

        All replicas call this equally often. It makes no collective unless somebody has come.
        """
        if self._pending is not None and self._pending.result():
            self._group.admit()
            self.synchronise()
        self.steps += 1
        self._pending = in_pool(self._ask)

    def _ask(self) -> bool:
        """Whether newcomers wait; it is asked while the step is computed."""
        while True:
            try:
                return extension.are_peers_pending(self._group.communicator)
            except PeerLostError:
                continue

    def synchronise(self) -> None:
        """Gives all replicas the same state: that of the run, or, when it begins, of rank 0.

        Raises:
            PeerLostError: the shards of this replica have received states that do not fit: the only
                replica that had one, or the first of those that begin together, was lost meanwhile.
        """
        while True:
            try:
                plan = self._synchronise()
                break
            except PeerLostError as error:
                _log.info("the replicas synchronise again: %s", error)
        received = [plan.steps, 0 if plan.begun else plan.origin]
        if any(said != received for said in self._group.shards(received)):
            self._group.abort()
            why = (
                "the replica that sent the state was lost when some shards of this one had it, and "
                "others had not: start this replica again"
            )
            raise PeerLostError(Result.RANK_CONNECTION_LOST, "sync_shared_state", why)

    def _synchronise(self) -> _Plan:
        own = {name: each.state_dict() for name, each in self._states.items()}
        model = self._tensors()
        layout = [(name, list(t.shape), str(t.dtype)) for name, t in model.items()]
        origin = self._group.origin
        plan = self._agree(_Plan(origin, self._begun, self._revision, self.steps, own, layout))
        try:
            _check(plan.layout, layout)
        except ValueError:
            self._group.abort()  # the others go on without this process
            raise
        receives = not self._begun
        states = plan.states if receives and self._group.getRank() != 0 else own
        named = {f"model.{name}": tensor for name, tensor in model.items()}
        for name in sorted(states):
            for i, tensor in enumerate(tensors_of(states[name])):
                named[f"{name}.{i}"] = tensor
        buffers = {f"model.{name}" for name, _ in self._module.named_buffers()}
        staged = Staged(named, buffers)
        strategy = SharedStateSyncStrategy.ENFORCE_POPULAR
        if plan.begun:
            staged.shared.revision = 0 if receives else self._revision + 1
        elif self._group.getRank() == 0:
            strategy = SharedStateSyncStrategy.SEND_ONLY
        else:
            strategy = SharedStateSyncStrategy.RECEIVE_ONLY
        self._group.communicator.sync_shared_state(staged.shared, strategy)
        staged.put()
        self._revision = staged.shared.revision
        if states is not own:
            for name, each in self._states.items():
                state = states[name]
                if isinstance(each, torch.optim.Optimizer):
                    state = sharded_again(each, state)
                each.load_state_dict(state)
        self.steps, self._begun = plan.steps, True
        return plan

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers; tied ones once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self._module.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            tensor = local(value)
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                found[name] = tensor
        return found

    def _agree(self, own: _Plan) -> _Plan:
        """The plan of torch's rank 0."""
        group = self._group
        if group.getSize() == 1:
            return own
        text = b""
        if group.getRank() == 0:
            text = packed(
                {
                    "origin": own.origin,
                    "begun": own.begun,
                    "revision": own.revision,
                    "steps": own.steps,
                    "states": own.states,
                    "layout": own.layout,
                }
            )
        size = torch.tensor([len(text)])
        group.broadcast([size], 0).wait()
        data = torch.zeros(int(size), dtype=torch.uint8)
        if text:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        group.broadcast([data], 0).wait()
        return own if text else _Plan(**unpacked(data.numpy().tobytes()))


def _check(run: list[tuple[str, list[int], str]], own: list[tuple[str, list[int], str]]) -> None:
    """Raises ValueError where the own model is not that of the run."""
    for ours, theirs in zip(own, run, strict=False):
        if list(ours) != list(theirs):
            raise ValueError(f"the run trains another model: it has {theirs}, this process {ours}")
    if len(own) != len(run):
        raise ValueError(f"the run's model has {len(run)} tensors, that of this process {len(own)}")
