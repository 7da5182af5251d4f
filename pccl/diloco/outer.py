"""The outer optimizer and its state: theta, v and k, for a model that may consist of fragments."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from pccl import TensorInfo, kernels
from pccl.diloco.model import Named, Replica, Saved, local
from pccl.diloco.settings import Pattern, Rates, Settings

_log = logging.getLogger("pccl.diloco")


class OuterOptimizer:
    """SGD with learning rate eta and momentum mu, plain or Nesterov; mu = 0 only averages."""

    def __init__(self, rates: Rates, nesterov: bool) -> None:
        self.rates = rates
        self._nesterov = nesterov
        self._logged: tuple[float, float] | None = None

    def step(
        self,
        theta: torch.Tensor,
        velocity: torch.Tensor,
        gradient: torch.Tensor,
        *,
        outer_step: int,
        peers: int,
    ) -> None:
        """Updates theta and the velocity by a mean of `peers`, with the same bits everywhere."""
        lr, momentum = rates = self.rates.at(outer_step, peers)
        kernels.outer_sgd(
            theta, velocity, gradient, lr=lr, momentum=momentum, nesterov=self._nesterov
        )
        if rates != self._logged:
            self._logged = rates
            _log.info(
                "from outer step %d on, for a mean of %d peers: eta %.4g, mu %.4g, "
                "effective gain eta / (1 - mu) = %.4g",
                outer_step + 1,
                peers,
                lr,
                momentum,
                lr / (1 - momentum),
            )


class OuterState:
    """theta, v and k of parameters that are averaged together: one fragment, or the whole model.

    All are fp32 on the CPU; for sharded parameters, the shards of this process. Only this class
    changes theta and v, with pccl's own kernels, because torch rounds differently on different
    CPUs.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer: OuterOptimizer,
        steps: torch.Tensor,
    ) -> None:
        self._parameters = parameters
        self.steps = steps
        self.optimizer = optimizer
        n = sum(p.numel() for p in self._locals())
        self.theta = torch.empty(n)
        self.velocity = torch.zeros(n)  # v
        self.delta = torch.zeros(n)  # d, this peer's pseudo-gradient
        self.mean = torch.zeros(n)  # D, the gradient of an outer step
        self.base = self.theta  # where the model's training starts: theta, or a `View`'s choice
        with torch.no_grad():
            for parameter, theta in self._pairs(self.theta):
                theta.copy_(parameter)

    @torch.no_grad()
    def measure(self) -> None:
        """d = base - w."""
        # Local training began at the base rounded to the parameter's dtype. Measured from the
        # unrounded base, the delta of a bf16 model would also hold the rounding error, and would
        # pull theta back to the bf16 grid.
        for (parameter, base), end in zip(
            self._pairs(self.base), self.views(self.delta), strict=True
        ):
            begin = base.to(parameter.dtype).to(base.dtype)
            end.copy_(parameter)
            kernels.subtract(end, begin, end)

    def step(self, peers: int) -> None:
        self.optimizer.step(
            self.theta, self.velocity, self.mean, outer_step=int(self.steps), peers=peers
        )
        self.steps += 1

    @torch.no_grad()
    def adopt(self, keep: float = 0.0) -> None:
        """w = keep w + (1 - keep) base."""
        for parameter, base in self._pairs(self.base):
            if keep:
                begin = base.to(parameter.device)
                parameter.copy_(begin + keep * (parameter.to(begin.dtype) - begin))
            else:
                parameter.copy_(base)

    def rebase(self, counted: bool = False, keep: float = 0.0) -> None:
        """w = w + (1 - keep) (theta - base), or of (theta - base + d); then the base is theta."""
        by = self.theta - self.base
        self.move((1 - keep) * (by + self.delta if counted else by))
        self.base.copy_(self.theta)

    def reclaim(self, keep: float = 1.0) -> None:
        """w = w - keep d: adds progress to the model that no mean will include."""
        self.move(-keep * self.delta)

    @torch.no_grad()
    def move(self, by: torch.Tensor) -> None:
        """w = w + by, computed in fp32."""
        for parameter, piece in self._pairs(by):
            parameter.copy_(parameter.to(piece.dtype) + piece.to(parameter.device))

    def _locals(self) -> list[torch.Tensor]:
        return [local(parameter) for parameter in self._parameters]

    def _pairs(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._locals(), self.views(flat), strict=True)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The pieces of a flat buffer, each with the shape of its parameter."""
        parts = self._locals()
        pieces = torch.split(flat, [part.numel() for part in parts])
        return (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))


class View:
    """Chooses where a peer's training starts, `OuterState.base`: here theta."""

    def reset(self) -> None:
        """Sets the base to theta."""

    def rebase(self) -> None:
        """Sets the base to theta; the model keeps its progress since the old base."""

    def look_ahead(self, applied: bool, own: bool) -> None:
        """Moves the base, after the progress of a round was measured.

        `applied`: theta has just taken an outer step. `own`: the next mean has this peer's
        progress.
        """


