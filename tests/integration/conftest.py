"""Fixtures of the end-to-end tests: a master, and peers in processes of their own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from peers.cluster import Cluster
from peers.processes import Puppet, Start

import pccl

if TYPE_CHECKING:
    from training.groups import Groups


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0") as node:
        yield node


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


@pytest.fixture
def start(master: pccl.MasterNode) -> Iterator[Start]:
    """start(group, ...) starts a puppet, which is killed in the end."""
    started: list[Puppet] = []

    def one(group: int = 0, pool_size: int = 0, **env: str) -> Puppet:
        started.append(Puppet(master.address, group, pool_size, **env))
        return started[-1]

    yield one
    for puppet in started:
        if puppet.process.returncode is None:
            puppet.kill()


@pytest.fixture
def two() -> Iterator[Groups]:
    """Two process groups of torch, one for each peer."""
    from training.groups import Groups  # here: torch is optional

    with Cluster(2) as cluster:
        yield Groups(cluster)


@pytest.fixture
def three() -> Iterator[Groups]:
    """The same with three."""
    from training.groups import Groups

    with Cluster(3) as cluster:
        yield Groups(cluster)


@pytest.fixture
def warnings(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The warnings of pccl's loggers."""
    gc.collect()  # what earlier tests have left may warn
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(getattr(request.module, "LOGGER", "pccl"))
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
