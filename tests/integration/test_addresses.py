"""Where a peer listens, and where it says that it does."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from cluster import grow, in_threads

import pccl
from pccl.runtime.config import Config
from pccl.support.text import parse_advertised, parse_ports


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
    for host in ("", "10.0.0.1", "fe80::1", "a.host-name.example"):
        assert parse_advertised(host, "x") == host
    for host in ("10.0.0.1:50000", "[::1]", "a host", "tcp://x"):
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


def test_what_the_arguments_say_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_ports(3)
    monkeypatch.setenv("PCCL_ADVERTISE", "127.0.0.9")
    monkeypatch.setenv("PCCL_PORT_RANGE", f"{first}-{first + 2}")
    with pccl.MasterNode("127.0.0.1:0") as master:
        comms = [
            pccl.Communicator(master.address, advertise="127.0.0.5"),
            pccl.Communicator(master.address),
            pccl.Communicator(master.address, advertise="", port_range=str(first + 2)),
        ]
        comms[0].connect()
        for size, comm in enumerate(comms[1:], 2):
            admit = [lambda c=c, n=size: grow(c, n) for c in comms[: size - 1]]  # type: ignore[misc]
            in_threads([comm.connect, *admit])
        assert comms[0].peers == [
            f"peer 1 (127.0.0.5:{first})",
            f"peer 2 (127.0.0.9:{first + 1})",
            f"peer 3 (127.0.0.1:{first + 2})",
        ]
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("listen", ["[::1]:0", "[::]:0"])
def test_ipv6(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    with pccl.MasterNode(listen) as master:
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        comms[0].connect()
        in_threads([comms[1].connect, lambda: grow(comms[0], 2)])
        arrays = [np.full(100_000, float(i)) for i in range(2)]
        in_threads([lambda i=i: comms[i].all_reduce(arrays[i], op="sum") for i in range(2)])  # type: ignore[misc]
        assert all((array == 1).all() for array in arrays)
        assert all("([::1]:" in peer for peer in comms[0].peers)
        for comm in comms:
            comm.close()
