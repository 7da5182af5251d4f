"""A replica of the model: one process, or several over which the model is sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

from pccl import Communicator, extension

Saved = torch.Tensor | Mapping[str, torch.Tensor]  # flat, or sharded tensors by name
Named = Sequence[tuple[str, torch.nn.Parameter]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor (a DTensor) that this process has; any other one as it is."""
    part = tensor.detach()
    if not hasattr(part, "to_local"):
        return part
    own: torch.Tensor = part.to_local()
    return own


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; without that module of torch, which loads slowly, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class Replica:
    """A replica that is this process alone; `pccl.diloco.sharded` has that of several.

    Each process of a sharded replica is a peer of another group, and trains and averages its own
    shard. What a process does next depends on what calls have brought; where two of them may have
    brought different things, because a peer was lost in between, the processes tell each other.

    Attributes:
        size: its processes.
        index: of this one among them.
        is_sharded: whether the model's parameters are DTensors.
    """

    is_sharded = False
    size = 1
    index = 0

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """What all processes say, in their order; all make this call."""
        return [list(numbers)]

    def all(self, mine: bool) -> bool:
        """Whether it is so for all processes."""
        return all(said for (said,) in self.exchange([int(mine)]))

    def first(self, number: int) -> int:
        """What the first process says."""
        return self.exchange([number])[0][0]

    def reshard(self) -> None:
        """The model's parameters are the shards, whatever was computed with them."""

    def whole(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A tensor `like` this one, of which each process has given its `part`; on the CPU."""
        return part.detach().cpu()

    def joint(self, like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The same as a tensor that is sharded `like` this one, with a copy of the part."""
        return part.detach().clone()

    def part(self, like: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Of a whole tensor, or a sharded one, what of one `like` this is in this process."""
        return local(saved)


class Layout:
    """Parameters as they are saved: flat in the order of the model, or sharded and by name."""

    def __init__(self, named: Named, replica: Replica) -> None:
        self._named = named
        self._replica = replica

    def save(self, parts: Iterable[torch.Tensor], sharded: bool) -> Saved:
        """Tensors of the form of this process's parameters; all processes of a replica call it."""
        pairs = list(zip(self._named, parts, strict=True))
        if sharded and self._replica.is_sharded:
            return {name: self._replica.joint(p, part) for (name, p), part in pairs}
        return torch.cat([self._replica.whole(p, part).flatten() for (_, p), part in pairs])

    def load(self, saved: Saved) -> list[torch.Tensor]:
        """The inverse; of a whole tensor, each process takes its part."""
        if isinstance(saved, torch.Tensor):
            pieces = torch.split(saved, [p.numel() for _, p in self._named])
            given = [piece.view(p.shape) for piece, (_, p) in zip(pieces, self._named, strict=True)]
        else:
            given = [saved[name] for name, _ in self._named]
        return [
            self._replica.part(p, tensor) for (_, p), tensor in zip(self._named, given, strict=True)
        ]


def check_team(comm: Communicator, replica: Replica) -> None:
    """Raises ValueError unless the communicators of a replica's processes belong together."""
    own = extension.member(comm)
    # one that is in no team says so at once: the others may wait for it to admit them
    fits = own.team_size == replica.size
    said = replica.exchange([own.team, own.group]) if fits else []
    groups = {group for _, group in said}
    if len({team for team, _ in said}) != 1 or len(groups) < replica.size:
        raise ValueError(
            f"the model is sharded over {replica.size} processes, whose communicators must be one "
            "team of as many peer groups: make them by pccl.torch.communicator(address)"
        )
