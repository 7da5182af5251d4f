"""Where a peer listens, and where it says that it does."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from peers.cluster import grow, in_threads

import pccl
from pccl.runtime import limits
from pccl.runtime.config import Config
from pccl.runtime.resolve import further_hosts
from pccl.support import address_text, parse_address, parse_advertised, parse_ports


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:5", "10.0.0.1", 5),
        ("10.0.0.1", "10.0.0.1", 48148),
        ("a.name", "a.name", 48148),
        ("[fd00::1]", "fd00::1", 48148),
        ("[fd00::1]:0", "fd00::1", 0),
    ],
)
def test_the_port_of_a_master_may_be_left_out(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    whole = address_text(host, port)
    assert pccl.Communicator(text).address == pccl.Communicator(whole).address == whole


@pytest.mark.parametrize("text", ["", "::1", "a.name:", ":5", "tcp://a.name"])
def test_no_address_of_a_master(text: str) -> None:
    for make in (pccl.Communicator, pccl.MasterNode):
        with pytest.raises(ValueError, match=repr(text)):
            make(text)


@pytest.mark.parametrize(
    ("text", "ports"),
    [("", range(0)), ("50000", range(50000, 50001)), ("1-65535", range(1, 65536))],
)
def test_ranges_of_ports(text: str, ports: range) -> None:
    assert parse_ports(text, "x") == ports
    assert Config.from_env({"PCCL_PORT_RANGE": text}).ports == ports


@pytest.mark.parametrize("text", ["x", "5-", "-5", "7-5", "0-5", "5-65536", "5-6-7", "²-5"])
def test_no_ranges_of_ports(text: str) -> None:
    with pytest.raises(ValueError, match="PCCL_PORT_RANGE is"):
        Config.from_env({"PCCL_PORT_RANGE": text})
    with pytest.raises(ValueError, match="port_range is"):
        pccl.Communicator("127.0.0.1:1", port_range=text)


def test_hosts_to_advertise() -> None:
    assert parse_advertised("", "x") == ()
    for host in ("10.0.0.1", "fe80::1", "a.host-name.example"):
        assert parse_advertised(host, "x") == (host,)
    assert parse_advertised("a.name,10.0.0.1,fd00::1", "x") == ("a.name", "10.0.0.1", "fd00::1")
    for host in (
        "10.0.0.1:50000",
        "[::1]",
        "a host",
        "tcp://x",
        "a,",
        ",a",
        "a,[::1]",
        "a" + 8 * ",a",
    ):
        with pytest.raises(ValueError, match="advertise is"):
            pccl.Communicator("127.0.0.1:1", advertise=host)
        with pytest.raises(ValueError, match="PCCL_ADVERTISE is"):
            Config.from_env({"PCCL_ADVERTISE": host})


def free_ports(count: int) -> int:
    """The first of so many ports in a row that were free just now."""
    for first in range(20000, 30000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("0.0.0.0", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


def test_arguments_override_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_ports(3)
    monkeypatch.setenv("PCCL_ADVERTISE", "127.0.0.9")
    monkeypatch.setenv("PCCL_PORT_RANGE", f"{first}-{first + 2}")
    with pccl.MasterNode("127.0.0.1:0") as master:
        comms = [
            pccl.Communicator(master.address, advertise="127.0.0.5", name="a"),
            pccl.Communicator(master.address, name="b"),
            pccl.Communicator(master.address, advertise="", port_range=str(first + 2), name="c"),
        ]
        comms[0].connect()
        for size, comm in enumerate(comms[1:], 2):
            admit = [lambda c=c, n=size: grow(c, n) for c in comms[: size - 1]]  # type: ignore[misc]
            in_threads([comm.connect, *admit])
        assert comms[0].peers == [
            f"peer 1 (a, 127.0.0.5:{first})",
            f"peer 2 (b, 127.0.0.9:{first + 1})",
            f"peer 3 (c, 127.0.0.1:{first + 2})",
        ]
        for comm in comms:
            comm.close()


def all_reduced(comms: list[pccl.Communicator]) -> bool:
    comms[0].connect()
    for size, comm in enumerate(comms[1:], 2):
        admit = [lambda c=c, n=size: grow(c, n) for c in comms[: size - 1]]  # type: ignore[misc]
        in_threads([comm.connect, *admit])
    arrays = [np.full(100_000, 1.0) for _ in comms]
    jobs = [lambda a=a, c=c: c.all_reduce(a, op="sum") for a, c in zip(arrays, comms, strict=True)]  # type: ignore[misc]
    in_threads(jobs)
    return all((array == len(comms)).all() for array in arrays)


def test_a_dead_first_address_costs_no_peer_its_membership(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address of an interface that this machine does not have."""
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    monkeypatch.setenv("PCCL_ADVERTISE", "169.254.255.254,127.0.0.1")
    monkeypatch.setattr(limits, "DIAL_S", 0.3)
    with pccl.MasterNode("127.0.0.1:0") as master:
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        assert all_reduced(comms)
        assert all("169.254.255.254:" in peer for peer in comms[0].peers)
        for comm in comms:
            comm.close()


def needs_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_peers_that_speak_ipv4_and_ipv6_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master listens for both."""
    needs_ipv6()
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    with pccl.MasterNode("[::]:0") as master:
        port = master.address.rpartition(":")[2]
        comms = [
            pccl.Communicator(f"{host}:{port}") for host in ("127.0.0.1", "[::1]", "127.0.0.1")
        ]
        assert all_reduced(comms)
        assert ["[::1]" in peer for peer in comms[0].peers].count(True) == 1
        for comm in comms:
            comm.close()


def test_a_peer_reports_its_source_address(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"10.0.0.1": "10.0.0.7", "192.0.2.1": "192.168.1.7", "2001:db8::1": "fe80::7%eth0"}
    sources |= {"fd00::1": "fd00::7", "127.0.0.1": "127.0.0.1"}

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, to: tuple[str, int]) -> None:
            if to[0] not in sources:
                raise OSError("no route")
            self.to = to[0]

        def getsockname(self) -> tuple[str, int]:
            return sources[self.to], 1

    monkeypatch.setattr(socket, "socket", Probe)
    assert further_hosts(Config(), "10.0.0.1") == ("10.0.0.7", "192.168.1.7")
    assert further_hosts(Config(), "127.0.0.1") == ("192.168.1.7",)
    sources["2001:db8::1"] = "fd00::7"
    assert further_hosts(Config(), "fd00::1") == ("fd00::7", "192.168.1.7")
    assert further_hosts(Config(advertise=("a",)), "10.0.0.1") == ()
    assert further_hosts(Config(advertise=("a", "b", "c")), "10.0.0.1") == ("b", "c")
    sources.clear()
    assert further_hosts(Config(), "10.0.0.1") == ()


@pytest.mark.parametrize("listen", ["[::1]:0", "[::]:0"])
def test_ipv6(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ipv6()
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    with pccl.MasterNode(listen) as master:
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        comms[0].connect()
        in_threads([comms[1].connect, lambda: grow(comms[0], 2)])
        arrays = [np.full(100_000, float(i)) for i in range(2)]
        in_threads([lambda i=i: comms[i].all_reduce(arrays[i], op="sum") for i in range(2)])  # type: ignore[misc]
        assert all((array == 1).all() for array in arrays)
        assert all(", [::1]:" in peer for peer in comms[0].peers)
        for comm in comms:
            comm.close()
