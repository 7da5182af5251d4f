"""Fixtures of the end-to-end tests: they run on each backend of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from hypothesis import settings

from pccl.ext import tables

settings.register_profile("pccl", deadline=None)  # speed is not what is tested
settings.load_profile("pccl")


@pytest.fixture(params=["libzmq", "pyzmq"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend that engines made in this test, and in its child processes, use.

    Small arrays go over the engine too.
    """
    monkeypatch.setenv("PCCL_ENGINE", request.param)
    monkeypatch.setenv("PCCL_INLINE_BYTES", "0")
    tables.load.cache_clear()
    try:
        assert tables.load().name == request.param
    except ImportError as error:  # Windows wheels hide libzmq's symbols
        pytest.skip(f"{request.param} is not available here: {error}")
    yield request.param
    tables.load.cache_clear()


@pytest.fixture(params=[2, 3, 5])
def cluster(request: pytest.FixtureRequest, backend: str) -> Iterator[Cluster]:
    """Connected peers."""
    with Cluster(request.param) as made:
        yield made
