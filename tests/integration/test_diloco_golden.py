"""Golden trajectories of each mode of DiLoCo, with one peer lost and one that joins."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from oracles import golden

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Deserter, Left, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402


class Pair(torch.nn.Module):
    def __init__(self, start: list[float]) -> None:
        super().__init__()
        first, second = torch.tensor(start).split(golden.SIZES)
        self.first, self.second = torch.nn.Parameter(first), torch.nn.Parameter(second)

    def flat(self) -> Any:
        return torch.cat([self.first.detach(), self.second.detach()]).double().numpy()


class Run:
    """A run of real peers by a file's schedule: each a thread."""

    def __init__(self, known: dict[str, Any], address: str) -> None:
        self.known, self.address = known, address
        self.first_is_in, self.joins = threading.Event(), threading.Event()
        self.ended = threading.Barrier(3)

    def peer(self, name: str) -> Any:
        if name == "d":
            assert self.joins.wait(PATIENCE_S)
        elif name != "a":
            assert self.first_is_in.wait(PATIENCE_S)
        with pccl.Communicator(self.address) as comm:
            self.first_is_in.set()
            return self._train(name, comm)

    def _train(self, name: str, comm: Any) -> Any:
        call = "all_reduce" if self.known["settings"]["mode"] == "sync" else "all_reduce_async"
        leaving: Any = Deserter(comm, call, golden.LOST_IN + 1)
        model, models = Pair(self.known["start"] if name == "a" else [0.0] * 8), []
        contributors: list[int] = []
        digests: list[str] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=self.known["rate"])
        diloco = DiLoCo(leaving, model, optimizer, min_peers=3, **self.known["settings"])
        leaving.armed = name == "c"
        first = golden.JOINS_IN + 1 if name == "d" else 0
        for number in range(first, golden.ROUNDS):
            if number == golden.JOINS_IN:
                self.joins.set()
                while not comm.are_peers_pending():
                    pass
            outer = None
            while outer is None:
                target = self.known["targets"][name]
                sum((p - target).pow(2).sum() / 2 for p in model.parameters()).backward()
                outer = diloco.step()
            assert outer.admitted == (number == golden.JOINS_IN)
            models.append(model.flat())
            contributors.append(outer.contributors)
            digests.append(diloco.state_digest())
        theta = diloco.state_dict()["theta"].double().numpy()
        self.ended.wait(PATIENCE_S)
        return models, theta, contributors, digests

    def leave(self) -> None:
        with pytest.raises(Left):
            self.peer("c")


@pytest.mark.parametrize("mode", golden.MODES)
def test_the_oracle_gives_the_golden_trajectory(mode: str) -> None:
    assert json.loads(golden.path(mode).read_text(encoding="utf-8")) == golden.trajectory(mode)


@pytest.mark.parametrize("mode", golden.MODES)
def test_peers_follow_the_golden_trajectory(mode: str) -> None:
    known = json.loads(golden.path(mode).read_text(encoding="utf-8"))
    with pccl.MasterNode("127.0.0.1:0") as master:
        run = Run(known, master.address)
        a, b, _, d = together(
            lambda: run.peer("a"), lambda: run.peer("b"), run.leave, lambda: run.peer("d")
        )
    applied = [len(peers) for peers in golden.contributors()]
    if mode == "delayed":  # a round later
        applied = [0, *applied[:-1]]
    for name, (models, theta, contributors, digests) in (("a", a), ("b", b), ("d", d)):
        wanted = [of_round[name] for of_round in known["models"] if name in of_round]
        np.testing.assert_allclose(models, wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(theta, known["theta"], rtol=0, atol=1e-5)
        assert contributors == applied[-len(models) :]
        assert digests == a[3][-len(models) :]
