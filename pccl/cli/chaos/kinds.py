"""The kinds of faults: whom they befall, how long they last, what they excuse."""

from __future__ import annotations

import os
import signal
import sys
from enum import Enum
from typing import NamedTuple


class Target(Enum):
    """Whom a fault befalls."""

    COPY = "copy"
    MASTER = "master"
    ALL = "all"


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        text: what is done.
        target: to whom.
        weight: how often it is drawn, beside others.
        lasts_s: at least and at most; (0, 0): it is not taken back.
        fatal: whether it ends its copy, or may end the copy's membership.
        network: whether it needs hosts of their own (network.py).
    """

    text: str
    target: Target
    weight: int
    lasts_s: tuple[float, float] = (0.0, 0.0)
    fatal: bool = False
    network: bool = False


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


def possible() -> tuple[dict[str, Kind], dict[str, str]]:
    """The kinds that this system can do without hosts of their own; why it cannot do the others."""
    why = dict.fromkeys((n for n, kind in KINDS.items() if kind.network), "without --network")
    if not hasattr(signal, "SIGSTOP"):
        stopping = (FREEZE, STARVE, FREEZE_MASTER)
        why |= dict.fromkeys(stopping, "this system has no SIGSTOP")
    if os.name != "posix":
        limited = (FULL_DISK, NO_FILES_MASTER)
        why |= dict.fromkeys(limited, "this system has no limits of resources")
    if sys.platform != "linux":
        why[NO_FILES] = "only Linux can limit another process"
    return {name: kind for name, kind in KINDS.items() if name not in why}, why
