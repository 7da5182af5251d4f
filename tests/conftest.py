"""Fixtures of the end-to-end tests: they run on each backend of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster
from hypothesis import settings

from pccl.ext import tables

settings.register_profile("pccl", deadline=None)  # speed is not what is tested
settings.load_profile("pccl")


@contextlib.contextmanager
def using(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines made meanwhile, in child processes too, use this backend; for small arrays too."""
    monkeypatch.setenv("PCCL_ENGINE", backend)
    monkeypatch.setenv("PCCL_INLINE_BYTES", "0")
    tables.load.cache_clear()
    try:
        assert tables.load().name == backend
    except ImportError as error:  # Windows wheels hide libzmq's symbols
        pytest.skip(f"{backend} is not available here: {error}")
    yield
    tables.load.cache_clear()


@pytest.fixture(params=["libzmq", "pyzmq"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend that is used."""
    with using(request.param, monkeypatch):
        yield request.param


def _cluster(size: int, backend: str, slow: bool = False) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param((size, backend), id=f"{size}-{backend}", marks=marks)


@pytest.fixture(
    params=[
        *(_cluster(size, "libzmq") for size in (2, 3, 5)),
        *(_cluster(size, "pyzmq", slow=size != 3) for size in (2, 3, 5)),
    ]
)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Connected peers. A backend knows nothing of how many there are: one size does for pyzmq."""
    size, backend = request.param
    with using(backend, monkeypatch), Cluster(size) as made:
        yield made
