"""What a training process is told, and what it reports: one JSON object a line on its stdout."""

from __future__ import annotations

import msgspec

from pccl.cli.experiment.settings import Settings
from pccl.cli.experiment.variants import Variant


class Task(msgspec.Struct, frozen=True):
    """What a peer does.

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
