"""Whether peers can reach a newcomer: conclusions from the master's dial. Pure functions.

The master dials a newcomer once, at the address that others would use. If it reaches the newcomer,
they most likely can. If not, that proves nothing about peers on the same machine, which need no
network, or about an address in a private network that the master may not belong to. In these cases
the newcomer is admitted with a warning; if its neighbours cannot reach it either, it is dropped.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Protocol

from pccl.protocol import messages as m
from pccl.support.text import address_text


class Placed(Protocol):
    """An object with a peer's machine, such as a PeerInfo or a Hello."""

    @property
    def ipc(self) -> str:
        """Its address for peers of the same machine."""

    @property
    def machine(self) -> str:
        """Its machine."""


def local(one: Placed, other: Placed) -> bool:
    """Whether two peers reach each other without a network."""
    return bool(one.ipc and other.ipc) and one.machine == other.machine


def matters(info: m.PeerInfo, seen: str, group: Iterable[m.PeerInfo]) -> bool:
    """Whether a newcomer that the master cannot reach must be refused.

    Args:
        info: the newcomer.
        seen: its address as the master sees it.
        group: the other peers of its group.
    """
    return _judged(info.host, seen) and not all(local(info, other) for other in group)


def _judged(host: str, seen: str) -> bool:
    """Whether the master's view of an address counts for others."""
    if host == seen:
        return True
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False  # a name, which others may resolve differently


# What to do about a peer that reaches no other.
EGRESS = (
    "let its connections out through the firewall, to the ports of the other peers; to the master "
    "alone is not enough"
)


def refusal(info: m.PeerInfo, why: str) -> str:
    """The error for a newcomer that must be refused."""
    where = address_text(info.host, info.port)
    return f"it cannot be reached at {where}, where the master has tried ({why}): {cure(info)}"


def warning(info: m.PeerInfo, why: str) -> str:
    """The warning for a newcomer that is admitted nevertheless."""
    where = address_text(info.host, info.port)
    return (
        f"this peer cannot be reached at {where}, where the master has tried ({why}). If peers on "
        f"other machines are to come: {cure(info)}"
    )


def cure(info: m.PeerInfo) -> str:
    """What to do about a peer that cannot be reached."""
    try:
        loopback = ipaddress.ip_address(info.host).is_loopback
    except ValueError:
        loopback = False
    if loopback:
        return (
            f"{info.host} means another machine to each of them: connect to the master by an "
            "address that all can reach, or set PCCL_ADVERTISE to this machine's"
        )
    return (
        "let its port through the firewall; behind NAT, forward ports to it and set "
        "PCCL_PORT_RANGE to them and PCCL_ADVERTISE to the address that the others see"
    )
