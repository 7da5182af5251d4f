"""The kinds of faults, a schedule of them from a seed, and those of the network.

A schedule says nothing of what happens: whom a fault befalls is a fraction, which is applied to
those that it can befall when the time has come. So any part of a schedule is a schedule, too.

What is cut is cut silently: a host sends to a hardware address that nobody has. So nothing is
needed but bridges, and for `slow-link`, `delay` and `loss` the kernel's tbf and netem.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct


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


NOBODY = "02:00:00:00:00:ff"
DEVICE = "wan0"
QDISCS = {
    RATE: "tbf rate 4mbit burst 32kb latency 100ms",
    DELAY: "netem delay 200ms 50ms",
    LOSS: "netem loss 10%",
}
_names = itertools.count()
Undo = Callable[[], None]


class NetworkError(Exception):
    """This machine cannot have hosts of their own; the text says why."""


class Network:
    """Hosts: number 0 for the master, and one for each copy that runs at once.

    Args:
        copies: how many.

    Attributes:
        addresses: of the hosts.

    Raises:
        NetworkError: this machine cannot have them.
    """

    def __init__(self, copies: int) -> None:
        for tool in ("ip", "nsenter"):
            if sys.platform != "linux" or shutil.which(tool) is None:
                raise NetworkError(f"it takes Linux, and the program {tool}")
        self.addresses = [f"10.79.{host // 200}.{host % 200 + 1}" for host in range(copies + 1)]
        self._prefix = f"pccl{os.getpid()}_{next(_names)}"
        self._hosts = range(copies + 1)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """A command line that runs on a host; the process is the command's own."""
        return ["nsenter", f"--net=/run/netns/{self._name(host)}", "--", *command]

    def kinds(self) -> tuple[dict[str, Kind], dict[str, str]]:
        """The kinds of faults that are possible; why the others are not."""
        why = {}
        for what, qdisc in QDISCS.items():
            try:
                self._qdisc(1, qdisc)()
            except NetworkError as error:
                why[what] = str(error)
        try:
            self.reset(1)
        except NetworkError as error:
            why[RESET] = str(error)
        found = {n: kind for n, kind in KINDS.items() if kind.network and n not in why}
        return found, why

    def harm(self, what: str, host: int) -> Undo:
        """Disturbs the network of a host. Returns what ends that."""
        if what == CUT:
            return self._cut(self._ways_out(host) + self._ways_in(host))
        if what == CUT_OUT:
            return self._cut(self._ways_out(host))
        if what == CUT_IN:
            return self._cut(self._ways_in(host))
        return self._qdisc(host, QDISCS[what])

    def reset(self, host: int) -> None:
        """Resets all established connections of a host. Raises NetworkError."""
        if shutil.which("ss") is None:
            raise NetworkError("it takes the program ss")
        _run(*self.command(host, ["ss", "-K", "-t", "state", "established"]))

    def close(self) -> None:
        """Removes the hosts, and ends what runs there."""
        for name in [*map(self._name, self._hosts), self._name("switch")]:
            with contextlib.suppress(NetworkError):  # it was not made
                for pid in _run("ip", "netns", "pids", name).split():
                    _run("kill", "-9", pid)
                _run("ip", "netns", "delete", name)

    def _make(self) -> None:
        switch = self._name("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "up", "type", "bridge")
        for host in self._hosts:
            name = self._name(host)
            _run("ip", "netns", "add", name)
            peer = ("peer", "name", f"to{host}", "netns", switch)
            mac = ("address", self._mac(host))
            _run("ip", "-n", name, "link", "add", DEVICE, *mac, "up", "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", f"to{host}", "master", "br0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/16", "dev", DEVICE)

    def _ways_out(self, host: int) -> list[tuple[int, int]]:
        """From this host to each other one."""
        return [(host, other) for other in self._hosts if other != host]

    def _ways_in(self, host: int) -> list[tuple[int, int]]:
        return [(other, host) for other in self._hosts if other != host]

    def _cut(self, pairs: Sequence[tuple[int, int]]) -> Undo:
        """What the first host of a pair sends to the second one is lost."""
        for source, target in pairs:
            self._neighbour(source, target, NOBODY)

        def undo() -> None:
            for source, target in pairs:
                self._neighbour(source, target, self._mac(target))

        return undo

    def _neighbour(self, source: int, target: int, mac: str) -> None:
        where = ("lladdr", mac, "dev", DEVICE, "nud", "permanent")
        _run("ip", "-n", self._name(source), "neigh", "replace", self.addresses[target], *where)

    def _qdisc(self, host: int, qdisc: str) -> Undo:
        where = ("tc", "-n", self._name(host), "qdisc")
        _run(*where, "replace", "dev", DEVICE, "root", *qdisc.split())

        def undo() -> None:
            with contextlib.suppress(NetworkError):  # another one has taken its place, and ended
                _run(*where, "del", "dev", DEVICE, "root")

        return undo

    def _name(self, host: int | str) -> str:
        return f"{self._prefix}.{host}"

    @staticmethod
    def _mac(host: int) -> str:
        return f"02:00:00:01:{host >> 8:02x}:{host & 255:02x}"


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, text=True, capture_output=True, check=False)
    except OSError as error:
        raise NetworkError(f"{argv[0]}: {error.strerror}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()
        raise NetworkError(f"{' '.join(argv[:4])} ...: {why[0] if why else done.returncode}")
    return done.stdout
