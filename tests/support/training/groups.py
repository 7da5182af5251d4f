"""Process groups of torch over pccl; their peers are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from peers.cluster import Cluster

import pccl
from pccl.torch import ProcessGroup

T = TypeVar("T")


class Groups:
    """Groups of one run; torch's ranks are the reverse of the order in which the peers joined."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        last = len(cluster.comms) - 1
        self.all = cluster.each(lambda i, comm: ProcessGroup(comm, rank=last - i))
        self.all.reverse()

    def each(self, job: Callable[[ProcessGroup], T], *without: int) -> list[T]:
        """The same on each of them, by torch's rank."""
        by_comm = {id(group.communicator): group for group in self.all}
        gone = [id(self.all[rank].communicator) for rank in without]
        found: dict[int, T] = {}

        def work(_: int, comm: pccl.Communicator) -> None:
            if id(comm) not in gone:
                found[id(comm)] = job(by_comm[id(comm)])

        self.cluster.each(work)
        return [found[id(g.communicator)] for g in self.all if id(g.communicator) in found]
