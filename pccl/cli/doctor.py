"""`pccl doctor`: what this installation runs on, and whether it works."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import pccl
from pccl.communicator import arithmetic_digest
from pccl.ext import tables

PACKAGES = ("pyzmq", "numpy", "cffi", "msgspec", "xxhash", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`pccl doctor` has no options yet."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _all_reduce_works() -> str:
    """An all-reduce between two communicators of this process; empty when its result is right."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pccl.Communicator(master.address) as first:
            second = pccl.Communicator(master.address)
            thread = _Joining(second)
            while not first.are_peers_pending():
                pass
            first.update_topology()
            thread.join()
            sends = [np.full(1000, 1.0, np.float32), np.full(1000, 2.0, np.float32)]
            recvs = [np.empty_like(send) for send in sends]
            handles = [
                comm.all_reduce_async(send, recv, op=pccl.ReduceOp.SUM)
                for comm, send, recv in zip((first, second), sends, recvs, strict=True)
            ]
            ends = [handle.wait() for handle in handles]
            second.close()
    if not all(ok for ok, _, _ in ends):
        return f"all_reduce failed: {ends}"
    return "" if all((recv == 3.0).all() for recv in recvs) else "all_reduce gave wrong values"


class _Joining:
    """A communicator that joins in a thread of its own, since admission needs the other's vote."""

    def __init__(self, communicator: pccl.Communicator) -> None:
        import threading

        self._thread = threading.Thread(target=communicator.connect, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()


def run(args: argparse.Namespace) -> int:
    """Prints a line for each fact; the exit code is 1 when something does not work."""
    filling = tables.load()
    print(f"pccl            {pccl.__version__}")
    print(f"python          {platform.python_version()} on {platform.platform()}")
    print(f"cores           {os.cpu_count()}")
    for package in PACKAGES:
        print(f"{package:<15} {_version(package)}")
    print(f"engine filling  {filling.name}" + (f" ({filling.reason})" if filling.reason else ""))
    print(f"arithmetic      {arithmetic_digest().hex()} (must be equal on all peers)")
    problem = _all_reduce_works()
    print(f"all_reduce      {problem or 'works between two local peers'}")
    return 1 if problem else 0
