"""pccl.torch.DistributedDataParallel: replicas that are lost, and others that join. Threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from peers.cluster import Cluster, in_threads
from peers.waiting import wait_until
from torch import nn

import pccl
from pccl.torch import DistributedDataParallel, ProcessGroup

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters")


def data(peer: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * peer + step))


def new_model(seed: int) -> nn.Module:
    """A model. Threads share torch's generator of random numbers, so it is not used."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def loss_of(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(given) - given.sum(1, keepdim=True)).square().mean()
    return loss


@dataclass
class Replica:
    """One replica, and what has become of it."""

    peer: int
    wire: str = "fp32"
    first_step: int = 0
    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # after each step
    contributors: dict[int, int] = field(default_factory=dict)
    momentum: torch.Tensor | None = None

    def train(self, comm: pccl.Communicator, until: int, plan: Plan) -> None:
        model = new_model(self.peer)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        group = ProcessGroup(comm)
        states = {"optimizer": optimizer, "schedule": schedule}
        ddp = DistributedDataParallel(
            model, states, process_group=group, wire=self.wire, bucket_cap_mb=0.0001
        )
        self.first_step = ddp.steps
        while ddp.steps < until:
            step = ddp.steps
            if not plan.goes_on(self.peer, step):
                comm.close()
                return
            loss_of(ddp, data(self.peer, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            self.weights[step] = torch.cat([p.detach().flatten() for p in model.parameters()])
            self.contributors[step] = group.size()
        self.momentum = optimizer.state[next(iter(model.parameters()))]["momentum_buffer"]


class Plan:
    """The steps in which peers are lost, and in which newcomers join."""

    def __init__(self, cluster: Cluster, lost: dict[int, int], joins_at: int) -> None:
        self._cluster = cluster
        self._lost = lost
        self._joins_at = joins_at
        self.may_join = threading.Event()

    def goes_on(self, peer: int, step: int) -> bool:
        if step == self._joins_at:
            self.may_join.set()
            wait_until(lambda: self._registered() == 3)
        return step < self._lost.get(peer, 1 << 30)

    def _registered(self) -> int:
        return len(self._cluster.master.status(20).peers)


def reference(replicas: list[Replica], until: int) -> torch.Tensor:
    """The weights of an undisturbed training with the same contributors."""
    model = new_model(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for step in range(until):
        present = [r.peer for r in replicas if step in r.weights]
        for peer in present:
            (loss_of(model, data(peer, step)) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as made:
        yield made


def test_replicas_stay_equal_while_one_joins_and_one_is_lost(cluster: Cluster) -> None:
    """The newcomer gets weights, momentum and step; the loss is that of the same contributors."""
    until, plan = 16, Plan(cluster, {1: 10}, joins_at=3)
    replicas = [Replica(peer) for peer in range(3)]
    newcomer = pccl.Communicator(cluster.master.address)

    def join() -> None:
        plan.may_join.wait(20)
        newcomer.connect()
        replicas[2].train(newcomer, until, plan)

    try:
        olds = [lambda i=i: replicas[i].train(cluster.comms[i], until, plan) for i in range(2)]  # type: ignore[misc]
        in_threads([*olds, join])
    finally:
        newcomer.close()
    assert replicas[2].first_step in (4, 5)
    for step in range(until):
        rows = [r.weights[step] for r in replicas if step in r.weights]
        assert all(torch.equal(row, rows[0]) for row in rows), step
        counted = {r.contributors[step] for r in replicas if step in r.weights}
        assert counted == {len(rows)}, step
    assert torch.equal(replicas[0].momentum, replicas[2].momentum)  # type: ignore[arg-type]
    assert torch.allclose(replicas[0].weights[until - 1], reference(replicas, until), atol=1e-5)


@pytest.mark.parametrize(
    "wire", ["e3m0", *(pytest.param(wire, marks=pytest.mark.slow) for wire in ("int8", "int4"))]
)
def test_quantized_gradients_leave_replicas_equal_and_near(cluster: Cluster, wire: str) -> None:
    """The quantization error of one step is added to the next one, so it stays small."""
    until, plan = 12, Plan(cluster, {}, joins_at=1000)
    replicas = [Replica(peer, wire) for peer in range(2)]
    cluster.each(lambda i, comm: replicas[i].train(comm, until, plan))
    for step in range(until):
        assert torch.equal(replicas[0].weights[step], replicas[1].weights[step])
    wanted = reference(replicas, until)
    moved = (wanted - torch.cat([p.detach().flatten() for p in new_model(0).parameters()])).norm()
    assert (replicas[0].weights[until - 1] - wanted).norm() < 0.2 * moved


def test_unsuitable_groups_and_options_are_refused(cluster: Cluster) -> None:
    groups = cluster.each(lambda _, comm: ProcessGroup(comm))
    model = new_model(0)
    with pytest.raises(ValueError, match="the group is not one of pccl"):
        DistributedDataParallel(model)
    with pytest.raises(ValueError, match="find_unused_parameters must be True"):
        DistributedDataParallel(model, process_group=groups[0], find_unused_parameters=False)
    with pytest.raises(ValueError, match="static_graph is not possible"):
        DistributedDataParallel(model, process_group=groups[0], static_graph=True)


def test_another_model_is_refused(cluster: Cluster) -> None:
    def job(i: int, comm: pccl.Communicator) -> None:
        DistributedDataParallel(nn.Linear(2, 2 + i), process_group=ProcessGroup(comm))

    with pytest.raises(ValueError, match="the run trains another model"):
        cluster.each(job)


@pytest.mark.parametrize("what", ["other states", "another optimizer"])
def test_other_states_are_refused_and_the_others_go_on(cluster: Cluster, what: str) -> None:
    def job(i: int, comm: pccl.Communicator) -> str:
        model, group = new_model(0), ProcessGroup(comm)
        odd = group.rank() == 1
        kind = torch.optim.SGD if odd and what == "another optimizer" else torch.optim.Adam
        optimizer = kind(model.parameters(), 0.1)
        states = {"optimizer": optimizer} if what == "another optimizer" or not odd else {}
        try:
            ddp = DistributedDataParallel(model, states, process_group=group)
        except ValueError as error:
            return str(error)
        for step in range(3):
            loss_of(ddp, data(i, step)).backward()
            optimizer.step()
        return f"{group.size()} left"

    said = {
        "other states": r"the states are \['optimizer'\] in the run, and \[\] in this process",
        "another optimizer": r"the run's 'optimizer' is another kind of optimizer: .*'momentum'",
    }
    one, other = sorted(cluster.each(job))
    assert one == "1 left" and re.match(said[what], other)


class Slip(Exception):
    pass


@pytest.mark.parametrize("what", ["an exception", "its time is up"])
def test_a_backward_pass_that_fails_on_one_replica_fails_on_all_and_can_be_repeated(
    cluster: Cluster, what: str
) -> None:
    """It fails at once, although the other buckets wait for the group's limit of 30 minutes."""
    until, failed = 8, threading.Event()

    def slip(_: torch.Tensor) -> None:
        raise Slip

    def train(number: int, comm: pccl.Communicator) -> list[torch.Tensor]:
        model, group = new_model(number), ProcessGroup(comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)
        failures = done = 0
        while done < until:
            odd = done == 3 and not failures
            hooks = []
            if odd and number == 0 and what == "an exception":
                hooks.append(model.get_parameter("1.weight").register_hook(slip))
            elif odd and number == 0:
                group.set_timeout(timedelta(seconds=0.2))
            elif odd:
                failed.wait(20)
            try:
                loss_of(ddp, data(number, done)).backward()
                optimizer.step()
                done += 1
            except (Slip, RuntimeError):
                failures += 1
                failed.set()
                group.set_timeout(timedelta(minutes=30))
            optimizer.zero_grad()
            for hook in hooks:
                hook.remove()
        assert failures == 1
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = cluster.each(train)
    assert all(map(torch.equal, first, second))
