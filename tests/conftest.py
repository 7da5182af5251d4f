"""Fixtures of the end-to-end tests: they run on each backend of the engine.

And what has the suite end, whatever a test leaves behind or hangs in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key as stderr_key
from hypothesis import settings
from peers import ports
from peers.cluster import Cluster

import pccl
from pccl import master_node
from pccl.ext import tables
from pccl.runtime.config import configure_logging

settings.register_profile("pccl", deadline=None)  # speed is not what is tested
settings.load_profile("pccl")

# or each of the hundreds of processes that tests start compiles the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PCCL_INLINE_BYTES", "16384")  # so that rings are tested with small arrays

configure_logging()
logging.getLogger("pccl").propagate = True  # to `caplog`, in each test


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: a third of the tests' time is waiting."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Keeps all that is loaded out of `gc.collect`, which otherwise takes tests 0.2 s each time."""
    gc.freeze()


GRACE_S = 60.0  # for a test whose time is over, to end
LIMIT_S = pytest.StashKey[float]()
FAILED = pytest.StashKey[bool]()


def watch(item: pytest.Item) -> None:
    """Ends the process, with the stacks of all threads on stderr, unless the test ends in time.

    The exception of pytest-timeout ends most waits before that. It comes once, and is lost where
    calls into C do not return, or where pccl lets no exception in (`insist`).
    """
    if LIMIT_S in item.stash:
        faulthandler.dump_traceback_later(
            item.stash[LIMIT_S], exit=True, file=item.config.stash[stderr_key]
        )


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[LIMIT_S] = settings.timeout + GRACE_S
    watch(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    watch(item)  # once more: pytest has ended that, if the test has failed


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def no_master_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stops the masters that a test leaves running: they would keep this process from ending.

    Whoever has failed is excused.
    """
    before = set(master_node._running)
    yield
    left = master_node._running - before
    for master in left:
        with contextlib.suppress(pccl.PCCLError):  # how it has ended is not what is tested
            master.interrupt()
    assert not left or request.node.stash[FAILED], f"it leaves a master running: {left}"


@pytest.fixture(autouse=True)
def settings_are_restored() -> Iterator[None]:
    """A command that a test runs in this process may set variables for those that it starts."""
    before = {name: value for name, value in os.environ.items() if name.startswith("PCCL_")}
    yield
    for name in [name for name in os.environ if name.startswith("PCCL_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def ports_are_released() -> Iterator[None]:
    yield
    ports.release()


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
