"""The settings of a DiLoCo run and their defaults; all peers compare them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import xxhash

from pccl.extension import GRACE_MAX_S
from pccl.kernels import Wire
from pccl.support import whole
from pccl.types import Mode

AlonePolicy = Literal["continue", "step", "wait"]
BufferMode = Literal["local", "first", "mean"]
Pattern = Literal["strided", "sequential"]
WeightBy = Literal["peers", "samples", "rate"]
Merge = Literal["mean", "radial"]
Outliers = Literal["exclude", "clip"]
Rate = float | Sequence[tuple[int, float]]
"""A number; or points (k, value) between which it is linear in k, and beyond which constant."""

InnerSteps = int | Sequence[tuple[int, int]]
"""A whole number; or points (k, value), as for `Rate`."""

_CONFIG_BYTES = 1024

# The best outer learning rates by the number of peers, for a momentum of 0.9 and H = 30
# (arXiv 2503.09799, figure 7: M = 1, 2, 4, 8). They hardly depend on the model's size.
_LR_OF_PEERS = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
_MOMENTUM = 0.9
_MOMENTUM_OF_FEW_STEPS, _FEW_STEPS = 0.5, 20
_MOMENTUM_WITH_MUON = 0.6  # arXiv 2505.23725, at one peer
# for means that are a round old, measured in docs/internals/experiment.md
_LATE_LR, _LATE_MOMENTUM = 0.6, 0.85


@dataclass(frozen=True, slots=True)
class Rates:
    """eta and mu, which depend only on agreed values, so they are equal on all peers."""

    lr: Rate | None  # None: by the number of contributors to a mean
    momentum: Rate

    def at(self, outer_step: int, peers: int) -> tuple[float, float]:
        lr = _at(_LR_OF_PEERS, peers) if self.lr is None else _at(self.lr, outer_step)
        return lr, _at(self.momentum, outer_step)


def rates(
    lr: Rate | None,
    momentum: Rate | None,
    *,
    mode: Mode,
    inner_steps: InnerSteps | None,
    sparse: bool,
    muon: bool,
) -> Rates:
    """The given rates, or the defaults in the table of docs/howto/diloco.md."""
    late = mode == "delayed"
    if momentum is None:
        few = inner_steps is not None and min(_values(inner_steps)) < _FEW_STEPS
        usual = _MOMENTUM_OF_FEW_STEPS if few else _MOMENTUM_WITH_MUON if muon else _MOMENTUM
        momentum = 0.0 if sparse else min(usual, _LATE_MOMENTUM) if late else usual
    if lr is None and sparse:
        lr = 1.0
    elif lr is None and late and momentum == _LATE_MOMENTUM:
        lr = _LATE_LR
    checked = _checked("outer_momentum", momentum)
    if any(not 0 <= value < 1 for value in _values(checked)):
        raise ValueError(f"outer_momentum={momentum} must be in [0, 1)")
    if lr is not None:
        lr = _checked("outer_lr", lr)
        if any(value <= 0 for value in _values(lr)):
            raise ValueError(f"outer_lr={lr} must be positive")
    return Rates(lr, checked)


def checked_steps(inner_steps: InnerSteps) -> InnerSteps:
    """The inner steps in the form in which peers compare them."""
    if not isinstance(inner_steps, Sequence):
        return whole("inner_steps", inner_steps)
    points = _checked("inner_steps", inner_steps)
    assert isinstance(points, Sequence)
    return tuple((k, int(steps)) for k, steps in points)


def quadratic_steps(
    lr: Callable[[float], float],
    outer_steps: int,
    *,
    alpha: float,
    least: int,
    most: int = 1000,
    points: int = 16,
) -> list[tuple[int, int]]:
    """`inner_steps` by the quadratic synchronization rule (arXiv 2310.14423).

    H = (alpha / lr)^2, rounded down: rounds become longer as the inner learning rate falls.

    Args:
        lr: the inner learning rate after the warm-up, a function of `DiLoCo.progress` (0 to 1).
        outer_steps: the outer steps of the whole run.
        alpha: a learning rate of alpha / sqrt(H) gives rounds of H inner steps.
        least: the minimum of inner steps in a round.
        most: the maximum of inner steps in a round.
        points: the number of points; between them, H is linear.
    """
    steps = sorted({outer_steps * i // (points - 1) for i in range(points)})
    wanted = [(alpha / lr(k / outer_steps)) ** 2 for k in steps]
    return [(k, int(min(most, max(least, h)))) for k, h in zip(steps, wanted, strict=True)]


def _values(rate: Rate) -> list[float]:
    return [value for _, value in rate] if isinstance(rate, Sequence) else [rate]


def _checked(name: str, rate: Rate) -> Rate:
    if not isinstance(rate, Sequence):
        return float(rate)
    points = tuple((int(k), float(value)) for k, value in rate)
    steps = [k for k, _ in points]
    if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"{name}={rate} must be points (k, value) in ascending order of k")
    return points


def _at(rate: Rate, place: int) -> float:
    """The rate at an outer step, computed with the same bits on every machine."""
    if not isinstance(rate, Sequence):
        return rate
    (begin, value), *rest = rate
    for end, next_value in rest:
        if place < end:
            part = max(0, place - begin) / (end - begin)
            return value + (next_value - value) * part
        begin, value = end, next_value
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `DiLoCo`; all except `min_peers` and `alone` must be equal on all peers."""

    inner_steps: InnerSteps | None
    inner_seconds: float | None
    deadline_peers: int | None
    grace: float | None
    late_decay: float
    weight: WeightBy
    merge: Merge
    quarantine: int | None
    outliers: Outliers
    rates: Rates
    nesterov: bool
    buffers: BufferMode
    mode: Mode
    wire: Wire
    fragments: int
    pattern: Pattern
    overlap: int
    alpha: float
    min_peers: int
    alone: AlonePolicy

    def check(self) -> None:
        for name, kind in get_type_hints(Settings).items():
            word = getattr(self, name)
            if get_origin(kind) is Literal and word not in get_args(kind):
                raise ValueError(f"{name}={word!r} must be one of {get_args(kind)}")
        if self.quarantine is None and self.outliers != "exclude":
            raise ValueError(f"outliers={self.outliers!r} is for quarantine")
        if (self.inner_steps is None) == (self.inner_seconds is None):
            raise ValueError("give inner_steps or inner_seconds")
        if self.inner_steps is not None and min(_values(self.inner_steps)) < 1:
            raise ValueError(f"inner_steps={self.inner_steps} must be at least 1")
        if self.mode == "decoupled":
            self._check_decoupled()
        self._check_times()
        self._check_fragments()

    def check_sharded(self, ledger: bool) -> None:
        if self.mode == "decoupled":
            raise ValueError(
                'mode="decoupled" cannot be used with a sharded model: its processes would call '
                "collectives in two threads each, in no common order"
            )
        if self.merge == "radial":
            raise ValueError('merge="radial" needs the norms of whole tensors: not with shards')
        if self.deadline_peers is not None or ledger:
            what = "a ledger" if ledger else "deadline_peers"
            raise ValueError(
                f"{what} cannot be used with a sharded model: it is for peers of one process each"
            )

    def _check_times(self) -> None:
        if self.inner_seconds is not None and self.inner_seconds <= 0:
            raise ValueError(f"inner_seconds={self.inner_seconds} must be positive")
        if (self.grace is not None and not 0 <= self.grace <= GRACE_MAX_S) or not (
            0 <= self.late_decay <= 1
        ):
            raise ValueError(
                f"grace={self.grace} must be in [0, {GRACE_MAX_S}] seconds, and "
                f"late_decay={self.late_decay} in [0, 1]"
            )
        if self.deadline_peers is None:
            if self.late_decay != 1 or (self.grace is not None and self.inner_seconds is None):
                raise ValueError(
                    "grace is for inner_seconds, and both it and late_decay for deadline_peers"
                )
        elif self.inner_seconds is not None and self.grace is None:
            raise ValueError("deadline_peers with inner_seconds needs a grace")

    def _check_decoupled(self) -> None:
        if self.inner_seconds is not None:
            raise ValueError(
                'mode="decoupled" needs inner_steps, not inner_seconds: each learner has its own '
                "clock"
            )
        if self.late_decay != 1:
            raise ValueError(f'late_decay={self.late_decay} must be 1 with mode="decoupled"')
        if self.buffers == "first":
            raise ValueError(
                'buffers="first" cannot be used with mode="decoupled": they would be read while '
                "the learner changes them"
            )

    def _check_fragments(self) -> None:
        if self.mode != "streaming" and (self.overlap, self.alpha) != (0, 0.0):
            raise ValueError(
                f'overlap={self.overlap} and alpha={self.alpha} are for mode="streaming", and '
                f"mode={self.mode!r}"
            )
        if self.mode not in ("streaming", "decoupled"):
            if self.fragments != 1:
                raise ValueError(
                    f'fragments={self.fragments} are for mode="streaming" and "decoupled", and '
                    f"mode={self.mode!r}"
                )
            return
        if self.inner_steps is not None:
            least = int(min(_values(self.inner_steps)))
            if self.fragments > least:
                raise ValueError(f"fragments={self.fragments} must be from 1 to inner_steps")
            between = least // self.fragments
            if self.overlap >= between:
                raise ValueError(
                    f"overlap={self.overlap} must be less than the inner steps from one fragment "
                    f"to the next: {least} // {self.fragments} = {between}"
                )
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1)")
        if self.buffers == "first" and self.overlap and self.ends_early:
            raise ValueError(
                'buffers="first" cannot be used with an overlap if rounds may end early: they are '
                "broadcast when a mean arrives, which is not at the same inner step on all peers"
            )

    @property
    def unlike(self) -> bool:
        """True if peers may train on different numbers of samples."""
        return self.ends_early or self.weight != "peers"

    @property
    def ends_early(self) -> bool:
        """True if a round may end before a peer has taken its inner steps."""
        return self.inner_seconds is not None or self.deadline_peers is not None

    def steps_at(self, outer_step: int, fragment: int = 0) -> int:
        """Inner steps until a fragment is due, after `outer_step` outer steps; 0: by seconds."""
        if self.inner_steps is None:
            return 0
        whole, count = int(_at(self.inner_steps, outer_step)), self.fragments
        return (fragment + 1) * whole // count - fragment * whole // count

    @property
    def least_peers(self) -> int:
        return max(2, self.min_peers) if self.alone == "wait" else 1

    def config(self) -> dict[str, Any]:
        values = asdict(self)
        del values["min_peers"], values["alone"], values["rates"]
        return {
            **values,
            "outer_lr": self.rates.lr,
            "outer_momentum": self.rates.momentum,
            "peers_to_go_on": self.least_peers,
        }


def layout_digest(layout: list[tuple[str, list[int]]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())


def encode(config: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(config, sort_keys=True, default=float).encode()  # one of numpy's
    if len(text) > _CONFIG_BYTES:
        raise ValueError(
            f"the settings have {len(text)} bytes, more than {_CONFIG_BYTES}: {text!r}"
        )
    return torch.frombuffer(bytearray(text.ljust(_CONFIG_BYTES)), dtype=torch.uint8)


def decode(encoded: torch.Tensor) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(encoded.numpy().tobytes())
    return settings


_DIGESTS = {
    "parameters": "the digest of the names and shapes of the trained parameters",
    "not_trained": "the digest of the names and shapes of frozen parameters and buffers",
}


def describe_mismatch(*, run: torch.Tensor, own: torch.Tensor) -> str:
    """How the settings differ; empty if they do not. 1 and 1.0 are the same."""
    theirs, ours = decode(run), decode(own)
    differences = ", ".join(
        f"{_DIGESTS.get(key, key)} is {theirs.get(key)!r} in the run and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    )
    return differences and f"this peer's DiLoCo settings differ from the run's: {differences}"
