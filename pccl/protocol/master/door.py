"""Which newcomers may be admitted at all. Pure functions."""

from __future__ import annotations

import re

from pccl.protocol import messages as m
from pccl.support.text import KEY
from pccl.version import __version__

HOST = re.compile(r"[A-Za-z0-9._:%-]{1,200}")  # a name or an address: it becomes an endpoint
IPC_MAX = 100  # characters of a socket's path


def newcomer(hello: m.Hello, host: str) -> m.PeerInfo:
    """A peer without a number; `host` is the address that the master sees."""
    first, *others = hosts(hello, host)
    address = (first, hello.port, hello.ipc, hello.machine, hello.curve)
    rest = hello.team, hello.team_size, hello.outgoing, hello.relay, tuple(others)
    return m.PeerInfo(0, hello.group, *address, *rest)


def hosts(said: m.Hello | m.Examine, seen: str) -> tuple[str, ...]:
    """Where a peer may be reached: that is where the master sees it, unless it names a host."""
    return tuple(dict.fromkeys((said.host or seen, *said.others)))


def refusal(said: m.Hello | m.Resume, info: m.PeerInfo, arithmetic: bytes | None) -> str:
    """Why a newcomer is refused, by its first message; empty if it is not.

    Args:
        said: its first message.
        info: its addresses.
        arithmetic: that of the run's peers, if there are any.
    """
    if said.protocol != m.PROTOCOL_VERSION:
        return (
            f"this peer (pccl {said.version}) speaks protocol version {said.protocol}, the master "
            f"(pccl {__version__}) version {m.PROTOCOL_VERSION}: install the same version of pccl"
        )
    if arithmetic not in (None, said.arithmetic):
        return (
            "this machine's arithmetic differs from that of the peers in the run (the kernel "
            "self-test gave other bits), so results could not be bit-identical: rebuild pccl, "
            "compare `pccl doctor`"
        )
    for host in info.hosts:
        if not HOST.fullmatch(host):
            return f"it asks to be reached at {host!r}, which is no host (PCCL_ADVERTISE)"
    if info.curve and not KEY.fullmatch(info.curve):
        return f"its key is {info.curve!r}, which is no key"
    if info.outgoing and info.relay:
        return "it only dials out (PCCL_OUTGOING_ONLY), and so cannot relay (PCCL_RELAY)"
    if len(info.ipc) > IPC_MAX or not (info.ipc + info.machine).isprintable():
        return f"it listens at {info.ipc!r} on machine {info.machine!r}, which cannot be"
    return ""
