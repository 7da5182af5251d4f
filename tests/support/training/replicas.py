"""Replicas of several processes each, as threads: a thread trains one part of a model."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import pccl
from pccl.diloco import DiLoCo
from pccl.diloco.model import Replica
from training.small import DEADLINE_S, Model, make


class Gone(Exception):
    """A process of a replica has ended, and so the others cannot go on."""


class Meeting:
    """Where the processes of a replica tell each other something."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._said: list[list[int]] = [[] for _ in range(size)]

    def exchange(self, index: int, numbers: Sequence[int]) -> list[list[int]]:
        try:
            self._said[index] = list(numbers)
            self._barrier.wait(DEADLINE_S)
            said = list(self._said)
            self._barrier.wait(DEADLINE_S)
            return said
        except threading.BrokenBarrierError:
            raise Gone from None

    def end(self) -> None:
        self._barrier.abort()


class Part(Replica):
    """One process of a replica."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting = meeting
        self.size, self.index = meeting.size, index

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._meeting.exchange(self.index, numbers)


@dataclass
class Process:
    """The record of a thread: after each outer step the parameters, and the peers in the mean."""

    replica: Team
    index: int
    comm: Any
    weights: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    contributors: dict[int, int] = field(default_factory=dict)
    error: BaseException | None = None
    steps: int = 0  # for a test to count

    def train(self, rounds: int, move: Callable[[int, int, int], Any], options: Any) -> None:
        """Until k is `rounds`; `move` of replica, process and round is what is trained."""
        model = Model(0.25)
        model.part = Part(self.replica.meeting, self.index)  # type: ignore[assignment]
        diloco = make(self.comm, model, **options)
        while diloco.outer_step < rounds:
            self.replica.before(self, diloco)
            model.move(move(self.replica.name, self.index, diloco.outer_step))
            outer = diloco.step()
            if outer is not None and outer.contributors > 1:
                self.contributors[outer.outer_step] = outer.contributors
                self.weights[outer.outer_step] = model.flat()
                self.digests[outer.outer_step] = diloco.state_digest()
        diloco.finish()


class Team:
    """A replica of the model, and its processes; `before` is called before each inner step."""

    def __init__(
        self,
        address: str,
        name: int,
        size: int = 2,
        before: Callable[[Process, DiLoCo], object] = lambda process, diloco: None,
        wrap: Callable[[pccl.Communicator, int], Any] = lambda comm, index: comm,
    ) -> None:
        self.name, self.before = name, before
        self.meeting = Meeting(size)
        team = secrets.randbits(60) + 1
        self.processes = [
            Process(self, i, wrap(pccl.Communicator(address, i, team=team, team_size=size), i))
            for i in range(size)
        ]
        self._threads: list[threading.Thread] = []

    def start(self, *arguments: Any) -> Team:
        for process in self.processes:
            thread = threading.Thread(target=self._run, args=(process, *arguments), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def _run(self, process: Process, *arguments: Any) -> None:
        try:
            process.comm.connect()
            process.train(*arguments)
        except BaseException as error:
            process.error = error
            self.meeting.end()
        finally:
            process.comm.close()

    def end(self) -> Team:
        """Waits until it ends; raises what has ended it unless that was meant."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"replica {self.name} hangs"
        return self

    def check(self) -> Team:
        """It has ended well."""
        for process in self.end().processes:
            if process.error is not None:
                raise process.error
        return self


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a `part` is one process's of a replica."""
    monkeypatch.setattr("pccl.diloco.trainer.replica_of", lambda model: model.part)
