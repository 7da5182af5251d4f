"""Parts of the model that are averaged at different times, and their outer states."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import torch

from pccl import TensorInfo
from pccl.diloco.outer_state import OuterOptimizer, OuterState
from pccl.diloco.replica import Layout, Named, Replica, Saved

Pattern = Literal["strided", "sequential"]
PATTERNS = get_args(Pattern)


def split(named: Named, count: int, pattern: Pattern) -> list[list[int]]:
    """Which parameters each of `count` fragments has, by their places in `named`.

    The parameters of one layer stay together, where the model has enough layers. A layer is an
    element of the first list of modules in a parameter's name ("blocks.3" of "blocks.3.norm.bias"),
    or else the module that has it. "strided": layer i is in fragment i mod count. "sequential": a
    fragment is a run of layers, and fragments are of nearly equal size.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    layers: dict[str, list[int]] = {}
    for place, (name, _) in enumerate(named):
        layers.setdefault(_layer(name), []).append(place)
    units = list(layers.values())
    if len(units) < count:
        units = [[place] for place in range(len(named))]
    if len(units) < count:
        raise ValueError(f"fragments={count} are more than the model has parameters: {len(units)}")
    if pattern == "strided":
        return [sorted(chain.from_iterable(units[first::count])) for first in range(count)]
    return _runs(units, [named[i][1].numel() for i in range(len(named))], count)


def _layer(name: str) -> str:
    path = name.split(".")
    for depth, part in enumerate(path):
        if part.isdigit():
            return ".".join(path[: depth + 1])
    return ".".join(path[:-1]) or name


def _runs(units: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Runs of units; one ends when it has its part of what is left, or each rest needs a unit."""
    runs: list[list[int]] = [[] for _ in range(count)]
    left = sum(sizes)
    run = size = 0
    for i, unit in enumerate(units):
        own = sum(sizes[place] for place in unit)
        wanted = (left + size) / (count - run)
        full = runs[run] and abs(size + own - wanted) > abs(size - wanted)
        if run < count - 1 and (full or len(units) - i == count - 1 - run):
            run, size = run + 1, 0
        runs[run] += unit
        size, left = size + own, left - own
    return runs


class Outer:
    """theta, v and k of a model in fragments, each of which has its own.

    Attributes:
        parts: one for each fragment.
        clock: k of each fragment, and the run's name.
    """

    def __init__(
        self,
        named: Named,
        groups: Sequence[Sequence[int]],
        optimizer: OuterOptimizer,
        replica: Replica,
    ) -> None:
        self._groups = groups
        self._layout = Layout(named, replica)
        self._replica = replica
        # Fresh peers differ in the run's name, so that the first one's state is elected.
        self.clock = torch.tensor([0] * len(groups) + [0], dtype=torch.int64)
        self.rename()
        self.parts = [
            OuterState([named[i][1] for i in group], optimizer, self.clock[p : p + 1])
            for p, group in enumerate(groups)
        ]

    def rename(self) -> None:
        """It is another run, if there is none that this peer joins."""
        self.clock[-1] = self._replica.first(secrets.randbits(62))

    @property
    def outer_step(self) -> int:
        """k: the steps that every fragment has taken."""
        return int(self.clock[:-1].min())

    @property
    def nbytes(self) -> int:
        """Bytes of theta."""
        return sum(part.theta.nbytes for part in self.parts)

    def entries(self) -> list[list[TensorInfo]]:
        """Of the shared state: theta and v of each fragment."""
        suffixes = [f".{p}" for p in range(len(self.parts))] if len(self.parts) > 1 else [""]
        return [
            [
                TensorInfo.from_torch(part.theta, f"diloco.theta{suffix}"),
                TensorInfo.from_torch(part.velocity, f"diloco.velocity{suffix}"),
            ]
            for part, suffix in zip(self.parts, suffixes, strict=True)
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that peers have in common but the run's name."""
        for part in self.parts:
            yield part.theta
            yield part.velocity
        yield self.clock[:-1]

    def adopt(self) -> None:
        """w = base, in all fragments."""
        for part in self.parts:
            part.adopt()

    def state_dict(self, sharded: bool) -> dict[str, Saved]:
        """Copies; theta and v are in the order of the model, however it is cut into fragments."""
        return {
            "clock": self.clock.clone(),
            "theta": self.join([part.theta for part in self.parts], sharded),
            "velocity": self.join([part.velocity for part in self.parts], sharded),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where a state does not fit; other exceptions if it is none."""
        self.cut(state["theta"])
        self.cut(state["velocity"])
        clock = state["clock"]
        if clock.ndim != 1 or len(clock) < 2 or clock.dtype != torch.int64 or clock.min() < 0:
            raise ValueError(f"the clock of the state is {clock}: it must be counts of steps")

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state, of a run that may have had other fragments."""
        for part, theta in zip(self.parts, self.cut(state["theta"]), strict=True):
            part.theta.copy_(theta)
        for part, velocity in zip(self.parts, self.cut(state["velocity"]), strict=True):
            part.velocity.copy_(velocity)
        clock = state["clock"]
        self.clock[-1] = clock[-1]
        same = clock.shape == self.clock.shape
        self.clock[:-1] = clock[:-1] if same else clock[:-1].min()

    def _pieces(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the parameters' places, in the order of the model."""
        found = {
            place: view
            for part, group, flat in zip(self.parts, self._groups, flats, strict=True)
            for place, view in zip(group, part.views(flat), strict=True)
        }
        return [found[place] for place in sorted(found)]

    def join(self, flats: Sequence[torch.Tensor], sharded: bool) -> Saved:
        """What is flat in each fragment, as one in the order of the model; or sharded, by name."""
        return self._layout.save(self._pieces(flats), sharded)

    def cut(self, saved: Saved) -> list[torch.Tensor]:
        """The inverse of `join`."""
        into = [torch.empty_like(part.theta) for part in self.parts]
        for piece, own in zip(self._pieces(into), self._layout.load(saved), strict=True):
            if piece.shape != own.shape or not own.is_floating_point():
                raise ValueError(
                    f"the state has a parameter of shape {list(own.shape)} ({own.dtype}) where "
                    f"this model has one of shape {list(piece.shape)}"
                )
            piece.copy_(own)
        return into
