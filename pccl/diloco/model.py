"""A model and its inner optimizer: the processes that shard it, frozen parameters, buffers, and the
optimizer's state. Nothing here communicates with other replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils._pytree import tree_map, tree_map_only

from pccl import Communicator, extension
from pccl.diloco.settings import BufferMode
from pccl.shared_state import TensorInfo
from pccl.tensors import is_sharded
from pccl.types import DataType

Saved = torch.Tensor | Mapping[str, torch.Tensor]  # flat in the order of the model, or by name
Named = Sequence[tuple[str, torch.nn.Parameter]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor (a DTensor); any other tensor unchanged."""
    part = tensor.detach()
    if not hasattr(part, "to_local"):
        return part
    own: torch.Tensor = part.to_local()
    return own


class Replica:
    """A replica of one process; `Sharded` is a replica of several.

    Each process of a sharded replica is a peer of a different group. If a peer is lost, the groups
    may notice it in different calls. If the next step depends on it, processes compare results.
    """

    is_sharded = False
    size = 1
    index = 0

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers the numbers of all processes, in their order; all processes call it."""
        return [list(numbers)]

    def all(self, mine: bool) -> bool:
        return all(answer for (answer,) in self.exchange([int(mine)]))

    def first(self, number: int) -> int:
        return self.exchange([number])[0][0]

    def reshard(self) -> None:
        """Frees gathered parameters, so that the model's parameters are the shards."""

    def whole(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Joins the `part` of each process into a whole tensor `like` this one, on the CPU."""
        return part.detach().cpu()

    def joint(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A tensor sharded `like` this one; `part` is the part of this process."""
        return part.detach()

    def part(self, like: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """This process's part of a saved tensor, whole or sharded, of a parameter `like` this."""
        return local(saved)


class Sharded(Replica):
    """The processes over which `fully_shard` has sharded a model, on a mesh of one dimension."""

    is_sharded = True

    def __init__(self, model: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule  # loads slowly, like DTensor

        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.reshard()
        named = list(model.named_parameters())
        whole = [name for name, p in named if not is_sharded(p)]
        if whole:
            raise ValueError(
                f"parameter {whole[0]!r} is not sharded, and others are: "
                "call fully_shard() for the whole model, too"
            )
        meshes = [parameter.device_mesh for _, parameter in named]  # type: ignore[attr-defined]
        mesh = self._mesh = meshes[0]
        if any(one != mesh for one in meshes) or mesh.ndim != 1:
            raise ValueError(
                f"the parameters are on {mesh} and may be on others: DiLoCo needs one mesh of one "
                "dimension, which shards them; the run itself replicates them"
            )
        for name, parameter in named:
            (placement,) = parameter.placements  # type: ignore[attr-defined]
            if not placement.is_shard():
                raise ValueError(f"parameter {name!r} is {placement} on the mesh, and not sharded")
        self._group = mesh.get_group()
        self.size, self.index = mesh.size(), mesh.get_local_rank()

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._mesh.device_type)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._group)
        return [row.tolist() for row in gathered]

    def reshard(self) -> None:
        """Frees the outdated gathered parameters that an evaluation leaves behind."""
        for module in self._modules:
            module.reshard()

    def whole(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        joint: Any = self.joint(like, part)
        whole: torch.Tensor = joint.full_tensor()
        return whole.cpu()

    def joint(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        assert isinstance(like, DTensor)
        joint: torch.Tensor = DTensor.from_local(
            part.detach().to(self._mesh.device_type),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return joint

    def part(self, like: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Cuts a whole tensor as `like` is cut, without communication."""
        if is_sharded(saved):
            return local(saved)
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        given = saved.to(self._mesh.device_type)
        cut: Any = distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)
        return local(cut)


def replica_of(model: torch.nn.Module) -> Replica:
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    return Sharded(model) if sharded else Replica()


def check_team(comm: Communicator, replica: Replica) -> None:
    """Raises ValueError unless the communicators of a replica's processes belong together."""
    own = extension.member(comm)
    # a process without a team raises at once: the others may be waiting for its admission
    in_team = own.team_size == replica.size
    gathered = replica.exchange([own.team, own.group]) if in_team else []
    groups = {group for _, group in gathered}
    if len({team for team, _ in gathered}) != 1 or len(groups) < replica.size:
        raise ValueError(
            f"the model is sharded over {replica.size} processes, whose communicators must be one "
            "team of as many peer groups: make them by pccl.torch.communicator(address)"
        )


_NAMED_MAX = 5  # differences in a message
_KINDS = (torch.float32, torch.float64, torch.int64)  # dtypes of buffers between rounds
_TYPES_OF_ENTRIES = {dtype.common_name for dtype in DataType}


def memory(tensor: torch.Tensor) -> memoryview:
    """A view of the bytes of a contiguous CPU tensor; it keeps the tensor alive."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


class Frozen:
    """The parameters that did not require a gradient when this object was constructed.

    The shared state uses their memory directly where possible, and copies elsewhere.
    """

    def __init__(self, model: torch.nn.Module, replica: Replica) -> None:
        self._replica = replica
        self._parameters = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self.layout = [(name, list(p.shape)) for name, p in self._parameters.items()]
        self._copies: dict[str, torch.Tensor] = {}
        self.entries: list[TensorInfo] = []
        for name, parameter in self._parameters.items():
            content = local(parameter)
            if content.device.type not in ("cpu", "cuda") or not content.is_contiguous():
                content = self._copies[name] = torch.empty(content.shape, dtype=content.dtype)
            if _name_of(content.dtype) not in _TYPES_OF_ENTRIES:
                content = content.reshape(-1).view(torch.uint8)
            self.entries.append(TensorInfo.from_torch(content, f"diloco.frozen.{name}"))
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        for name, kept in self._copies.items():
            kept.copy_(local(self._parameters[name]))

    @torch.no_grad()
    def put(self) -> None:
        for name, kept in self._copies.items():
            local(self._parameters[name]).copy_(kept)

    def hash_into(self, digest: xxhash.xxh3_128) -> None:
        for parameter in self._parameters.values():
            content = local(parameter).cpu().contiguous()
            digest.update(memory(content))

    def state_dict(self, sharded: bool) -> dict[str, torch.Tensor]:
        save = self._replica.joint if sharded else self._replica.whole
        return {n: save(p, local(p)) for n, p in self._parameters.items()}

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        own = {n: p.shape for n, p in self._parameters.items()}
        check_shapes("frozen parameter", own, {name: saved.shape for name, saved in state.items()})

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(self._replica.part(parameter, state[name]))
        self.gather()


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a buffer in the model, where the script may replace the tensor at any time."""

    name: str
    module: torch.nn.Module
    key: str
    shape: torch.Size
    kind: torch.dtype

    def tensor(self) -> torch.Tensor:
        found = self.module._buffers[self.key]
        if found is None or _real(found).shape != self.shape:
            now = "gone" if found is None else f"of shape {list(found.shape)}"
            raise ValueError(
                f"buffer {self.name!r} is {now}, and was of shape {list(self.shape)} when DiLoCo "
                "was made: a buffer that changes its size must be registered with persistent=False"
            )
        return _real(found)


class Buffers:
    """The persistent buffers of a model (those in its `state_dict`), in flat CPU tensors by dtype.

    The flat tensors hold the last content on which the peers agreed: floating-point buffers in fp32
    (fp64 ones in fp64; complex ones as real and imaginary parts), all others as int64. So the
    models of two peers may differ in dtype.
    """

    def __init__(self, model: torch.nn.Module, mode: BufferMode) -> None:
        self.mode = mode
        every = list(_places(model))
        self.layout = [(place.name, list(place.shape)) for place in every]
        self._flat: dict[str, torch.Tensor] = {}  # by the name of a dtype
        self._places: list[list[_Place]] = []  # of each flat tensor
        for kind in _KINDS:
            places = [place for place in every if place.kind == kind]
            if count := sum(place.shape.numel() for place in places):
                self._flat[_name_of(kind)] = torch.zeros(count, dtype=kind)
                self._places.append(places)
        self.means = [torch.zeros_like(flat) for flat in self.shared] if mode == "mean" else []
        self.gather()

    @property
    def shared(self) -> list[torch.Tensor]:
        return list(self._flat.values())

    def entries(self) -> list[TensorInfo]:
        return [
            TensorInfo.from_torch(
                flat,
                f"diloco.buffers.{self.mode}.{name}",
                allow_content_inequality=self.mode == "local",
            )
            for name, flat in self._flat.items()
        ]

    @torch.no_grad()
    def gather(self) -> None:
        for place, view in self._views(self.shared):
            view.copy_(place.tensor())

    @torch.no_grad()
    def put(self) -> None:
        for place, view in self._views(self.shared):
            place.tensor().copy_(view)

    def adopt(self) -> None:
        """Copies the agreed content to the model."""
        if self.mode != "local":
            self.put()

    @torch.no_grad()
    def measure(self) -> list[torch.Tensor]:
        """The changes of the model's buffers since the last agreement; with mode "mean" only.

        Averaging differences keeps the exact bits of a constant. If the old value was not finite,
        such as the initial -inf of a running maximum, the new value itself is averaged.
        """
        if self.mode != "mean":
            return []
        moves = [torch.empty_like(flat) for flat in self.shared]
        for (place, base), (_, move) in zip(
            self._views(self.shared), self._views(moves), strict=True
        ):
            now = place.tensor()
            begin = base.to(now.dtype).to(base.dtype)  # rounded to the model's dtype
            now = now.to(base.device, base.dtype)
            move.copy_(torch.where(torch.isfinite(base), now - begin, now))
        return moves

    @torch.no_grad()
    def reclaim(self, moves: list[torch.Tensor]) -> None:
        if self.mode == "mean":
            for place, change in self._views(moves):
                place.tensor().copy_(_moved(place.tensor().to(change), change))

    @torch.no_grad()
    def advance(self) -> None:
        if self.mode == "mean":
            for flat, mean in zip(self.shared, self.means, strict=True):
                flat.copy_(_moved(flat, mean))

    def _views(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[_Place, torch.Tensor]]:
        """The places, each with its part of flat tensors like `shared`."""
        for places, flat in zip(self._places, flats, strict=True):
            pieces = torch.split(flat, [place.shape.numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                yield place, piece.view(place.shape)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._flat)

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        own = {name: flat.shape for name, flat in self._flat.items()}
        check_shapes("flat buffer", own, {name: saved.shape for name, saved in state.items()})

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, flat in self._flat.items():
            flat.copy_(state[name])


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            real = _real(buffer)
            kind = torch.int64
            if real.is_floating_point():
                kind = torch.float64 if real.dtype == torch.float64 else torch.float32
            yield _Place(f"{path}.{key}" if path else key, module, key, real.shape, kind)


def _moved(base: torch.Tensor, move: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(base), base + move, move)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _name_of(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def check_shapes(
    what: str, own: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]
) -> None:
    differences = [
        f"{what} {name!r} is only {'here' if name in own else 'in the state'}"
        for name in [*own, *saved]
        if name not in own or name not in saved
    ]
    differences += [
        f"{what} {name!r} has shape {list(saved[name])} in the state and {list(shape)} here"
        for name, shape in own.items()
        if name in saved and list(shape) != list(saved[name])
    ]
    if differences:
        more = len(differences) - _NAMED_MAX
        rest = f"; and {more} more" if more > 0 else ""
        raise ValueError(
            f"the state belongs to another model: {'; '.join(differences[:_NAMED_MAX])}{rest}"
        )


class InnerState:
    """Saves and loads the state of an inner optimizer, which may be sharded like its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
        self._optimizer = optimizer
        self.replica = replica

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters, by their numbers in a state."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def fault(self) -> str:
        """If the state is not finite, how to go on, for the end of an error; else empty."""
        names: list[str] = []
        with suppress(RuntimeError):  # with mode="decoupled", another thread may add to the state
            names = sorted({*_not_finite(self._optimizer.state_dict())})
        if not names:
            return ""
        return (
            f"; the state of its inner optimizer is not finite either ({', '.join(names)}), "
            "and will spoil the next rounds, too: clear it, as optimizer.state.clear() does with "
            "torch's own optimizers, or restart this peer"
        )

    def fill(self) -> None:
        """Creates, as a load target, the state that an optimizer has only after its first step."""
        if self._optimizer.state:
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad()

    def state_dict(self, sharded: bool) -> dict[str, Any]:
        """The state, not copied: whole, or with DTensors and the text keys that dcp needs."""
        state = self._optimizer.state_dict()
        if self.replica.is_sharded:
            self._check_kind(state)
            if not sharded:
                state = {**state, "state": tree_map_only(torch.Tensor, self._whole, state["state"])}
        state = _with_keys(state, str) if sharded else state
        return {"type": type(self._optimizer).__name__, "state": state}

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        return self.replica.whole(value, local(value)) if is_sharded(value) else value

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if "state" not in state:
            raise ValueError(
                f"the state of a {type(self._optimizer).__name__} of sharded parameters cannot be "
                "saved: it is not in the form that torch's own optimizers have"
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Loads such a state, or raises ValueError."""
        remedy = 'remove "optimizer" from the state to begin with a fresh one'
        is_valid = isinstance(saved, Mapping) and {"type", "state"} <= {*saved}
        if not is_valid or not isinstance(saved["state"], Mapping):
            raise ValueError(f"the state of the inner optimizer is invalid: {remedy}")
        kind, own = saved["type"], type(self._optimizer).__name__
        if kind != own:
            raise ValueError(
                f"the state is of the inner optimizer {kind}, and this peer's is {own}: {remedy}"
            )
        state = _with_keys(
            copied(dict(saved["state"])), lambda key: int(key) if str(key).isdigit() else key
        )
        if self.replica.is_sharded:
            self._check_kind(state)
            parameters = self.parameters
            state["state"] = {
                index: tree_map_only(torch.Tensor, partial(self._part, parameters[index]), values)
                for index, values in state["state"].items()
                if index < len(parameters)
            }
        before = self._optimizer.state_dict()
        _complete(state, before)
        try:
            self._optimizer.load_state_dict(state)
        except Exception as error:
            self._optimizer.load_state_dict(before)
            raise ValueError(
                f"the inner optimizer of the state does not fit: {error}; {remedy}"
            ) from error

    def _part(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not is_sharded(parameter) or is_sharded(value) or value.shape != parameter.shape:
            return value
        return self.replica.joint(parameter, self.replica.part(parameter, value))


def _not_finite(state: Mapping[Any, Any]) -> Iterator[str]:
    """The names of the tensors in nested dicts that are not finite."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _not_finite(value)
        elif torch.is_tensor(value) and value.is_floating_point():
            if not local(value).float().isfinite().all():
                yield str(name)


def _with_keys(state: Any, key: Callable[[Any], Any]) -> Any:
    """The state with all keys of its nested dicts replaced."""
    if not isinstance(state, dict):
        return state
    return {key(name): _with_keys(value, key) for name, value in state.items()}


def copied(state: Any) -> Any:
    """A deep copy that, unlike `copy.deepcopy`, also handles DTensors that are views."""
    return tree_map(
        lambda each: each.detach().clone() if torch.is_tensor(each) else copy.deepcopy(each), state
    )


def _complete(state: dict[Any, Any], like: Mapping[Any, Any]) -> None:
    """Adds dicts that were empty, which torch.distributed.checkpoint leaves out."""
    for name, value in like.items():
        if isinstance(value, dict) and isinstance(name, str):
            _complete(state.setdefault(name, {}), value)
