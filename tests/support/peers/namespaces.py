"""Hosts that are network namespaces of this machine, and peers on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = f"pccl{os.getpid()}"
POSSIBLE = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None
PEER = """
import os
import sys
import numpy as np
import pccl
size, holds = int(sys.argv[1]), sys.argv[2] == "1"
with pccl.Communicator(os.environ["MASTER"]) as comm:
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
        if comm.are_peers_pending():
            comm.update_topology()
    data = np.ones(1 << 20, np.float32)
    try:
        while True:
            try:
                comm.all_reduce(data, op=pccl.ReduceOp.SUM)
                break
            except pccl.PeerLostError as error:
                if comm.world_size < size:
                    raise
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


@contextmanager
def spaces(*hosts: str) -> Iterator[None]:
    """Hosts; the first has a bridge `br0` for the cables of the others."""
    try:
        for host in hosts:
            run("ip", "netns", "add", space(host))
            run(*f"ip -n {space(host)} link set lo up".split())
        run(*f"ip -n {space(hosts[0])} link add br0 type bridge".split())
        run(*f"ip -n {space(hosts[0])} link set br0 up".split())
        yield
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", space(host)], capture_output=True, check=False)


def started(host: str, *words: str, **settings: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[3])
    return subprocess.Popen(
        ["ip", "netns", "exec", space(host), sys.executable, *words],
        env={**os.environ, "PYTHONPATH": root, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def outcome(master: str, hosts: dict[str, dict[str, str]], holder: str) -> list[str]:
    """The output of a peer on each host.

    Args:
        master: its address, unless a host has a MASTER of its own.
        hosts: the environment of each peer.
        holder: the host whose peer has the shared state.
    """
    peers = [
        started(
            host,
            "-c",
            PEER,
            str(len(hosts)),
            str(int(host == holder)),
            **{"MASTER": master, **settings},
        )
        for host, settings in hosts.items()
    ]
    said = []
    for peer in peers:
        assert peer.stdout is not None
        said.append(peer.stdout.readline().strip())
    for peer in peers:
        peer.communicate()
    return said
