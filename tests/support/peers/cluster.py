"""Peers for end-to-end tests: communicators of one process, each driven by its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pccl
from pccl.runtime.client.client import PeerClient
from peers.waiting import PATIENCE_S

T = TypeVar("T")


def in_threads(jobs: list[Callable[[], T]], patience_s: float = PATIENCE_S) -> list[T]:
    """Runs jobs at the same time and returns their results, or raises what failed first."""
    results: list[T | BaseException] = [RuntimeError("it did not end")] * len(jobs)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s)
        if thread.is_alive():
            break
    for failure in [*failures, *results]:
        if isinstance(failure, BaseException):
            raise failure
    return results  # type: ignore[return-value]


def grow(comm: pccl.Communicator, size: int) -> None:
    """Lets others in until the run has `size` peers."""
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
        if comm.are_peers_pending():
            comm.update_topology()


def gather(comm: pccl.Communicator, size: int) -> None:
    """Joins a run, and lets others in until it has `size` peers."""
    comm.connect()
    grow(comm, size)


def to(reader: str, message: str) -> str:
    """An error's message as it would be without a reader, who is a peer that it marks as such."""
    assert reader.replace("(", "(you, ", 1) in message, message
    return message.replace("(you, ", "(", 1)


def client_of(comm: pccl.Communicator) -> PeerClient:
    """The client of a connected communicator."""
    return comm._membership.client("a test")


class Cluster:
    """`size` connected peers and their master.

    `groups` gives each peer's group, and `hosts` those at which others reach it.
    """

    def __init__(
        self, size: int, groups: list[int] | None = None, hosts: list[str] | None = None
    ) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0")
        self.master.run()
        groups = groups or [0] * size
        self.comms = [
            pccl.Communicator(self.master.address, group, advertise=host)
            for group, host in zip(groups, hosts or [None] * size, strict=True)
        ]
        try:
            self.comms[0].connect()  # it is the first one accepted
            others = [lambda c=c: gather(c, size) for c in self.comms[1:]]  # type: ignore[misc]
            in_threads([lambda: grow(self.comms[0], size), *others])
        except BaseException:
            self.close()
            raise

    def each(self, job: Callable[[int, pccl.Communicator], T]) -> list[T]:
        """job(index, communicator) on every peer at the same time."""
        return in_threads([lambda i=i, c=c: job(i, c) for i, c in enumerate(self.comms)])  # type: ignore[misc]

    def join(self) -> pccl.Communicator:
        """One more peer, let in by all others."""
        comm = pccl.Communicator(self.master.address)

        def admit(other: pccl.Communicator) -> None:
            while not other.are_peers_pending():
                pass
            other.update_topology()

        in_threads([comm.connect, *(lambda c=c: admit(c) for c in self.comms)])  # type: ignore[misc]
        self.comms.append(comm)
        return comm

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        self.master.interrupt()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
