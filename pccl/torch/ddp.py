"""Elastic data parallel training, for whole models and for models sharded by FSDP2."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as Base
from torch.utils._pytree import tree_leaves, tree_map_only

from pccl import MismatchError, PeerLostError, Result, SharedStateSyncStrategy, extension
from pccl.kernels import Wire
from pccl.shared_state import SharedState, TensorInfo
from pccl.tensors import is_sharded
from pccl.torch import hooks
from pccl.torch.group import TIMEOUT, ProcessGroup
from pccl.torch.members import communicator, exchange
from pccl.torch.tensors import movable, put
from pccl.torch.work import in_pool

_log = logging.getLogger("pccl.torch")


# the argument for taking rank 0's buffers in each step: since torch 2.13, and before
_NAMES = inspect.signature(Base.__init__).parameters
_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _NAMES)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def sharded_again(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Rebuilds the state of an optimizer of sharded parameters from local parts."""
    from torch.distributed.tensor import DTensor  # loads slowly, like FSDPModule

    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def like(parameter: Tensor, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or part.shape != parameter.to_local().shape:
            return part
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip

    each = {
        index: tree_map_only(Tensor, partial(like, parameters[index]), values)
        for index, values in state["state"].items()
    }
    return {**state, "state": each}


def tensors_of(tree: Any) -> list[Tensor]:
    return [local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def packed(tree: Any) -> bytes:
    """The structure of a tree as bytes, without the content of its tensors."""
    file = io.BytesIO()
    torch.save(tree_map_only(Tensor, lambda tensor: local(tensor).to("meta"), tree), file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """The inverse of `packed`; the tensors are on the CPU and uninitialized.

    The bytes come from another peer, so this reads only plain values and tensors.
    """
    tree = torch.load(io.BytesIO(data), weights_only=True)
    return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), tree)


class Staged:
    """A shared state of tensors, with copies of tensors that cannot be entries."""

    def __init__(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """The content of the tensors in `own` may differ between peers; newcomers receive it."""
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
        for name, copy in self._copies.items():
            put(self._tensors[name], copy)


class Stateful(Protocol):
    """An object with a state, like torch's optimizers, schedulers and data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


_Entry = tuple[str, list[int], str]  # name, shape and type of a tensor


class _Plan(NamedTuple):
    origin: int
    begun: bool
    revision: int
    steps: int
    states: dict[str, Any]
    layout: list[_Entry]


class Phase:
    """Keeps the replicas of a model in the same step, with the same state.

    Attributes:
        steps: number of steps begun by the run; the same on all replicas.
    """

    def __init__(
        self, group: ProcessGroup, module: torch.nn.Module, states: Mapping[str, Stateful]
    ) -> None:
        """Newcomers receive the module's parameters and persistent buffers, and the states."""
        self.steps = 0
        self._group = group
        self._module = module
        self._states = dict(states)
        self._begun = False
        self._revision = 0
        self._pending: Future[bool] | None = None

    def step(self, failed: bool = False) -> None:
        """Begins the next step, and admits newcomers since the last one.

        All replicas call this equally often. Without newcomers it runs no collective. If the last
        step has `failed`, it also fails on the replicas that are still in it, and all synchronize.
        """
        if self._pending is not None and (self._pending.result() or failed):
            self._group.admit()
            self.synchronize()
        self.steps += 1
        self._pending = in_pool(self._ask)

    def _ask(self) -> bool:
        """True if newcomers wait; runs in the background during the step."""
        while True:
            try:
                return extension.are_peers_pending(self._group.communicator)
            except PeerLostError:
                continue
            except MismatchError:  # another replica's step has failed
                return True

    def synchronize(self) -> None:
        """Synchronizes the state of the run to all replicas; at the beginning, that of rank 0.

        Raises:
            PeerLostError: the shards of this replica have received states of different replicas,
                because the first sender was lost meanwhile.
        """
        while True:
            try:
                plan = self._synchronize()
                break
            except PeerLostError as error:
                _log.info("the replicas synchronize again: %s", error)
        received = [plan.steps, 0 if plan.begun else plan.origin]
        if any(row != received for row in self._group.shards(received)):
            self._group.abort()
            why = (
                "the replica that sent the state was lost when only some shards of this one had "
                "received it: start this replica again"
            )
            raise PeerLostError(Result.RANK_CONNECTION_LOST, "sync_shared_state", why)

    def _synchronize(self) -> _Plan:
        own = {name: each.state_dict() for name, each in self._states.items()}
        model = self._tensors()
        layout = [(name, list(t.shape), str(t.dtype)) for name, t in model.items()]
        origin = self._group.origin
        plan = self._agree(_Plan(origin, self._begun, self._revision, self.steps, own, layout))
        try:
            _check(plan.layout, layout)
            if plan.states.keys() != own.keys():
                here = f"{[*own]} in this process: pass the same `states` everywhere"
                raise ValueError(f"the states are {[*plan.states]} in the run, and {here}")
        except ValueError:
            self._group.abort()  # the others continue without this process
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
                if lacking := _lacking(each):
                    self._group.abort()
                    why = f"its state has no {lacking}, which that of this process needs"
                    raise ValueError(f"the run's {name!r} is another kind of optimizer: {why}")
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
        """The plan of rank 0."""
        group, is_first = self._group, self._group.getRank() == 0
        if group.getSize() == 1:
            return own
        content = bytearray(packed(own._asdict()) if is_first else b"")
        size = torch.tensor([len(content)])
        group.broadcast([size], 0).wait()
        if not is_first:
            content = bytearray(int(size))
        group.broadcast([torch.frombuffer(content, dtype=torch.uint8)], 0).wait()
        return own if is_first else _Plan(**unpacked(bytes(content)))


def _check(run: list[_Entry], own: list[_Entry]) -> None:
    for ours, theirs in zip(own, run, strict=False):
        if list(ours) != list(theirs):
            raise ValueError(f"the run trains another model: it has {theirs}, this process {ours}")
    if len(own) != len(run):
        raise ValueError(f"the run's model has {len(run)} tensors, that of this process {len(own)}")


def _lacking(loaded: Stateful) -> list[str]:
    """The settings that an optimizer lacks after it has loaded the state of another kind."""
    if not isinstance(loaded, torch.optim.Optimizer):
        return []
    return sorted(loaded.defaults.keys() - set.intersection(*map(set, loaded.param_groups)))


class DistributedDataParallel(Base):
    """torch's DistributedDataParallel, with replicas that may join or be lost at any step.

        ddp = pccl.torch.DistributedDataParallel(model, {"optimizer": optimizer})
        while ddp.steps < 1000:
            loss_function(ddp(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    A replica that is lost in a backward pass costs a retry: the remaining replicas average the
    gradients. A backward pass that fails on one replica in another way fails on all, and all can go
    on with the next forward pass, before which they synchronize. Newcomers are admitted between two
    steps. A newcomer's constructor receives parameters, buffers, the states and the number of steps
    from the others; the newcomer must not run a collective between `init_process_group` and this
    constructor.

    All replicas must run the same number of forward passes for training; passes without gradients,
    and in `no_sync()`, do not count. When the run begins, all replicas receive the model of rank 0.

    Args:
        module: the model.
        states: other objects that a newcomer receives, by name: the optimizer, a scheduler, or
            anything with `state_dict` and `load_state_dict`.
        process_group: None: the default group.
        wire: the format of gradients on the wire: "fp32", or quantized with error feedback.
        arguments: other arguments of torch's class.

    Raises:
        ValueError: the group is not one of pccl, an argument contradicts the elasticity, or the run
            has another model or other states.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        states: Mapping[str, Stateful] | None = None,
        *,
        process_group: Any = None,
        wire: Wire = "fp32",
        **arguments: Any,
    ) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, ProcessGroup):
            raise ValueError('the group is not one of pccl: init_process_group("pccl", ...)')
        if arguments.get("static_graph"):
            raise ValueError(
                "static_graph is not possible, because a newcomer would be in another step"
            )
        # These avoid collectives in torch's constructor and in its second step, which other
        # replicas in the middle of the training would not match.
        fixed = {"init_sync": False, "find_unused_parameters": True, _BUFFERS: False}
        for name, value in fixed.items():
            if arguments.setdefault(name, value) != value:
                raise ValueError(f"{name} must be {value}: replicas join in the middle of a run")
        super().__init__(module, process_group=group, **arguments)
        if wire == "fp32":
            self.register_comm_hook(group, hooks.avg)
        else:
            self.register_comm_hook(hooks.Quantized(wire, group), hooks.quantized)
        self._phase = Phase(group, module, states or {})
        self._phase.synchronize()

    @property
    def steps(self) -> int:
        """Number of training steps begun by the run; the same on all replicas."""
        return self._phase.steps

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """The forward pass of the model; in training it begins a step, and admits newcomers."""
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._phase.step(self._has_failed())
        return super().forward(*inputs, **more)  # type: ignore[no-untyped-call]

    def _has_failed(self) -> bool:
        """True if the last backward pass has failed; then the next one can begin."""
        group: ProcessGroup = self.process_group  # type: ignore[assignment]
        members = group.members
        try:
            self.reducer._rebuild_buckets()  # does nothing, after a pass that has ended
        except RuntimeError:
            members.failed = True
        if members.failed:
            self._update_process_group(group)  # type: ignore[no-untyped-call]
        return members.failed


class Replicas:
    """Replicas of a model, each sharded by FSDP2 over its default group.

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # gloo or nccl: the shards
        fully_shard(model, mesh=mesh)
        replicas = pccl.torch.Replicas("host:48148", model, {"optimizer": optimizer}, begin=2)
        while replicas.steps < 1000:
            replicas.step()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    The processes of a replica are started together (by torchrun) and end together. They are a team
    of peers: if one of them is lost, the others are dropped, too, and their calls raise
    `KickedError`. Shard s of all replicas is peer group s of one run. A lost replica costs the
    others a retry; all shards of a gradient are averaged over the same replicas. A new replica is
    admitted between two steps, when all its processes are present. It receives its shards of
    parameters, buffers and states, and the number of steps.

    Args:
        address: `host:port` of the master.
        model: the model, after `fully_shard`.
        states: other objects that a newcomer receives, by name.
        begin: the number of replicas with which a run begins.
        shards: the group of the processes of this replica; None: the default group.
        timeout: how long a collective may take.

    Raises:
        ValueError: the model is not sharded by FSDP2, or a replica's model differs from the run's.
        PCCLError: as `Communicator.connect`.
        PeerLostError: the replica that sent this one the state was lost meanwhile; start this
            replica again.
    """

    def __init__(
        self,
        address: str,
        model: torch.nn.Module,
        states: Mapping[str, Stateful] | None = None,
        *,
        begin: int = 1,
        shards: dist.ProcessGroup | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not modules:
            raise ValueError("the model is not sharded: call fully_shard() first")
        seconds = timeout.total_seconds()
        comm = communicator(address, shards, connect_timeout=seconds)
        try:
            comm.connect(timeout=seconds)
            self._group = ProcessGroup(
                comm,
                size=begin,
                timeout=timeout,
                store=HashStore(),  # no caller asks for it
                shards=exchange(shards, _device(model)),
            )
            for module in modules:
                module.set_all_reduce_hook(lambda gradient: average(self._group, gradient))
            self._phase = Phase(self._group, model, states or {})
            self._phase.synchronize()
        except BaseException:
            comm.close()
            raise

    @property
    def steps(self) -> int:
        """Number of steps begun by the run; the same on all processes of all replicas."""
        return self._phase.steps

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self._group.getSize()

    def step(self) -> None:
        """Begins the next step, and admits new replicas since the last one."""
        self._phase.step()

    def close(self) -> None:
        """Leaves the run."""
        self._group.shutdown()


def average(group: ProcessGroup, gradient: torch.Tensor) -> None:
    """Averages a shard of a gradient over the replicas, in place.

    Each process averages its shard only with the same shard of other replicas. If a replica is lost
    meanwhile, it may be in the mean of one shard but not of another. So the shards compare the
    numbers of contributors, and average all again if they differ. Equal numbers mean the same
    replicas, because replicas are lost as a whole, and none joins within a step.
    """
    own = gradient.detach().clone()
    while True:
        work = group.allreduce([gradient], dist.ReduceOp.AVG)
        work.wait()
        contributors = [work.contributors]
        if all(row == contributors for row in group.shards(contributors)):
            return
        gradient.detach().copy_(own)


def _device(model: torch.nn.Module) -> torch.device:
    """The device of the tensors that the processes of a replica exchange."""
    for parameter in model.parameters():
        if is_sharded(parameter):
            return torch.device(parameter.device_mesh.device_type)
    raise ValueError("the model has no sharded parameters: call fully_shard() first")