class Apart(View):
    """The base is the theta that the model has applied; theta moves while the model trains."""

    def __init__(self, state: OuterState) -> None:
        self._state = state
        state.base = state.theta.clone()

    def reset(self) -> None:
        self._state.base.copy_(self._state.theta)


class Ahead(Apart):
    """The base is a guess of the next theta: see docs/internals/diloco.md, "Delayed"."""

    OWN, LAST, MOMENTUM = 0.75, 0.25, 0.25

    @torch.no_grad()
    def look_ahead(self, applied: bool, own: bool) -> None:
        state = self._state
        progress = (state.theta - state.base) / 2 + state.delta  # from halfway to theta
        self.reset()
        if own:
            state.base.sub_(self.OWN * progress)
        if applied:
            _, momentum = state.optimizer.rates.at(int(state.steps), 1)
            state.base.sub_(self.LAST * state.mean)
            state.base.sub_((self.MOMENTUM * momentum) * state.velocity)

    def rebase(self) -> None:
        self._state.rebase()


def view_of(settings: Settings, state: OuterState) -> View:
    if settings.mode == "delayed":
        return Ahead(state)
    if settings.mode == "decoupled" or settings.overlap:
        return Apart(state)
    return View()


def split(named: Named, count: int, pattern: Pattern) -> list[list[int]]:
    """The parameters of each of `count` fragments, by their places in `named`.

    The parameters of one layer stay together if the model has enough layers. A layer is an element
    of the first list of modules in a parameter's name ("blocks.3" of "blocks.3.norm.bias"), or else
    the parameter's module.
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
    """The outer state of a model: theta, v and k of each fragment.

    `groups` has the parameters of each, by their places in the model; `clock` the k of each, and
    then the run's name.
    """

    def __init__(
        self,
        named: Named,
        groups: Sequence[Sequence[int]],
        optimizer: OuterOptimizer,
        replica: Replica,
    ) -> None:
        self.groups = groups
        self._named = named
        self._replica = replica
        # The last number is the run's name. It differs on fresh peers; the first one's is elected.
        self.clock = torch.tensor([0] * len(groups) + [0], dtype=torch.int64)
        self.rename()
        self.fragments = [
            OuterState([named[i][1] for i in group], optimizer, self.clock[p : p + 1])
            for p, group in enumerate(groups)
        ]

    def rename(self) -> None:
        """Draws a new name, in case this peer starts another run."""
        self.clock[-1] = self._replica.first(secrets.randbits(62))

    @property
    def outer_step(self) -> int:
        """k: the steps that every fragment has taken."""
        return int(self.clock[:-1].min())

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self._named}

    @property
    def nbytes(self) -> int:
        return sum(fragment.theta.nbytes for fragment in self.fragments)

    def entries(self) -> list[list[TensorInfo]]:
        found = []
        for number, fragment in enumerate(self.fragments):
            suffix = f".{number}" if len(self.fragments) > 1 else ""
            theta = TensorInfo.from_torch(fragment.theta, f"diloco.theta{suffix}")
            velocity = TensorInfo.from_torch(fragment.velocity, f"diloco.velocity{suffix}")
            found.append([theta, velocity])
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are equal on all peers, except the run's name."""
        for fragment in self.fragments:
            yield fragment.theta
            yield fragment.velocity
        yield self.clock[:-1]

    def adopt(self) -> None:
        for fragment in self.fragments:
            fragment.adopt()

    def state_dict(self, sharded: bool) -> dict[str, Saved]:
        """The state, with theta and v in the order of the model, whatever its fragments."""
        return {
            "clock": self.clock,
            "theta": self.join([fragment.theta for fragment in self.fragments], sharded),
            "velocity": self.join([fragment.velocity for fragment in self.fragments], sharded),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state is of another model, other errors if it is malformed."""
        self.cut(state["theta"])
        self.cut(state["velocity"])
        clock = state["clock"]
        if clock.ndim != 1 or len(clock) < 2 or clock.dtype != torch.int64 or clock.min() < 0:
            raise ValueError(f"the clock of the state is {clock}: it must be counts of steps")

    def load(self, state: Mapping[str, Any]) -> None:
        for fragment, theta in zip(self.fragments, self.cut(state["theta"]), strict=True):
            fragment.theta.copy_(theta)
        for fragment, velocity in zip(self.fragments, self.cut(state["velocity"]), strict=True):
            fragment.velocity.copy_(velocity)
        clock = state["clock"]
        self.clock[-1] = clock[-1]
        same = clock.shape == self.clock.shape
        self.clock[:-1] = clock[:-1] if same else clock[:-1].min()

    def _pieces(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = {
            place: view
            for fragment, group, flat in zip(self.fragments, self.groups, flats, strict=True)
            for place, view in zip(group, fragment.views(flat), strict=True)
        }
        return [found[place] for place in sorted(found)]

    def join(self, flats: Sequence[torch.Tensor], sharded: bool) -> Saved:
        """Joins the flat tensors of fragments; all processes of a replica call it.

        If sharded, by the names of the parameters and not copied; else in the order of the model.
        """
        pairs = list(zip(self._named, self._pieces(flats), strict=True))
        if sharded:
            return {name: self._replica.joint(p, part) for (name, p), part in pairs}
        return torch.cat([self._replica.whole(p, part).flatten() for (_, p), part in pairs])

    def cut(self, saved: Saved) -> list[torch.Tensor]:
        """The inverse of `join`; each process takes its part of a whole tensor."""
        if isinstance(saved, torch.Tensor):
            pieces = torch.split(saved, [p.numel() for _, p in self._named])
            given = [piece.view(p.shape) for piece, (_, p) in zip(pieces, self._named, strict=True)]
        else:
            given = [saved[name] for name, _ in self._named]
        parts = [
            self._replica.part(p, each) for (_, p), each in zip(self._named, given, strict=True)
        ]
        into = [torch.empty_like(fragment.theta) for fragment in self.fragments]
        for piece, own in zip(self._pieces(into), parts, strict=True):
            if piece.shape != own.shape or not own.is_floating_point():
                raise ValueError(
                    f"the state has a parameter of shape {list(own.shape)} ({own.dtype}) where "
                    f"this model has one of shape {list(piece.shape)}"
                )
            piece.copy_(own)
        return into


# ---- radial-directional averaging (arXiv 2604.21428) ----


class Radial:
    """Splits a pseudo-gradient into norms and directions, and joins their means.

    docs/internals/diloco.md has the equation.

    `plain`: for each parameter, whether it is averaged as usual, as embeddings are.
    """

    def __init__(self, state: OuterState, plain: Sequence[bool]) -> None:
        self._state = state
        self._plain = plain
        self.norms = torch.ones(len(plain))
        self.mean = torch.ones(len(plain))  # the mean of all peers' norms

    def split(self) -> list[torch.Tensor]:
        directions = self._state.delta.clone()
        for number, part in enumerate(self._state.views(directions)):
            norm = float(part.norm())
            if not self._plain[number]:
                self.norms[number] = norm
                part.mul_(1 / norm if norm else 0.0)
        return [directions, self.norms]

    def join(self) -> None:
        """D from the mean direction, which is in place, and the mean norm."""
        for number, part in enumerate(self._state.views(self._state.mean)):
            if not self._plain[number]:
                norm = _norm(part)
                part.mul_(float(self.mean[number]) / norm if norm else 0.0)


def _norm(tensor: torch.Tensor) -> float:
    """The norm with the same bits on every machine.

    Unlike `Tensor.norm`, it adds in a fixed order, and all operations are elementwise.
    """
    squares = tensor.flatten().double()
    squares = squares * squares
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        squares[: len(squares) - half] += squares[half:].clone()
        squares = squares[:half]
    return math.sqrt(float(squares.sum()))
