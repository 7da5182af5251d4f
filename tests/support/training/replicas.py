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
from training.small import PATIENCE_S, Model, make


class Gone(Exception):
    """A process of a replica has ended, and so the others cannot go on."""


class Meeting:
    """Where the processes of a replica tell each other something."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._rounds: list[dict[int, list[int]]] = []  # what each process has told
        self._next = [0] * size
        self._ended = False

    def exchange(self, index: int, numbers: Sequence[int]) -> list[list[int]]:
        """What all have told in this round; raises Gone if one ends before it has."""
        with self._changed:
            at = self._next[index]
            self._next[index] += 1
            if at == len(self._rounds):
                self._rounds.append({})
            told = self._rounds[at]
            told[index] = list(numbers)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(told) == self.size or self._ended, PATIENCE_S)
            if len(told) < self.size:
                raise Gone
            return [told[process] for process in range(self.size)]

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


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
            thread.join(PATIENCE_S)
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
