"""Peers behind a real NAT: network namespaces, and a gateway that masquerades."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = f"pccl{os.getpid()}"
PUBLIC, HOMES = ("m", "a"), ("h", "k")
RULE = "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }; "
RULE += 'add rule ip nat out oifname "eth0" masquerade'
PEER = """
import sys
import numpy as np
import pccl
size, holds = int(sys.argv[1]), sys.argv[2] == "1"
with pccl.Communicator("10.79.0.1:48148") as comm:
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
        if comm.are_peers_pending():
            comm.update_topology()
    data = np.ones(1 << 20, np.float32)
    try:
        comm.all_reduce(data, op=pccl.ReduceOp.SUM)
        state = np.full(1 << 20, 7 if holds else 0, np.float32)
        shared = pccl.SharedState([pccl.TensorInfo.from_numpy(state, "x")])
        shared.revision = int(holds)
        comm.sync_shared_state(shared)
        assert (data == size).all() and (state == 7).all()
        print("done")
    except pccl.PCCLError as error:
        print(error)
    sys.stdout.flush()
    sys.stdin.read()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not shutil.which("ip")
        or not shutil.which("nft"),
        reason="needs Linux, root, iproute2 and nftables: it makes network namespaces and a NAT",
    ),
]


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def space(host: str) -> str:
    return f"{NAME}{host}"


def join(one: str, other: str, name: str, address: str, at: str) -> None:
    """A cable between two namespaces: the first one's end has a name and an address."""
    far = f"to{one}"
    run(*f"ip -n {space(one)} link add {name} type veth peer {far} netns {space(other)}".split())
    run(*f"ip -n {space(one)} addr add {address} dev {name}".split())
    run(*f"ip -n {space(one)} link set {name} up".split())
    if at:
        run(*f"ip -n {space(other)} link set {far} master {at}".split())
    run(*f"ip -n {space(other)} link set {far} up".split())


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Public hosts m and a; hosts h and k, each behind a gateway of its own."""
    spaces = [*PUBLIC, *HOMES, *(f"g{home}" for home in HOMES)]
    try:
        for one in spaces:
            run("ip", "netns", "add", space(one))
            run(*f"ip -n {space(one)} link set lo up".split())
        run(*f"ip -n {space('m')} link add br0 type bridge".split())
        run(*f"ip -n {space('m')} link set br0 up".split())
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
    finally:
        for one in spaces:
            subprocess.run(["ip", "netns", "del", space(one)], capture_output=True, check=False)


@pytest.fixture
def master(network: None) -> Iterator[None]:
    with started("m", "-m", "pccl", "master", "--listen-address", "0.0.0.0:48148") as process:
        yield
        process.terminate()
        process.wait()


def started(host: str, *words: str, **settings: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        ["ip", "netns", "exec", space(host), sys.executable, *words],
        env={**os.environ, "PYTHONPATH": root, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def outcome(hosts: dict[str, dict[str, str]]) -> list[str]:
    """What a peer on each host says."""
    peers = [
        started(host, "-c", PEER, str(len(hosts)), str(int(host == "a")), **settings)
        for host, settings in hosts.items()
    ]
    said = []
    for peer in peers:
        assert peer.stdout is not None
        said.append(peer.stdout.readline().strip())
    for peer in peers:
        peer.communicate()
    return said


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
