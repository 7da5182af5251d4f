"""The kinds of faults, schedules drawn from a seed, and the search for the faults that matter.

A schedule does not depend on the course of the run. A fault's target is a fraction, which selects
one of the possible targets when the fault is due. So any subset of a schedule is a schedule, too.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct


class Target(Enum):
    COPY = "copy"
    MASTER = "master"
    ALL = "all"


class Kind(NamedTuple):
    text: str  # what the fault does
    target: Target  # what it hits
    weight: int  # how often it is drawn, relative to others
    lasts_s: tuple[float, float] = (0.0, 0.0)  # at least and at most; (0, 0): it is not undone
    fatal: bool = False  # whether it ends its copy, or may end the copy's membership
    network: bool = False  # whether it needs --network


def of_network(
    text: str, weight: int, lasts_s: tuple[float, float] = (0.0, 0.0), *, fatal: bool = False
) -> Kind:
    """A fault of the network around one copy's host."""
    return Kind(text, Target.COPY, weight, lasts_s, fatal, network=True)


KILL, KILL_MOST, LEAVE = "kill", "kill-all-but-one", "leave"
JOIN, BURST = "join", "burst"
FREEZE, STARVE, BURN = "freeze", "starve", "burn"
RESTART, FREEZE_MASTER = "restart-master", "freeze-master"
FULL_DISK, NO_FILES, NO_FILES_MASTER = "full-disk", "no-descriptors", "no-descriptors-master"
CUT, CUT_OUT, CUT_IN = "cut", "cut-out", "cut-in"
RESET, RATE, DELAY, LOSS = "reset", "slow-link", "delay", "loss"

KINDS = {
    KILL: Kind("a copy is killed", Target.COPY, 6, fatal=True),
    KILL_MOST: Kind("all copies but one are killed at once", Target.ALL, 1, fatal=True),
    LEAVE: Kind("a copy is asked to end (SIGTERM)", Target.COPY, 2, fatal=True),
    JOIN: Kind("a copy is started", Target.ALL, 8),
    BURST: Kind("all copies that are missing are started at once", Target.ALL, 3),
    FREEZE: Kind("a copy is stopped (SIGSTOP)", Target.COPY, 3, (0.2, 6.0), fatal=True),
    STARVE: Kind("a copy gets a tenth of a processor", Target.COPY, 2, (1.0, 5.0)),
    BURN: Kind("other programs use all processors", Target.ALL, 1, (1.0, 5.0)),
    RESTART: Kind("the master is killed, and started again", Target.MASTER, 3, (0.0, 1.0)),
    FREEZE_MASTER: Kind("the master is stopped (SIGSTOP)", Target.MASTER, 1, (0.2, 4.0)),
    FULL_DISK: Kind("the master can write no more files", Target.MASTER, 2, (1.0, 5.0)),
    NO_FILES: Kind("a copy can open no more descriptors", Target.COPY, 1, (0.5, 3.0), fatal=True),
    NO_FILES_MASTER: Kind("the master can open no more descriptors", Target.MASTER, 1, (0.5, 3.0)),
    CUT: of_network("a copy's host is cut off", 3, (0.2, 6.0), fatal=True),
    CUT_OUT: of_network("nothing that a copy's host sends arrives", 2, (0.2, 6.0), fatal=True),
    CUT_IN: of_network("nothing that is sent to a copy's host arrives", 2, (0.2, 6.0), fatal=True),
    RESET: of_network("all connections of a copy's host are reset", 2, fatal=True),
    RATE: of_network("a copy's host sends 4 Mbit/s", 2, (1.0, 6.0)),
    DELAY: of_network("what a copy's host sends takes 200 ms longer", 2, (1.0, 6.0)),
    LOSS: of_network("a tenth of the packets of a copy's host is lost", 2, (1.0, 6.0)),
}


NO_NETWORK = "without --network"


def possible() -> tuple[dict[str, Kind], dict[str, str]]:
    """The kinds that are possible here without --network, and why the others are not."""
    why = dict.fromkeys((n for n, kind in KINDS.items() if kind.network), NO_NETWORK)
    if not hasattr(signal, "SIGSTOP"):
        stopping = (FREEZE, STARVE, FREEZE_MASTER)
        why |= dict.fromkeys(stopping, "this system has no SIGSTOP")
    if os.name != "posix":
        limited = (FULL_DISK, NO_FILES_MASTER)
        why |= dict.fromkeys(limited, "this system has no limits of resources")
    if sys.platform != "linux":
        why[NO_FILES] = "only Linux can limit another process"
    return {name: kind for name, kind in KINDS.items() if name not in why}, why


MOMENT_SHARE = 0.4  # the share of the faults that also wait for a named moment


class Fault(Struct, frozen=True, omit_defaults=True):
    at_s: float  # when it is due, in seconds since the faults began
    what: str  # the name of its kind
    whom: float = 0.0  # in [0, 1): selects one of the possible targets
    lasts_s: float = 0.0  # until it is undone
    moment: str = ""  # the moment that it waits for then; empty: none


class Schedule(Struct, frozen=True):
    """The faults of a run, and everything else that a repetition needs."""

    seed: int  # the seed of the draw
    copies: int  # the most that run at once
    seconds: float  # how long faults come
    faults: tuple[Fault, ...]  # in order
    settings: dict[str, str] = {}  # settings of the run

    def only(self, faults: Sequence[Fault], seconds: float | None = None) -> Schedule:
        """The schedule with only these faults, for this many seconds."""
        seconds = self.seconds if seconds is None else seconds
        return msgspec.structs.replace(self, faults=tuple(faults), seconds=seconds)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def load(path: Path) -> Schedule:
    """Reads a file. Raises OSError: there is none, or it is no schedule."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Schedule)
    except msgspec.DecodeError as error:
        raise OSError(f"{path} is not a schedule of faults: {error}") from None


def draw(
    seed: int, seconds: float, calm_s: float, kinds: Mapping[str, Kind], moments: Sequence[str]
) -> tuple[Fault, ...]:
    """Draws faults of these kinds, for this many seconds. The seed determines all of them."""
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


# ---- fewer faults with which a run still fails ----

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool], until_s: float) -> list[T]:
    """A subset of the items that still fails. If time suffices, it needs each of its items.

    This is delta debugging (ddmin, Zeller and Hildebrandt, 2002). `fails` need not be
    deterministic. The search ends at `until_s` of the monotonic clock.
    """
    found, pieces = list(items), 2
    while found and time.monotonic() < until_s:
        size = max(1, -(-len(found) // pieces))
        parts = [found[i : i + size] for i in range(0, len(found), size)]
        candidates = [] if len(parts) <= 2 else [*parts]
        for left_out in parts:
            candidates.append([item for part in parts if part is not left_out for item in part])
        smaller = next((s for s in candidates if time.monotonic() < until_s and fails(s)), None)
        if smaller is not None:
            pieces = 2 if len(smaller) <= size else max(pieces - 1, 2)
            found = smaller
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(found))
    return found
