"""Which faults come when: drawn from one seed, before anything begins, and so the same each time.

A schedule says nothing of what happens: whom a fault befalls is a fraction, which is applied to
those that it can befall when the time has come. So any part of a schedule is a schedule, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from pccl.cli.chaos.kinds import Kind

MOMENT_SHARE = 0.4  # of the faults wait for a named moment, not for a time alone


class Fault(Struct, frozen=True, omit_defaults=True):
    """A fault.

    Attributes:
        at_s: when it is due, in seconds since the faults began.
        what: the name of its kind.
        whom: in [0, 1): which of those that it can befall.
        lasts_s: until it is taken back.
        moment: what it waits for then; empty: nothing.
    """

    at_s: float
    what: str
    whom: float = 0.0
    lasts_s: float = 0.0
    moment: str = ""


class Schedule(Struct, frozen=True):
    """The faults of a run, and what else a repetition needs.

    Attributes:
        seed: from which they were drawn.
        copies: at most so many at once.
        seconds: how long faults come.
        faults: in order.
        settings: of whoever runs it.
    """

    seed: int
    copies: int
    seconds: float
    faults: tuple[Fault, ...]
    settings: dict[str, str] = {}

    def only(self, faults: Sequence[Fault]) -> Schedule:
        """The same with these faults alone."""
        return msgspec.structs.replace(self, faults=tuple(faults))

    def save(self, path: Path) -> None:
        """Writes a file that `load` reads."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def load(path: Path) -> Schedule:
    """Reads a file. Raises OSError: there is none, or it is no schedule."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Schedule)
    except msgspec.DecodeError as error:
        raise OSError(f"{path} is no schedule of faults: {error}") from None


def draw(
    seed: int, seconds: float, calm_s: float, kinds: Mapping[str, Kind], moments: Sequence[str]
) -> tuple[Fault, ...]:
    """Draws faults.

    Args:
        seed: decides everything.
        seconds: how long they come.
        calm_s: from one to the next, on average.
        kinds: by name, those that are possible here.
        moments: names of the moments that faults may wait for.
    """
    rng = random.Random(seed)
    names = sorted(kinds)
    weights = [kinds[name].weight for name in names]
    faults = []
    at_s = rng.uniform(0.0, 2 * calm_s)
    while names and at_s < seconds:
        (what,) = rng.choices(names, weights)
        whom, length = rng.random(), rng.random()
        waits, moment = rng.random() < MOMENT_SHARE, rng.choice(moments) if moments else ""
        low, high = kinds[what].lasts_s
        lasts_s = round(low + (high - low) * length, 3)
        moment = moment if waits else ""
        faults.append(Fault(round(at_s, 3), what, round(whom, 6), lasts_s, moment))
        at_s += rng.uniform(0.0, 2 * calm_s)
    return tuple(faults)
