"""The settings with their ranges and defaults, and PCCL_ variables.

Fixed timings and limits are in limits.py.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import xxhash

from pccl.protocol.messages import INLINE_BYTES_MAX, PEER_NAME_CHARS_MAX
from pccl.support import parse_advertised, parse_ports, require

log = logging.getLogger("pccl")

WEEK_S = 7 * 24 * 3600  # as milliseconds it fits in an int of libzmq
# Settings that are read elsewhere, or are not numbers.
_OTHERS = (
    "PCCL_MASTER", "PCCL_NAME", "PCCL_ADVERTISE", "PCCL_PORT_RANGE", "PCCL_CURVE_DIR",
    "PCCL_TRANSPORT", "PCCL_OUTGOING_ONLY", "PCCL_RELAY", "PCCL_LOG_LEVEL", "PCCL_ENGINE",
    "PCCL_BUILD",
)  # fmt: skip


class Range(NamedTuple):
    """The range of a setting, and its environment variable, if there is one.

    libzmq takes milliseconds as 32-bit integers, and the system refuses very long waits. A value
    out of range would fail later, with an obscure error.
    """

    variable: str
    least: int
    most: int


RANGES = {
    "heartbeat_ms": Range("PCCL_HEARTBEAT_MS", 1, 3600 * 1000),
    "heartbeat_timeout_ms": Range("PCCL_HEARTBEAT_TIMEOUT_MS", 2, 24 * 3600 * 1000),
    "handshake_timeout_s": Range("", 0, 3600),
    "connect_timeout_s": Range("PCCL_CONNECT_TIMEOUT_S", 1, WEEK_S),
    "master_patience_s": Range("PCCL_MASTER_PATIENCE_S", 1, WEEK_S),
    "straggler_s": Range("PCCL_STRAGGLER_S", 1, WEEK_S),
    "sync_mbits": Range("PCCL_SYNC_MBITS", 1, 1000 * 1000),
    "lanes": Range("PCCL_LANES", 1, 256),
    "inline_bytes": Range("PCCL_INLINE_BYTES", 0, INLINE_BYTES_MAX),
}


@dataclass(frozen=True)
class Config:
    """Settings of one peer or master."""

    # a name of the peer, for errors and logs: at most PEER_NAME_CHARS_MAX printable characters;
    # empty: its host and process, and its LOCAL_RANK if it has one
    name: str = ""
    # the hosts at which other peers reach this one; empty: the address that the master sees, and
    # `further_hosts`
    advertise: tuple[str, ...] = ()
    # a peer listens for bulk data on one of these ports; empty: on any port
    ports: range = range(0)
    ipc: bool = True  # whether neighbors on the same machine use ipc:// instead of tcp://
    heartbeat_ms: int = 1000  # heartbeat interval of every connection
    # heartbeat timeout; a connection that is silent for this time is lost
    heartbeat_timeout_ms: int = 5000
    handshake_timeout_s: float = 5.0  # time limit for establishing a connection, with its handshake
    # how long a peer tries to reach a master that is not up yet; None: the arguments of `connect`
    # give the number of attempts
    connect_timeout_s: float | None = None
    master_patience_s: float = 60.0  # how long a peer tries to reconnect to the master
    # whether a master may come back after its end; if not, a peer gives up when nothing listens
    master_returns: bool = True
    # how long a peer may keep others waiting before the master drops it; None: no limit
    straggler_s: float | None = None
    # the greatest rate, in Mbit/s, at which a peer sends shared state to others; None: no limit
    sync_mbits: int | None = None
    # connections to a neighbor on another machine, unless the Communicator sets
    # p2p_connection_pool_size; 0: chosen by the round trip
    lanes: int = 0
    # whether no peer can connect to this one, as behind NAT: it connects to others
    outgoing: bool = False
    # whether this peer joins streams of others that cannot connect to each other
    relay: bool = False
    dial_back: bool = True  # whether the master checks that it can reach a peer, by dialling it
    # the largest all-reduce whose data travels with the votes, so that the master reduces it; None:
    # `pccl.protocol.tuning` chooses. Such an all-reduce takes one round trip to the master, and
    # none around the ring.
    inline_bytes: int | None = None

    @property
    def first_host(self) -> str:
        """The first host at which other peers reach this one; "": as the master sees it."""
        return self.advertise[0] if self.advertise else ""

    def __post_init__(self) -> None:
        """Raises ValueError if a number is out of range, or two contradict each other."""
        for name, (_, least, most) in RANGES.items():
            value = getattr(self, name)
            unset = value == getattr(Config, name)  # a default of 0 or None is out of range
            if not unset and not least <= value <= most:
                raise ValueError(f"{name} is {value!r}: it must be from {least} to {most}")
        require("name", self.name, str)
        if not self.name.isprintable() or len(self.name) > PEER_NAME_CHARS_MAX:
            raise ValueError(
                f"name is {self.name!r}: it must have at most {PEER_NAME_CHARS_MAX} characters "
                "that can be printed (PCCL_NAME)"
            )
        if self.heartbeat_ms >= self.heartbeat_timeout_ms:
            raise ValueError(
                f"PCCL_HEARTBEAT_MS is {self.heartbeat_ms}, and PCCL_HEARTBEAT_TIMEOUT_MS "
                f"{self.heartbeat_timeout_ms}: the time-out must be longer, several times at best"
            )
        if self.outgoing and self.relay:
            raise ValueError("PCCL_OUTGOING_ONLY and PCCL_RELAY: nobody reaches this peer's relay")

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> Config:
        """The defaults, overridden by PCCL_ADVERTISE, PCCL_TRANSPORT, PCCL_HEARTBEAT_MS and so on.

        Sets up the log, too, by PCCL_LOG_LEVEL.

        Raises ValueError: a variable has an invalid value.
        """
        configure_logging()
        _warn_of_unknown(tuple(sorted(name for name in env if name.startswith("PCCL_"))))
        transport = env.get("PCCL_TRANSPORT", "auto")
        if transport not in ("auto", "tcp"):
            raise ValueError(f"PCCL_TRANSPORT is {transport!r}: it may be auto or tcp")
        numbers: dict[str, Any] = {
            name: _number(env, *found) for name, found in RANGES.items() if found.variable in env
        }
        return Config(
            name=env.get("PCCL_NAME", ""),
            advertise=parse_advertised(env.get("PCCL_ADVERTISE", ""), "PCCL_ADVERTISE"),
            ports=parse_ports(env.get("PCCL_PORT_RANGE", ""), "PCCL_PORT_RANGE"),
            ipc=transport == "auto",
            outgoing=_switch(env, "PCCL_OUTGOING_ONLY"),
            relay=_switch(env, "PCCL_RELAY"),
            **numbers,
        )


@functools.cache
def _warn_of_unknown(names: tuple[str, ...]) -> None:
    """Warns of unknown settings, once for the same names."""
    known = {*_OTHERS, *(found.variable for found in RANGES.values() if found.variable)}
    for name in names:
        if name not in known:
            import difflib  # here, so that importing pccl does not import it

            near = difflib.get_close_matches(name, known, 1, 0.8)
            hint = f"did you mean {near[0]}?" if near else "docs/howto/tuning.md lists all"
            log.warning("%s is not a setting of pccl, and has no effect: %s", name, hint)


def _number(env: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = env[name]
    plain = text.isascii() and text.isdecimal() and len(text) < 20
    if not plain or not least <= int(text) <= most:
        raise ValueError(f"{name} is {text!r}: it must be a whole number from {least} to {most}")
    return int(text)


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{name} is {text!r}: it may be 0 or 1")
    return text == "1"


def default_name(env: Mapping[str, str] = os.environ) -> str:
    """A peer's default name: its host and process, and its LOCAL_RANK."""
    rank = f"/{env['LOCAL_RANK']}" if env.get("LOCAL_RANK", "").isdecimal() else ""
    own = f":{os.getpid()}{rank}"[:PEER_NAME_CHARS_MAX]
    host = "".join(c if c.isprintable() else "?" for c in socket.gethostname())
    return host[: PEER_NAME_CHARS_MAX - len(own)] + own


