"""What a training process of the demo tells the orchestrator: one JSON object a line on its
stdout."""

from __future__ import annotations

import msgspec


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model and the text are in memory; nothing is connected yet."""

    parameters: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The peer holds the run's shared state and begins to train."""

    outer_step: int
    validation_loss: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    """Some inner steps were taken. `loss` is their mean, in nats per byte."""

    outer_step: int
    loss: float
    tokens_per_s: float


class Averaged(msgspec.Struct, frozen=True, tag=True):
    """An outer round is over. `tx_bytes` counts from the start of the peer."""

    outer_step: int
    contributors: int
    retries: int
    reduce_s: float
    reduce_bytes: int
    tx_bytes: int
    validation_loss: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last outer step is taken; the digest is that of theta, v and k."""

    outer_step: int
    digest: str


Report = Loaded | Joined | Trained | Averaged | Finished

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(report: Report) -> str:
    """One line of JSON, without its end."""
    return msgspec.json.encode(report).decode()


def decode(line: str) -> Report:
    """The report in a line.

    Raises:
        msgspec.DecodeError: the line is not a report.
    """
    return _decoder.decode(line)
