"""The runs of the experiment: their settings, how they differ, the reports of their peers, and
results on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults take a machine of two cores about a minute a run.

    They are of a small model that learns from 200 times as many bytes as it has parameters. How far
    DiLoCo is behind depends on that: a model that still improves fast loses more.

    Attributes:
        text: files to learn from; none: the source code of Python's standard library.
        width: of the model.
        layers: of the model.
        heads: of the model's attention.
        context: bytes that the model sees at once.
        batch: samples of a step, on all peers together: the same for any number of peers.
        steps: inner steps of each peer, so all runs train on batch * steps samples.
        inner_steps: H, between two outer steps.
        lr: highest learning rate of the inner optimizer.
        seed: of weights and samples.
    """

    text: tuple[str, ...] = ()
    width: int = 32
    layers: int = 1
    heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 4800
    inner_steps: int = 30
    lr: float = 4e-3
    seed: int = 0

    @property
    def rounds(self) -> int:
        """Outer steps."""
        return self.steps // self.inner_steps

    @property
    def tokens(self) -> int:
        """Bytes of text that a run trains on."""
        return self.steps * self.batch * self.context


class Churn(msgspec.Struct, frozen=True):
    """Kills of peers; another peer takes the place of each at once.

    Attributes:
        every_rounds: outer rounds from one kill to the next; 0: no kills.
        every_s: seconds from one kill to the next; 0: no kills.
    """

    every_rounds: int = 0
    every_s: float = 0.0


