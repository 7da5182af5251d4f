"""DiLoCo's modes in numpy, in fp64: what theta must be, given who contributed in which round.

Peer m pulls every element of its model to a number of its own, `targets[m]`, by gradient descent
on rate / 2 * (w - target)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracles import payloads, quantized

Array = np.ndarray[Any, np.dtype[np.float64]]
# in a peer's guess of a late mean: of its own progress, of the last mean, and of mu v
OWN, LAST, MOMENTUM = 0.75, 0.25, 0.25


@dataclass
class Outer:
    """The outer parameters, and Nesterov's momentum."""

    theta: Array
    lr: float = 0.7
    momentum: float = 0.9
    velocity: Array = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = np.zeros_like(self.theta)

    def step(self, mean: Array) -> None:
        self.velocity = self.momentum * self.velocity + mean
        self.theta = self.theta - self.lr * (mean + self.momentum * self.velocity)


@dataclass
class Problem:
    """The training of each peer."""

    targets: dict[str, float]
    inner_steps: int
    rate: float

    def train(self, w: Array, peer: str) -> Array:
        for _ in range(self.inner_steps):
            w = w - self.rate * (w - self.targets[peer])
        return w

    def progress(self, theta: Array, peers: Sequence[str]) -> Array:
        """The mean of the pseudo-gradients of peers that all begin at theta."""
        return np.mean([theta - self.train(theta, peer) for peer in peers], axis=0)


def sync(problem: Problem, outer: Outer, rounds: Sequence[Sequence[str]]) -> list[Array]:
    """theta after each round; `rounds` gives the contributors."""
    thetas = []
    for peers in rounds:
        outer.step(problem.progress(outer.theta, peers))
        thetas.append(outer.theta)
    return thetas


def delayed(
    problem: Problem, outer: Outer, rounds: Sequence[Sequence[str]]
) -> list[dict[str, Array]]:
    """Where each peer starts after each round, if a mean is applied one round later."""
    starts: list[dict[str, Array]] = []
    own: dict[str, Array] = {}
    previous: Array | None = None
    for peers in rounds:
        begins = {p: own.get(p, outer.theta) for p in peers}
        ends = {p: problem.train(begins[p], p) for p in peers}
        progress = {p: begins[p] - ends[p] for p in peers}
        ahead = np.zeros_like(outer.theta)
        if previous is not None:
            outer.step(previous)
            ahead = LAST * previous + MOMENTUM * outer.momentum * outer.velocity
        halfway = {p: (outer.theta + begins[p]) / 2 for p in peers}
        own = {p: outer.theta - OWN * (halfway[p] - ends[p]) - ahead for p in peers}
        previous = np.mean([*progress.values()], axis=0)
        starts.append(own)
    return starts


