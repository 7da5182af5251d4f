"""Conditions that tests wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pccl

PATIENCE_S = 30.0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def entered(master: pccl.MasterNode, votes: int = 1) -> None:
    """Waits until so many peers stand in a round."""
    assert master._service is not None
    machine = master._service.server._master
    wait_until(lambda: sum(len(round_.votes) for round_ in machine.run.voting.open) == votes)
