"""Replicas of several processes each: whatever is lost of one, all shards stay in step.

A process is a thread; its shard of a model is a module of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peers.waiting import wait_until
from torch import nn
from training.replicas import PATIENCE_S, Gone, Meeting

import pccl
from pccl.torch import ProcessGroup
from pccl.torch.ddp import Phase, average

LAST = 6
SHARDS = range(2)


def gradient(replica: int, shard: int, step: int, layer: int) -> torch.Tensor:
    """Eighths: their sums are exact."""
    seed = 1000 * replica + 100 * shard + 10 * step + layer
    return torch.randint(-8, 8, (3,), generator=torch.Generator().manual_seed(seed)) / 8


def reference(shard: int, first: float, of: Callable[[int], list[int]]) -> torch.Tensor:
    """The shard after all steps of an undisturbed training; `of` gives the replicas of a step."""
    layers = nn.ParameterList([torch.full((3,), first) for _ in range(2)])
    optimizer = torch.optim.SGD(layers.parameters(), 0.5, momentum=0.5)
    for step in range(LAST):
        for number, layer in enumerate(layers):
            each = [gradient(replica, shard, step, number) for replica in of(step)]
            layer.grad = torch.stack(each).mean(0)
        optimizer.step()
    return torch.cat([layer.detach() for layer in layers])


class Gate:
    """Its state is read whenever the replicas synchronize."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def state_dict(self) -> dict[str, Any]:
        self._process.synchronizations += 1
        self._process.replica.before_state(self._process)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass
class Process:
    """One process of a replica: what it holds after each step."""

    replica: Replica
    shard: int
    comm: pccl.Communicator
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    synchronizations: int = 0
    exchanges: int = 0
    first_step: int = -1
    began_with: float = 0.0
    step: int = -1
    error: BaseException | None = None

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        self.replica.before_exchange(self, numbers)
        said = self.replica.meeting.exchange(self.shard, numbers)
        self.exchanges += 1
        self.replica.after_exchange(self)
        return said

    def train(self, begin: int) -> None:
        layers = nn.ParameterList([torch.full((3,), 1.0 + self.replica.name) for _ in range(2)])
        optimizer = torch.optim.SGD(layers.parameters(), 0.5, momentum=0.5)
        group = ProcessGroup(self.comm, size=begin, shards=self.exchange)
        phase = Phase(group, layers, {"optimizer": optimizer, "gate": Gate(self)})
        phase.synchronize()
        self.first_step, self.began_with = phase.steps, float(layers[0].detach()[0])
        while phase.steps < LAST:
            self.step = phase.steps
            self.replica.before_step(self)
            phase.step()
            for number, layer in enumerate(layers):
                layer.grad = gradient(self.replica.name, self.shard, self.step, number)
                self.replica.before_mean(self, number)
                average(group, layer.grad)
            optimizer.step()
            self.weights[self.step] = torch.cat([layer.detach() for layer in layers])

    def run(self, begin: int) -> None:
        try:
            self.comm.connect()
            self.train(begin)
        except BaseException as error:
            self.error = error
            self.replica.meeting.end()
        finally:
            self.comm.close()

    def leave(self) -> None:
        """As if it was killed."""
        self.comm.close()
        raise Gone


