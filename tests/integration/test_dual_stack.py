"""Peers with IPv4, with IPv6, with both, and with several networks: network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pages import listed
from peers import namespaces
from peers.namespaces import join, outcome, run, space, spaces, started

IPV4, IPV6, SIDE = "10.79.0.1:48148", "[fd79::1]:48148", "10.80.0.1:48148"  # the master

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not namespaces.POSSIBLE,
        reason="needs Linux, root and iproute2: it makes network namespaces",
    ),
]


def add(host: str, cable: str, address: str) -> None:
    run(*f"ip -n {space(host)} addr add {address} dev {cable} nodad".split())


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """The master's host m, one with both (d), one each with IPv4 (f) and IPv6 (s) alone, and one
    with a cable for each, and a third one to m alone (t)."""
    with spaces("m", "d", "f", "s", "t"):
        add("m", "br0", "10.79.0.1/24")
        add("m", "br0", "fd79::1/64")
        for i, host in enumerate("dft", 2):
            join(host, "m", "eth0", f"10.79.0.{i}/24", "br0")
            run(*f"ip -n {space(host)} route add default via 10.79.0.1".split())
        add("d", "eth0", "fd79::2/64")
        join("s", "m", "eth0", "fd79::5/64 nodad", "br0")
        cables = {"eth1": ("m6t", "fd79::4/64", "br0"), "eth2": ("m4t", "10.80.0.4/24", "")}
        for name, (far, address, at) in cables.items():
            ends = f"{name} type veth peer {far} netns {space('m')}"
            run(*f"ip -n {space('t')} link add {ends}".split())
            add("t", name, address)
            run(*f"ip -n {space('t')} link set {name} up".split())
            if at:
                run(*f"ip -n {space('m')} link set {far} master {at}".split())
            run(*f"ip -n {space('m')} link set {far} up".split())
        add("m", "m4t", "10.80.0.1/24")
        for host in "dst":
            run(*f"ip -n {space(host)} -6 route add default via fd79::1".split())
        yield


@pytest.fixture
def master(network: None) -> Iterator[None]:
    with started("m", "-m", "pccl", "master", "--listen-address", "[::]:48148") as process:
        yield
        process.terminate()
        process.wait()


@pytest.mark.parametrize("way", [IPV4, IPV6])
def test_ipv6_alone_and_both_kinds_of_both(master: None, way: str) -> None:
    """Whichever way those with both go to the master."""
    assert outcome(way, {"d": {}, "s": {"MASTER": IPV6}, "t": {}}, "s") == ["done"] * 3


def test_a_host_known_by_an_address_only_the_master_can_use(master: None) -> None:
    """Nothing says so: what others send there is lost on the way."""
    assert outcome(IPV4, {"d": {}, "t": {"MASTER": SIDE}}, "t") == ["done"] * 2


def test_an_address_that_is_announced_first_and_leads_nowhere(master: None) -> None:
    hosts = {"d": {}, "t": {"PCCL_ADVERTISE": "10.80.0.4,10.79.0.4"}}
    assert outcome(IPV4, hosts, "t") == ["done"] * 2


def test_ipv4_alone_and_ipv6_alone(master: None) -> None:
    """They have nothing in common: one of them is told so, with the other one's address."""
    said = outcome(IPV4, {"f": {}, "s": {"MASTER": IPV6}}, "f")
    (told,) = (text for text in said if "dropped this peer" in text)
    assert "one has IPv4 alone and the other IPv6 alone" in told
    listed(f"KickedError: {told}")
