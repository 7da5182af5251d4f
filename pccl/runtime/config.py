"""Every timing and limit of the runtime, with its reason; PCCL_ variables are read here."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pccl.protocol.messages import INLINE_BYTES_MAX
from pccl.text import parse_advertised, parse_ports

MIB = 1 << 20


@dataclass(frozen=True)
class Config:
    """Settings of one peer or master.

    Attributes:
        advertise: host that other peers reach this one at; empty: the address the master sees.
        ports: on one of which a peer listens for bulk data; empty: any.
        ipc: whether neighbours on the same machine use ipc:// instead of tcp://.
        heartbeat_ms: a ping so often on every connection.
        heartbeat_timeout_ms: where nothing is heard for this long, the other side counts as lost.
        connect_timeout_s: until a connection must stand.
        master_patience_s: how long a peer tries to get back to a master that is gone.
        straggler_s: a master drops peers that keep others waiting for so long; None: never.
        sync_mbits: a peer sends shared state to others at no more than so many Mbit/s; None: no
            limit.
        lanes: connections to a neighbour on another machine where the user does not say; 0: as
            many as the round trip asks for.
        inline_bytes: all-reduces of up to so many go with the votes and are reduced by the master:
            two round trips to it, instead of these and twice around the ring.
    """

    advertise: str = ""
    ports: range = range(0)
    ipc: bool = True
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 5000
    connect_timeout_s: float = 5.0
    master_patience_s: float = 60.0
    straggler_s: float | None = None
    sync_mbits: int | None = None
    lanes: int = 0
    inline_bytes: int = 16384

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> Config:
        """The defaults, overridden by PCCL_ADVERTISE, PCCL_TRANSPORT, PCCL_HEARTBEAT_MS and so on.

        Raises:
            ValueError: a variable is set to something impossible.
        """
        transport = env.get("PCCL_TRANSPORT", "auto")
        if transport not in ("auto", "tcp"):
            raise ValueError(f"PCCL_TRANSPORT is {transport!r}: it may be auto or tcp")
        return Config(
            advertise=parse_advertised(env.get("PCCL_ADVERTISE", ""), "PCCL_ADVERTISE"),
            ports=parse_ports(env.get("PCCL_PORT_RANGE", ""), "PCCL_PORT_RANGE"),
            ipc=transport == "auto",
            heartbeat_ms=_positive(env, "PCCL_HEARTBEAT_MS", Config.heartbeat_ms),
            heartbeat_timeout_ms=_positive(
                env, "PCCL_HEARTBEAT_TIMEOUT_MS", Config.heartbeat_timeout_ms
            ),
            master_patience_s=_positive(env, "PCCL_MASTER_PATIENCE_S", 60),
            straggler_s=_positive(env, "PCCL_STRAGGLER_S", 0) or None,
            sync_mbits=_positive(env, "PCCL_SYNC_MBITS", 0) or None,
            lanes=_positive(env, "PCCL_LANES", Config.lanes),
            inline_bytes=min(
                _natural(env, "PCCL_INLINE_BYTES", Config.inline_bytes), INLINE_BYTES_MAX
            ),
        )


def _positive(env: Mapping[str, str], name: str, default: int) -> int:
    number = _natural(env, name, default)
    if number == 0 and name in env:
        raise ValueError(f"{name} is {env[name]!r}: it must be a positive whole number")
    return number


def _natural(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}: it must be a whole number")
    return int(text)


def machine_id() -> str:
    """Names this machine as far as ipc:// reaches: one boot, user, network, file system."""
    parts = [socket.gethostname(), str(uuid.getnode()), str(getattr(os, "getuid", int)())]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text())
    for namespace in ("net", "mnt"):
        path = Path("/proc/self/ns", namespace)
        if path.exists():
            parts.append(str(path.stat().st_ino))
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


def chunk_bytes(total: int, members: int, local: bool, quantized: bool) -> int:
    """The size of a message with a chunk of an all-reduce of `total` bytes.

    Several chunks to a segment let the hops of a ring overlap; above 1 MiB a chunk no longer fits
    the caches (measured: half the speed at 4 MiB), and on slow links the last chunks on slow lanes
    hold up everyone. On one machine each chunk costs several switches between threads, and 256 KiB
    pay best (measured: with 64 KiB 1 MiB takes four peers half as long again). A quantised chunk
    has about four times as many bytes in memory as on the wire.
    """
    segment = total // max(1, members)
    if quantized:
        return max(32 << 10, min(segment // 16, MIB // 4))
    least, most = (MIB // 4, MIB) if local else (32 << 10, MIB // 4)
    return max(least, min(segment // 4, most))


def lanes(local: bool, pool_size: int, config: Config) -> int:
    """Connections to a neighbour: as the user chose, else one if it is on this machine; 0: the
    engine chooses."""
    return pool_size or (1 if local else config.lanes)


def high_water_mark(local: bool) -> int:
    """Messages queued for one lane.

    Four keep a lane on this machine busy and stay in the caches. Elsewhere the kernel has more to
    send, and what is queued for a slow lane is what the end of a collective waits for.
    """
    return 4 if local else 2
