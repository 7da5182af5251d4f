"""What a run has come to, and the file that keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pccl.cli.experiment.reports import Averaged, Point
from pccl.cli.experiment.settings import Settings
from pccl.cli.experiment.variants import Variant


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
        """What each of as many peers sends for an fp32 ring all-reduce in each step."""
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
