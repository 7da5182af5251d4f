"""What the experiment runs: sizes of the model, arms, rates, and the results of runs on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

TOKENS_EACH = 20
INNER_STEPS = 30
PEERS_MAX = 8


class Size(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model, and how many samples it takes for its tokens in rounds of 30 steps."""

    name: str
    width: int
    layers: int
    heads: int = 4
    context: int = 32
    rounds: int = 160
    tokens_each: int = TOKENS_EACH  # for each parameter

    @property
    def is_long(self) -> bool:
        """Whether it has more tokens than the law is for."""
        return self.tokens_each > TOKENS_EACH

    @property
    def steps(self) -> int:
        """Inner steps of each peer."""
        return self.rounds * INNER_STEPS

    @property
    def parameters(self) -> int:
        """The parameters of the GPT of `pccl demo`, whose output layer is its embedding."""
        block = 12 * self.width**2 + 9 * self.width
        return (256 + self.context + 2) * self.width + self.layers * block

    @property
    def batch(self) -> int:
        """Samples of a step, of all peers together: a multiple of the largest number of peers."""
        wanted = self.tokens_each * self.parameters / (self.steps * self.context)
        return PEERS_MAX * max(1, round(wanted / PEERS_MAX))

    @property
    def tokens(self) -> int:
        """Bytes of text in a run."""
        return self.steps * self.batch * self.context


SIZES = {
    size.name: size
    for size in (
        Size("60k", width=44, layers=2),
        Size("200k", width=68, layers=3),
        Size("600k", width=108, layers=4),
        Size("60k-long", width=44, layers=2, rounds=320, tokens_each=40),
        Size("200k-long", width=68, layers=3, rounds=320, tokens_each=40),
    )
}


class Rates(msgspec.Struct, frozen=True, omit_defaults=True):
    """The highest inner learning rate, eta and mu; None: there is no outer step."""

    lr: float
    outer_lr: float | None = None
    outer_momentum: float | None = None


