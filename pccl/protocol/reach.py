"""Decides whether peers can reach each other, and how. Pure functions.

A newcomer gives the hosts at which others may reach it, or says that it is `outgoing`: it cannot be
reached, for example behind NAT. An outgoing peer connects to others, but they do not connect to it.
A stream to an outgoing peer needs a rendezvous point at its sender, and the master tells the
outgoing peer to connect there. If the sender is outgoing, too, the two peers are *apart*: they can
only meet at a third peer, which relays if its operator has enabled that.

The master dials a newcomer once, at the hosts that others would use. If the master reaches the
newcomer, others most likely can. Otherwise, two kinds of peers may still reach it: peers on the
same machine, without a network, and peers in a private network without the master. In these cases
the newcomer is admitted with a warning; if its neighbors cannot reach it either, it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pccl.protocol import messages as m
from pccl.support import address_text, numeric


def local(one: m.PeerInfo | m.Hello, other: m.PeerInfo) -> bool:
    """True if two peers reach each other without a network."""
    return bool(one.ipc and other.ipc) and one.machine == other.machine


def ways(to: m.PeerInfo, machine: str) -> tuple[str, ...]:
    """The hosts at which a peer of this machine may reach another one.

    A loopback or link-local address leads to a peer on the same machine. On another machine the
    address means that machine, so it is tried only if there is no other address.
    """
    near = to.machine == machine
    return tuple(host for host in to.hosts if _confined(host) == near) or to.hosts


def apart(one: m.PeerInfo, other: m.PeerInfo) -> bool:
    """True if neither of two peers can connect to the other."""
    return one.outgoing and other.outgoing and not local(one, other)


def rendezvous(
    sender: m.PeerInfo,  # the peer that asks
    receiver: m.PeerInfo,  # the receiver of its stream
    request: m.RendezvousRequest,  # the sender's message
    relays: Sequence[m.PeerInfo],  # the peers that relay
    failures: int = 0,  # times that these two did not meet; each time, the next relay follows
) -> list[tuple[m.PeerInfo, m.MasterMessage]]:
    """The messages that follow when a sender asks its receiver to connect, by recipient."""
    token, lanes, port = request.token, request.lanes, request.port
    if not receiver.outgoing:
        return []  # the sender can connect to it
    if port:
        return [
            (
                receiver,
                m.RendezvousJoin(sender, token, sender.host, port, lanes, sender.others),
            )
        ]
    if not relays:
        return [(sender, m.RendezvousResult(token, why=severed(sender, receiver)))]
    # both directions of a pair use the same relay; a hash of the sum spreads the pairs of a ring
    spread = (sender.peer + receiver.peer) * 0x9E3779B9 % (1 << 32)
    relay = relays[((spread * len(relays) >> 32) + failures) % len(relays)]
    come = m.RendezvousJoin(sender, token, relay.host, relay.relay, lanes, relay.others)
    relaying = m.RendezvousRelay(token, sender, receiver)
    return [(relay, relaying), (receiver, come), (sender, m.RendezvousResult(token, relay))]


def severed(one: m.PeerInfo, other: m.PeerInfo) -> str:
    """The error for two peers that are apart, if none relays."""
    return (
        f"{one} and {other} only dial out (PCCL_OUTGOING_ONLY), so neither can connect to the "
        "other, and no peer of the run relays for them: have more peers join that can be reached, "
        "let the port of one of the two through its firewall or NAT (PCCL_PORT_RANGE, "
        "PCCL_ADVERTISE), or set PCCL_RELAY=1 on a peer that both reach"
    )


def matters(info: m.PeerInfo, seen: str, group: Iterable[m.PeerInfo]) -> bool:
    """True if a newcomer that the master cannot reach must be refused."""

    def reaches(other: m.PeerInfo) -> bool:  # perhaps behind the same NAT
        same = bool(info.host == other.host and info.others and other.others)
        return local(info, other) or same

    judged = info.host == seen or _same_for_all(info.host)
    return judged and not all(map(reaches, group))


def concluded(answers: Mapping[str, str | None]) -> str | None:
    """Combines the results of dials to all hosts of a peer: "" if it was reached, or why not.

    None: unknown. Other peers may reach a host that the master did not dial, if this is the first
    host, or an address that means the same machine everywhere (for example an IPv6 address, if the
    master has no IPv6).

    Args:
        answers: for each host, "" if the peer was reached there, or why not; None: not dialled.
    """
    first = next(iter(answers))
    if "" in answers.values():
        return ""
    untried = [at for at, why in answers.items() if why is None]
    if any(at == first or _same_for_all(at) for at in untried):
        return None
    if len(answers) == 1:
        return answers[first]
    return "; ".join(f"{at}: {why or 'it could not be tried'}" for at, why in answers.items())


def _same_for_all(host: str) -> bool:
    """True if an address means the same machine everywhere; a name may resolve differently."""
    address = numeric(host)
    return address is not None and address.is_global


def _confined(host: str) -> bool:
    """True if an address has a meaning only on its own machine or cable."""
    address = numeric(host)
    return address is not None and (address.is_loopback or address.is_link_local)


def foreign(one: m.PeerInfo, other: m.PeerInfo) -> bool:
    """True if two peers have no kind of address in common: one only IPv4, the other only IPv6."""
    kinds = [{_kind(host) for host in peer.hosts} for peer in (one, other)]
    return kinds in ([{4}, {6}], [{6}, {4}])


def _kind(host: str) -> int:
    """4, or 6; 0: it is a name, which may have addresses of both kinds."""
    address = numeric(host)
    return 0 if address is None else address.version


# The remedy for two peers that are `foreign`.
BRIDGE = (
    "one has IPv4 alone and the other IPv6 alone: give one of them an address of the other kind, "
    "or connect both by a VPN"
)
# The remedy for a peer that reaches no other peer.
EGRESS = (
    "let its connections out through the firewall, to the ports of the other peers; to the master "
    "alone is not enough"
)


def refusal(info: m.PeerInfo, why: str) -> str:
    return (
        f"it cannot be reached at {_where(info)}, where the master has tried ({why}): {cure(info)}"
    )


def warning(info: m.PeerInfo, why: str) -> str:
    return (
        f"this peer cannot be reached at {_where(info)}, where the master has tried ({why}). If "
        f"peers on other machines are to come: {cure(info)}"
    )


def _where(info: m.PeerInfo) -> str:
    return " or ".join(address_text(host, info.port) for host in info.hosts)


def cure(info: m.PeerInfo) -> str:
    """The remedy for a peer that cannot be reached."""
    if info.outgoing:
        return (
            "it only dials out (PCCL_OUTGOING_ONLY): let the ports of those that it must reach "
            "through their firewalls (PCCL_PORT_RANGE)"
        )
    if all(_confined(host) for host in info.hosts):
        return (
            f"{info.host} means another machine to each of them: connect to the master by an "
            "address that all can reach, or set PCCL_ADVERTISE to this machine's"
        )
    return (
        "let its port through the firewall; behind NAT, forward ports to it and set "
        "PCCL_PORT_RANGE to them and PCCL_ADVERTISE to the address that the others see, or set "
        "PCCL_OUTGOING_ONLY=1 where that is impossible"
    )