@dataclass
class Streaming:
    """Fragments of the parameters, each averaged once in the problem's inner steps.

    Attributes:
        outers: of each fragment.
        weights: of each peer, whole, after each round of a fragment.
    """

    problem: Problem
    places: Sequence[Array]  # of the elements of each fragment
    theta: Array
    overlap: int
    alpha: float
    lr: float
    momentum: float
    outers: list[Outer] = field(init=False)
    weights: list[dict[str, Array]] = field(default_factory=list)
    _own: dict[str, Array] = field(default_factory=dict)

    def run(self, rounds: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Streaming:
        """`rounds`: who contributes to the next fragment, and who joins there."""
        self.outers = [Outer(self.theta[at], self.lr, self.momentum) for at in self.places]
        self._own = {peer: self.theta.copy() for peer in rounds[0][0]}
        count, steps = len(self.places), self.problem.inner_steps
        for i, (peers, joining) in enumerate(rounds):
            fragment = i % count
            began = fragment * steps // count + (self.overlap if i and not rounds[i - 1][1] else 0)
            self._train((fragment + 1) * steps // count - began)
            self._own = {peer: self._own[peer] for peer in peers}
            at = self.places[fragment]
            theta = self.outers[fragment].theta
            progress = {peer: theta - w[at] for peer, w in self._own.items()}
            if not joining:
                self._train(self.overlap)
            self._apply(fragment, progress)
            for peer in joining:
                self._own[peer] = self.whole()
            self.weights.append({peer: w.copy() for peer, w in self._own.items()})
        return self

    def whole(self) -> Array:
        """theta of all fragments."""
        theta = np.empty_like(self.theta)
        for at, outer in zip(self.places, self.outers, strict=True):
            theta[at] = outer.theta
        return theta

    def _train(self, steps: int) -> None:
        one = Problem(self.problem.targets, 1, self.problem.rate)
        for _ in range(steps):
            self._own = {peer: one.train(w, peer) for peer, w in self._own.items()}

    def _apply(self, fragment: int, progress: Mapping[str, Array]) -> None:
        """The mean takes the place of a peer's own progress; what was learned since then stays."""
        at, outer = self.places[fragment], self.outers[fragment]
        before = outer.theta
        outer.step(np.mean([*progress.values()], axis=0))
        for peer, w in self._own.items():
            w[at] += (1 - self.alpha) * (outer.theta - before + progress[peer])


@dataclass(frozen=True)
class Codec:
    """To bytes and back, and what is multiplied with a residual."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, int], Any]
    decay: float = 1.0


def _blocks(name: str) -> Codec:
    format = quantized.FORMATS[name]
    return Codec(
        lambda x: quantized.quantize(x, format),
        lambda data, n: quantized.dequantize(data, n, format, "float32"),
    )


CODECS = {
    "int8": _blocks("BLOCK_8"),
    "int4": _blocks("BLOCK_4"),
    **{
        name: Codec(how.encode, how.decode, {"2bit": 0.9, "sparse": 0.95}.get(name, 1.0))
        for name, how in payloads.ENCODINGS.items()
    },
}


@dataclass
class Quantizing:
    """Peers that quantize what they send, in fp32, to the bit. Each moves by given numbers.

    A round after one of three peers or more averages in two stages, unless the codec forgets.

    Attributes:
        thetas: after each round.
        begins: where each peer begins the next one: with a lag, at a guess of the next theta.
        residuals: of each peer, after each round.
    """

    wire: str
    lag: int  # rounds from a mean to the step that applies it
    lr: float = 0.7
    momentum: float = 0.9
    thetas: list[Any] = field(default_factory=list)
    begins: list[dict[int, Any]] = field(default_factory=list)
    residuals: list[dict[int, Any]] = field(default_factory=list)

    def run(
        self, theta: Any, moves: Sequence[Mapping[int, Any]], resumes: int | None = None
    ) -> Quantizing:
        """`moves` has one array for each round and peer, in the order of the ranks.

        In round `resumes` all peers begin at theta, as they do with a checkpoint.
        """
        codec = CODECS[self.wire]
        lr, momentum, decay = (np.float32(x) for x in (self.lr, self.momentum, codec.decay))
        v = np.zeros_like(theta)
        residuals: dict[int, Any] = {}
        means: list[Any] = [None] * self.lag
        before = 0  # peers in the round before
        begins: dict[int, Any] = {}
        for k, of_peers in enumerate(moves):
            if k == resumes:
                begins = {}
            total, progress = None, {}
            two_stage = before >= 3 and decay == 1
            before = len(of_peers)
            for peer, move in of_peers.items():
                residual = residuals.get(peer, np.zeros_like(theta))
                begin = begins.get(peer, theta)
                progress[peer] = begin - (begin - move)
                given = decay * residual + progress[peer]
                decoded = codec.decode(codec.encode(given), given.size)
                residuals[peer] = given - decoded
                total = decoded if total is None else total + decoded
            mean = total / np.float32(before)
            for owner, part in zip(of_peers, parts(mean.size, before), strict=True):
                if two_stage and part.start < part.stop:
                    given = mean[part]
                    decoded = codec.decode(codec.encode(given), given.size)
                    lost = np.float32(before) * (given - decoded)
                    residuals[owner] = residuals[owner].copy()
                    residuals[owner][part] += lost
                    mean[part] = decoded
            means.append(mean)
            mean = means.pop(0)
            before_step = theta
            if mean is not None:
                v = momentum * v + mean
                theta = theta - lr * (mean + momentum * v)
            last, begins = begins, {}
            for peer, own in progress.items():
                begins[peer] = theta
                if not self.lag:
                    continue
                away = (theta - last.get(peer, before_step)) / np.float32(2) + own
                begins[peer] = theta - np.float32(OWN) * away
                if mean is not None:
                    begins[peer] = begins[peer] - np.float32(LAST) * mean
                    begins[peer] = begins[peer] - np.float32(MOMENTUM * self.momentum) * v
            self.thetas.append(theta)
            self.begins.append(begins)
            self.residuals.append(dict(residuals))
        return self


def parts(count: int, peers: int) -> list[slice]:
    """The numbers that the peer of each rank adds up, in blocks of 1,024."""
    blocks = (count + 1023) // 1024
    ends = [min(count, 1024 * (blocks * (rank + 1) // peers)) for rank in range(peers)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