class Arm(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way to train.

    Attributes:
        name: of its row.
        grid: rates among which the sweep chooses.
        peers: M.
        options: of `DiLoCo`, beside the rates; None: data parallel.
        like: the arm whose chosen rates it takes; it has no sweep of its own.
        eta: in place of that arm's; the best by the number of peers (arXiv 2503.09799, figure 7).
        inner_steps: H.
        muon: whether the inner optimizer is Muon.
        kill_every: outer rounds from one kill of a peer to the next; 0: no kills.
    """

    name: str
    grid: tuple[Rates, ...] = ()
    peers: int = 4
    options: dict[str, Any] | None = msgspec.field(default_factory=dict)
    like: str = ""
    eta: float | None = None
    inner_steps: int = INNER_STEPS
    muon: bool = False
    kill_every: int = 0


def _grid(lrs: Iterable[float], etas: Iterable[float], mus: Iterable[float]) -> tuple[Rates, ...]:
    return tuple(Rates(*each) for each in product(lrs, etas, mus))


BASELINE = "data-parallel"
_LRS = (4e-3, 8e-3)
_SPARSE = _grid((8e-3, 16e-3), (1.0, 1.4), (0.0,))
_STREAMING = {"mode": "streaming", "fragments": 2, "overlap": 5, "wire": "int4"}
_DECOUPLED = {"mode": "decoupled", "fragments": 2, "wire": "int4"}
_ARMS = (
    Arm(BASELINE, tuple(map(Rates, (4e-3, 8e-3, 12e-3, 16e-3))), peers=1, options=None),
    Arm("sync-1", peers=1, like="sync-4", eta=0.4),
    Arm("sync-2", peers=2, like="sync-4", eta=0.6),
    Arm("sync-4", _grid(_LRS, (0.4, 0.6), (0.9,))),
    Arm("sync-8", peers=8, like="sync-4", eta=0.8),
    Arm("sync-4-int4", options={"wire": "int4"}, like="sync-4"),
    Arm("sync-4-2bit", options={"wire": "2bit"}, like="sync-4"),
    Arm("sync-8-int4", peers=8, options={"wire": "int4"}, like="sync-4", eta=0.8),
    Arm(
        "delayed-4-int4",
        _grid(_LRS, (0.4, 0.6), (0.85,)),
        options={"mode": "delayed", "wire": "int4"},
    ),
    Arm("streaming-4-int4", _grid(_LRS, (0.4, 0.6), (0.9,)), options=_STREAMING),
    Arm("decoupled-4-int4", _grid(_LRS, (0.4, 0.6), (0.9,)), options=_DECOUPLED),
    Arm("sparse-4", _SPARSE, options={"wire": "sparse"}, inner_steps=15),  # twice as many rounds
    Arm("muon-4-int4", _grid(_LRS, (0.6, 0.8), (0.8,)), options={"wire": "int4"}, muon=True),
    Arm("churn-4", like="sync-4", kill_every=5),
)
ARMS = {arm.name: arm for arm in _ARMS}
_LONG = (BASELINE, "sync-4", "sparse-4")


def arms_of(size: Size, arms: Iterable[Arm]) -> list[Arm]:
    """Those that are run at a size: the longer sizes are for `sparse-4`."""
    return [arm for arm in arms if not size.is_long or arm.name in _LONG]


class Run(msgspec.Struct, frozen=True):
    """One run; its result holds for exactly these settings."""

    size: Size
    arm: Arm
    rates: Rates
    seed: int

    @property
    def label(self) -> str:
        """For people."""
        rates = ", ".join(f"{n} {v:g}" for n, v in msgspec.structs.asdict(self.rates).items() if v)
        return f"{self.size.name} {self.arm.name} seed {self.seed} ({rates})"

    @property
    def key(self) -> bytes:
        """The settings that a result depends on."""
        arm = msgspec.structs.replace(self.arm, grid=(), like="", eta=None)
        return msgspec.json.encode((self.size, arm, self.rates, self.seed), order="sorted")


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a run.

    Attributes:
        loss: on what is held out, in nats per byte.
        tx_bytes: payload bytes that a peer has sent, with churn all processes in its place.
        kills: peers that were killed.
        seconds: that the run took, on a machine that may have had other work.
    """

    size: Size
    arm: Arm
    rates: Rates
    seed: int
    loss: float
    tx_bytes: float
    kills: int = 0
    seconds: float = 0.0

    @property
    def run(self) -> Run:
        """The run that it is the result of."""
        return Run(self.size, self.arm, self.rates, self.seed)


class Results:
    """All results, in a file of one JSON object a line, to which each run adds its own."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or msgspec.DecodeError: the file cannot be read, or is of another kind."""
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = (msgspec.json.decode(line, type=Result) for line in lines)
        self._results = {result.run.key: result for result in found}

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results.values())

    def get(self, run: Run) -> Result | None:
        """The result of a run; None if it was not made yet."""
        return self._results.get(run.key)

    def add(self, result: Result) -> None:
        """Writes one more.

        Raises:
            OSError: it cannot be written.
        """
        arm = msgspec.structs.replace(result.arm, grid=(), like="", eta=None)
        short = self._results[result.run.key] = msgspec.structs.replace(result, arm=arm)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(short) + b"\n")
            os.fsync(file.fileno())

    def swept(self, arm: Arm, size: Size) -> list[Result]:
        """The sweep of an arm, as far as it was made."""
        source = ARMS[arm.like] if arm.like else arm
        runs = (Run(size, source, rates, SWEEP_SEED) for rates in source.grid)
        return [result for run in runs if (result := self.get(run)) is not None]

    def rates(self, arm: Arm, size: Size) -> Rates | None:
        """The best rates of a sweep; None: it is not complete."""
        source = ARMS[arm.like] if arm.like else arm
        found = self.swept(arm, size)
        if len(found) < len(source.grid):
            return None
        best = min(found, key=lambda result: result.loss).rates
        return msgspec.structs.replace(best, outer_lr=arm.eta) if arm.eta else best


SWEEP_SEED = 0  # no other run has it