class Variant(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        name: of the row in the table, and of the file.
        peers: M.
        options: of `DiLoCo`; None: data parallel, an all-reduce of the gradients in each step.
        muon: whether the inner optimizer is Muon, for the matrices inside the model.
        churn: which peers are lost.
        pace_s: seconds that each inner step takes at least, as on separate machines: so peers that
            share a processor do not get faster when one of them is lost.
        rounds: outer steps, if not as many as the settings say.
    """

    name: str
    peers: int
    options: dict[str, Any] | None
    muon: bool = False
    churn: Churn = Churn()
    pace_s: float = 0.0
    rounds: int | None = None

    @property
    def is_accounted(self) -> bool:
        """Whether a ledger of samples makes up for what is lost with a peer."""
        return self.churn.every_rounds > 0

    @property
    def is_timed(self) -> bool:
        """Whether this run measures time, and not the loss."""
        return self.pace_s > 0


# Best eta for Nesterov's momentum of 0.9 at H = 30, by the number of peers (arXiv 2503.09799).
ETA = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}

BASELINE = "data-parallel"


def _diloco(name: str, peers: int, eta: float | None = None, **options: Any) -> Variant:
    chosen = {"outer_lr": eta or ETA[peers], "outer_momentum": 0.9, **options}
    return Variant(name, peers, chosen)


def _streaming(wire: str) -> Variant:
    """Two fragments, overlap and mixing as in arXiv 2501.18512."""
    options = {"mode": "streaming", "fragments": 2, "overlap": 5, "alpha": 0.5, "wire": wire}
    return _diloco(f"streaming-4-{wire}", 4, eta=0.4, **options)


# as `pccl.diloco.sparseloco()` and `muloco(4)`, without importing torch here
_SPARSELOCO = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "wire": "sparse"}
_MULOCO = {"outer_lr": 0.833, "outer_momentum": 0.733, "nesterov": True, "wire": "int4"}

VARIANTS = (
    Variant(BASELINE, 2, None),  # their number makes no difference to the loss
    *(_diloco(f"sync-{peers}", peers) for peers in ETA),
    _diloco("sync-4-int8", 4, wire="int8"),
    _diloco("sync-4-int4", 4, wire="int4"),
    _diloco("sync-4-e3m0", 4, wire="e3m0"),
    _diloco("delayed-4", 4, mode="delayed", eta=0.7, outer_momentum=0.0),
    _diloco("eager-4", 4, mode="eager", eta=1.0, outer_momentum=0.0),
    _streaming("int4"),
    _streaming("e3m0"),
    Variant("sparseloco-4", 4, _SPARSELOCO),
    Variant("muloco-4", 4, _MULOCO, muon=True),
    replace(_diloco("sync-4-churn", 4), churn=Churn(every_rounds=5)),
    replace(_diloco("calm", 4), pace_s=0.05, rounds=40),
    replace(_diloco("failures", 4), pace_s=0.05, rounds=40, churn=Churn(every_s=15.0)),
)


class Task(msgspec.Struct, frozen=True):
    """The task of a peer.

    Attributes:
        number: of the peer; its remainder by the number of peers is its part of each batch.
    """

    master: str
    settings: Settings
    variant: Variant
    number: int = 0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Model and text are in memory; nothing is connected yet."""

    parameters: int


class Point(msgspec.Struct, frozen=True, tag=True):
    """A point of the curves. `tokens` are of all peers, `tx_bytes` of this one."""

    tokens: int
    tx_bytes: int
    validation: float


class Averaged(msgspec.Struct, frozen=True, tag=True):
    """An outer round has ended; `seconds` since this peer began to train."""

    outer_step: int
    contributors: int
    tx_bytes: int
    seconds: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The training is over; the digest is of what all peers share."""

    tx_bytes: int
    validation: float
    digest: str


Report = Loaded | Point | Averaged | Finished

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(report: Report | Task) -> str:
    """One line of JSON, without its end."""
    return msgspec.json.encode(report).decode()


def decode(line: str) -> Report:
    """The report in a line.

    Raises:
        msgspec.DecodeError: the line is not a report.
    """
    return _decoder.decode(line)


def task(line: str) -> Task:
    """The task in a line."""
    return msgspec.json.decode(line, type=Task)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        parameters: of the model.
        validation: loss at the end, in nats per byte.
        tx_bytes: payload bytes that a peer has sent, with churn all processes in its place.
        curve: loss against tokens and bytes, as peer 0 has seen it.
        rounds: outer rounds of peer 0.
        kills: peers that were killed.
        seconds: from the first round to the last, for a timed run.
        load: of the machine at the end, processes that want to run (the mean of a minute).
    """

    settings: Settings
    variant: Variant
    parameters: int
    validation: float
    tx_bytes: float
    curve: tuple[Point, ...]
    rounds: tuple[Averaged, ...]
    kills: int
    load: float

    @property
    def tokens(self) -> int:
        """Tokens of all peers that the result has learnt from."""
        settings, peers = self.settings, self.variant.peers
        if not self.variant.is_timed:
            return settings.tokens  # a ledger has others learn what is lost with a peer
        own = settings.inner_steps * (settings.batch // peers) * settings.context
        return own * sum(one.contributors for one in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all peers in a second, from the end of the first round to the last."""
        own = self.tokens / sum(one.contributors for one in self.rounds)
        learnt = own * sum(one.contributors for one in self.rounds[1:])
        return learnt / (self.rounds[-1].seconds - self.rounds[0].seconds)

    @property
    def data_parallel_bytes(self) -> float:
        """Bytes that each peer would send for an fp32 ring all-reduce in each step."""
        peers = self.variant.peers
        steps = self.tokens / (self.settings.batch * self.settings.context)
        return steps * 2 * (peers - 1) / peers * 4 * self.parameters


def place(folder: Path, variant: Variant) -> Path:
    """The file of a run."""
    return folder / f"{variant.name}.json"


def save(folder: Path, result: Result) -> None:
    """Writes the file of a run, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = place(folder, result.variant)
    beside = path.with_suffix(".part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    os.replace(beside, path)


def load(folder: Path, variant: Variant, settings: Settings) -> Result | None:
    """The result of a run that need not be made again; None if there is none of these settings."""
    try:
        result = msgspec.json.decode(place(folder, variant).read_bytes(), type=Result)
    except (FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
        return None
    return result if (result.variant, result.settings) == (variant, settings) else None