def machine_id() -> str:
    """Identifies the reach of ipc://: one boot of a machine, user, network and file system."""
    parts = [socket.gethostname(), str(uuid.getnode()), str(getattr(os, "getuid", int)())]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text())
    for namespace in ("net", "mnt"):
        path = Path("/proc/self/ns", namespace)
        if path.exists():
            parts.append(str(path.stat().st_ino))
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


# ---- the log ----

TRACE = 5
LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERR": logging.ERROR,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "FATAL": logging.CRITICAL,
    "NONE": logging.CRITICAL + 10,
}


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the `sys.stderr` of the moment, unless the program has closed it or has none."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(sys.stderr, "closed", sys.stderr is None):
            self.stream = sys.stderr
            super().emit(record)


def configure_logging() -> None:
    """Sets the level of the `pccl` logger from PCCL_LOG_LEVEL and sends it to stderr, once.

    An unknown level is reported and otherwise ignored: a log level is never fatal.
    """
    logger = logging.getLogger("pccl")
    if logger.handlers:
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s pccl %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    name = os.environ.get("PCCL_LOG_LEVEL", "WARN")
    logger.setLevel(LEVELS.get(name.upper(), logging.WARNING))
    if name.upper() not in LEVELS:
        logger.warning("PCCL_LOG_LEVEL is %r: it may be %s", name, ", ".join(LEVELS))
