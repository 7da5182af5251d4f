"""Peers behind a real NAT: network namespaces, and a gateway that masquerades."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from peers import namespaces
from peers.namespaces import join, run, space, spaces, started

PUBLIC, HOMES = ("m", "a"), ("h", "k")
RULE = "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }; "
RULE += 'add rule ip nat out oifname "eth0" masquerade'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not namespaces.POSSIBLE or not shutil.which("nft"),
        reason="needs Linux, root, iproute2 and nftables: it makes network namespaces and a NAT",
    ),
]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Public hosts m and a; hosts h and k, each behind a gateway of its own."""
    with spaces(*PUBLIC, *HOMES, *(f"g{home}" for home in HOMES)):
        run(*f"ip -n {space('m')} addr add 10.79.0.1/24 dev br0".split())
        join("a", "m", "eth0", "10.79.0.2/24", "br0")
        for i, home in enumerate(HOMES):
            gateway = f"g{home}"
            join(gateway, "m", "eth0", f"10.79.0.{10 + i}/24", "br0")
            join(home, gateway, "eth0", f"192.168.{i}.2/24", "")
            run(*f"ip -n {space(gateway)} addr add 192.168.{i}.1/24 dev to{home}".split())
            run(*f"ip -n {space(home)} route add default via 192.168.{i}.1".split())
            inside = ("ip", "netns", "exec", space(gateway))
            run(*inside, "sysctl", "-w", "net.ipv4.ip_forward=1")
            run(*inside, "nft", RULE)
        yield


@pytest.fixture
def master(network: None) -> Iterator[None]:
    with started("m", "-m", "pccl", "master", "--listen-address", "0.0.0.0:48148") as process:
        yield
        process.terminate()
        process.wait()


def outcome(hosts: dict[str, dict[str, str]]) -> list[str]:
    """The output of a peer on each host."""
    return namespaces.outcome("10.79.0.1:48148", hosts, "a")


BEHIND = {"PCCL_OUTGOING_ONLY": "1"}


def test_a_peer_behind_nat_and_one_that_is_not(master: None) -> None:
    assert outcome({"a": {}, "h": BEHIND}) == ["done", "done"]


def test_two_behind_nat_and_two_that_are_not(master: None) -> None:
    assert outcome({"m": {}, "h": BEHIND, "k": BEHIND, "a": {}}) == ["done"] * 4


def test_two_behind_nat_alone(master: None) -> None:
    for said in outcome({"h": BEHIND, "k": BEHIND}):
        assert "only dial out" in said


def test_two_behind_nat_and_a_relay(master: None) -> None:
    assert outcome({"h": BEHIND, "k": BEHIND, "a": {"PCCL_RELAY": "1"}}) == ["done"] * 3