class Replica:
    """Two processes; subclasses are lost at some point."""

    def __init__(self, address: str, name: int) -> None:
        self.name = name
        self.meeting = Meeting(len(SHARDS))
        team = secrets.randbits(60) + 1
        self.processes = [
            Process(self, s, pccl.Communicator(address, s, team=team, team_size=2)) for s in SHARDS
        ]
        self._threads: list[threading.Thread] = []

    def start(self, begin: int) -> None:
        for process in self.processes:
            self.start_one(process, begin)

    def start_one(self, process: Process, begin: int) -> None:
        thread = threading.Thread(target=process.run, args=(begin,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> Replica:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"replica {self.name} hangs"
        return self

    def check(self) -> Replica:
        """It has ended well."""
        for process in self.end().processes:
            if process.error is not None:
                raise process.error
            assert sorted(process.weights) == list(range(process.first_step, LAST))
        return self

    def before_step(self, process: Process) -> None:
        """A step begins."""

    def before_mean(self, process: Process, layer: int) -> None:
        """A gradient is averaged."""

    def before_exchange(self, process: Process, numbers: list[int]) -> None:
        """The processes of the replica tell each other something."""

    def after_exchange(self, process: Process) -> None:
        """They have done so."""

    def before_state(self, process: Process) -> None:
        """The replicas synchronize."""


def alike(*replicas: Replica) -> None:
    """In each step a shard has the same bits in all replicas."""
    for step in range(LAST):
        for shard in SHARDS:
            each = [r.processes[shard].weights.get(step) for r in replicas]
            there = [weights for weights in each if weights is not None]
            assert there and all(torch.equal(weights, there[0]) for weights in there), step


def check(replica: Replica, of: Callable[[int], list[int]]) -> None:
    """Its weights are those of an undisturbed training by the replicas `of` each step."""
    (began_with,) = {process.began_with for process in replica.processes}
    for process in replica.processes:
        wanted = reference(process.shard, began_with, of)
        assert torch.allclose(process.weights[LAST - 1], wanted, atol=1e-6)


def wait_for_registered(master: pccl.MasterNode, peers: int) -> None:
    wait_until(lambda: len(master.status(20).peers) == peers)


class HalfDead(Replica):
    """Its second process is lost when its first one has the mean of a gradient, in step 2."""

    def __init__(self, address: str, name: int) -> None:
        super().__init__(address, name)
        self._has_mean = threading.Event()

    def before_exchange(self, process: Process, numbers: list[int]) -> None:
        if process.step == 2 and process.shard == 0 and numbers == [3]:
            self._has_mean.set()

    def before_mean(self, process: Process, layer: int) -> None:
        if process.step == 2 and process.shard == 1:
            assert self._has_mean.wait(PATIENCE_S)
            process.leave()


def test_a_replica_that_dies_half_is_in_the_mean_of_no_shard(address: str) -> None:
    """The first shard's mean has committed with it, and is made once more without it."""
    replicas = [Replica(address, 0), Replica(address, 1), HalfDead(address, 2)]
    for replica in replicas:
        replica.start(begin=3)
    doomed = replicas.pop().end()
    assert all(isinstance(p.error, (Gone, pccl.KickedError)) for p in doomed.processes)
    alike(*(replica.check() for replica in replicas))
    check(replicas[0], lambda step: [0, 1, 2] if step < 2 else [0, 1])


class Waiting(Replica):
    """Waits before a step until it is allowed to go on."""

    def __init__(self, address: str, name: int, at: int) -> None:
        super().__init__(address, name)
        self._at = at
        self._there = threading.Barrier(len(SHARDS) + 1)
        self._goes_on = threading.Event()

    def before_step(self, process: Process) -> None:
        if process.step == self._at:
            self._there.wait(PATIENCE_S)
            assert self._goes_on.wait(PATIENCE_S)

    def wait(self) -> None:
        """Returns when it waits."""
        self._there.wait(PATIENCE_S)

    def go_on(self) -> None:
        self._goes_on.set()


class Dying(Replica):
    """Its first process leaves instead of step 4."""

    def before_step(self, process: Process) -> None:
        if process.step == 4 and process.shard == 0:
            process.leave()


def test_one_joins_in_phase_and_one_is_lost(master: pccl.MasterNode) -> None:
    """All have the same bits, those of an undisturbed training by the same replicas."""
    first = Waiting(master.address, 0, at=1)
    second, third = Dying(master.address, 1), Replica(master.address, 2)
    first.start(begin=2)
    second.start(begin=2)
    first.wait()
    third.start(begin=2)
    wait_for_registered(master, 6)
    first.go_on()
    second.end()
    alike(first.check(), second, third.check())
    joined = third.processes[0].first_step
    assert joined == third.processes[1].first_step and joined in (2, 3)
    replicas = lambda step: [0, *([1] * (step < 4)), *([2] * (step >= joined))]  # noqa: E731
    check(first, replicas)


def test_all_shards_begin_with_the_state_of_one_replica(master: pccl.MasterNode) -> None:
    """Also if its processes come in another order than those of another replica."""
    first, second = Replica(master.address, 0), Replica(master.address, 1)
    come = [first.processes[0], *second.processes, first.processes[1]]
    for number, process in enumerate(come, 1):
        process.replica.start_one(process, begin=2)
        wait_for_registered(master, number)
    alike(first.check(), second.check())
    check(first, lambda step: [0, 1])


class HalfThere(Replica):
    """Its second process leaves when the first one has agreed with another replica to begin."""

    def __init__(self, address: str, name: int) -> None:
        super().__init__(address, name)
        self._has_agreed = threading.Event()

    def before_exchange(self, process: Process, numbers: list[int]) -> None:
        if process.shard == 0 and process.exchanges == 1:
            assert numbers == [2]
            self._has_agreed.set()

    def after_exchange(self, process: Process) -> None:
        if process.shard == 1:
            assert self._has_agreed.wait(PATIENCE_S)
            process.leave()


def test_all_shards_begin_or_none(master: pccl.MasterNode) -> None:
    """A replica is lost when one shard has found enough to begin, and the other has not."""
    first, third = Replica(master.address, 0), Replica(master.address, 2)
    first.start(begin=2)
    wait_for_registered(master, 2)
    lost = HalfThere(master.address, 1)
    lost.start(begin=2)
    lost.end()
    third.start(begin=2)
    alike(first.check(), third.check())
    check(first, lambda step: [0, 2])


class Vanishing(Waiting):
    """Its second process leaves when the first one has given a newcomer its state."""

    def __init__(self, address: str, name: int) -> None:
        super().__init__(address, name, at=1)
        self.has_given = threading.Event()

    def before_state(self, process: Process) -> None:
        if process.synchronizations == 2 and process.shard == 1:
            assert self.has_given.wait(PATIENCE_S)
            process.leave()


class Receiving(Replica):
    """Tells when its first process has received the state."""

    def __init__(self, address: str, name: int, has_received: threading.Event) -> None:
        super().__init__(address, name)
        self._has_received = has_received

    def before_exchange(self, process: Process, numbers: list[int]) -> None:
        if process.shard == 0 and len(numbers) == 2:
            self._has_received.set()


def test_half_a_received_state_is_an_error(master: pccl.MasterNode) -> None:
    """No other replica has the other half: it would train a model of two different halves."""
    first = Vanishing(master.address, 0)
    newcomer = Receiving(master.address, 1, first.has_given)
    first.start(begin=1)
    first.wait()
    newcomer.start(begin=1)
    wait_for_registered(master, 4)
    first.go_on()
    first.end()
    for process in newcomer.end().processes:
        assert isinstance(process.error, pccl.PeerLostError)
        assert "start this replica again" in str(process.error)
