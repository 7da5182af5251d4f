"""DiLoCo of replicas that FSDP2 has sharded over two processes each, and that are lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from peers.ports import unused_port
from peers.processes import Reporter

torch = pytest.importorskip("torch")

from programs.with_torch.fsdp_diloco import Model, data  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "support/programs/with_torch/fsdp_diloco.py"
PATIENCE_S = 100
ROUNDS, INNER_STEPS, STOP = 12, 2, 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 20)]


class Grid:
    """Replicas of two processes."""

    def __init__(self, address: str, rounds: int, **options: Any) -> None:
        self._address, self._rounds, self._options = address, rounds, options
        self.replicas: list[list[Reporter]] = []

    def start(self, stops: Sequence[int] = (), **more: Any) -> list[Reporter]:
        """One more; these ranks of it stop after STOP outer steps, until they are killed."""
        options, port = json.dumps({**self._options, **more}), unused_port()
        words = self._address, len(self.replicas), self._rounds
        self.replicas.append(
            [
                Reporter(
                    *(SCRIPT, *words, rank, 2, port, options, STOP if rank in stops else 0),
                    patience_s=PATIENCE_S,
                )
                for rank in range(2)
            ]
        )
        return self.replicas[-1]

    def end(self) -> None:
        for replica in self.replicas:
            for process in replica:
                process.kill()

    def rounds(self) -> dict[int, dict[int, list[dict[str, Any]]]]:
        """The reports of each outer step, by replica."""
        found: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for number, replica in enumerate(self.replicas):
            for report in replica[0].reports + replica[1].reports:
                if "step" in report:
                    found.setdefault(report["step"], {}).setdefault(number, []).append(report)
        return found


@pytest.fixture
def grid(address: str) -> Iterator[Grid]:
    made = Grid(
        address, ROUNDS, inner_steps=INNER_STEPS, outer_lr=0.5, outer_momentum=0.5, min_peers=2
    )
    yield made
    made.end()


def oracle(reports: dict[int, dict[int, list[dict[str, Any]]]]) -> dict[int, list[Any]]:
    """The parameters after each outer step, of a DiLoCo whose replicas are not sharded.

    Of the reports it takes who has contributed, and how many inner steps each had done by then.
    """
    elected = next(iter(reports[1].values()))[0]["parts"][-1][0]  # what is never trained
    first = Model(int(elected + 0.25))
    theta = [p.detach().clone() for p in first.parameters()]
    v = [torch.zeros_like(t) for t in theta]
    models: dict[int, tuple[Model, int]] = {}
    found: dict[int, list[Any]] = {}
    for k in sorted(reports):
        done = {number: each[0]["inner"] for number, each in reports[k].items()}
        if len(done) == 1:  # the other one was lost before it could say so
            (lost,) = reports[k - 1].keys() - done.keys()
            done[lost] = models[lost][1] + INNER_STEPS
        moves = []
        for number, until in done.items():
            model, steps = models.get(number, (Model(0), 0))
            if not steps:
                put(model, theta)
            for step in range(steps, until):
                train(model, number, step)
            moves.append([t - p.detach() for t, p in zip(theta, model.parameters(), strict=True)])
            models[number] = model, until
        for t, momentum, a, b in zip(theta, v, *moves, strict=True):
            mean = (a + b) / 2
            momentum.mul_(0.5).add_(mean)
            t -= 0.5 * (mean + 0.5 * momentum)
        for number in done:
            put(models[number][0], theta)
        found[k] = [t.clone() for t in theta]
    return found


def put(model: Model, theta: list[Any]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), theta, strict=True):
            parameter.copy_(value)


def train(model: Model, replica: int, step: int) -> None:
    """One inner step, by the mean of what both processes have of the data."""
    (sum(model(data(replica, rank, step)) for rank in range(2)) / 2).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.25 * parameter.grad
    model.zero_grad()


def check(grid: Grid) -> None:
    """The bits of both shards are those of a DiLoCo that is not sharded."""
    grid.end()  # and takes in all that they have said
    rows = slice(0, 3), slice(3, 5)
    reports = grid.rounds()
    wanted = oracle(reports)
    assert sorted(wanted) == list(range(1, ROUNDS + 1))
    for k, each in reports.items():
        for report in (report for said in each.values() for report in said):
            assert report["contributors"] == 2
            shard = report["rank"]
            parts = [t[rows[shard]] if len(t) > 1 else t[shard : shard + 1] for t in wanted[k]]
            assert report["parts"] == [p.flatten().tolist() for p in parts], (k, shard)


def past(step: int) -> Any:
    return lambda report: report.get("step", 0) > step


def test_a_machine_is_lost_and_replaced(grid: Grid) -> None:
    first, second = grid.start(), grid.start(stops=[0, 1])
    for process in second:
        process.wait_for(past(STOP - 1))
    for process in second:
        process.kill()
    third = grid.start(min_peers=1)
    for process in (*first, *third):
        process.wait_for(past(ROUNDS - 1))
        assert process.process.wait(PATIENCE_S) == 0
    check(grid)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_half_a_machine_is_lost(how: str, grid: Grid) -> None:
    """Its other half is dropped with it, even while it waits for it in a collective of torch."""
    first, second = grid.start(), grid.start(stops=[1])
    second[1].wait_for(past(STOP - 1))
    if how == "killed":
        second[1].kill()
    else:
        os.kill(second[1].process.pid, signal.SIGSTOP)
    third = grid.start(min_peers=1)
    for process in (*first, *third):
        process.wait_for(past(ROUNDS - 1))
        assert process.process.wait(PATIENCE_S) == 0
    if how == "killed":
        assert second[0].process.wait(PATIENCE_S) != 0
    check(grid)
