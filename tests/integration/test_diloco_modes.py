"""The modes of DiLoCo against an oracle in numpy, with peers that are lost and that join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import diloco_oracle
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outer import DEADLINE_S, Deserter, Left, Model, make, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

pytestmark = pytest.mark.timeout(60)
SETTINGS = {"outer_lr": 0.3, "outer_momentum": 0.5}  # stable with a delay, so errors do not grow
PROBLEM = diloco_oracle.Problem({"a": 1.0, "b": -3.0, "c": 7.0, "d": 2.5}, 2, 0.25)


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Peer:
    """A peer of the oracle's problem, and what it has seen."""

    def __init__(self, comm: Any, name: str, **options: Any) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=PROBLEM.rate)
        self.diloco = DiLoCo(
            comm, self.model, self.optimizer, inner_steps=PROBLEM.inner_steps, **options
        )
        self.target = PROBLEM.targets[name]
        self.digests: dict[int, str] = {}  # by outer step
        self.thetas: list[Any] = []

    def round(self) -> Any:
        """A round of inner steps, and the outer round at its end."""
        outer = None
        while outer is None:
            loss = sum((p - self.target).pow(2).sum() / 2 for p in self.model.parameters())
            loss.backward()
            outer = self.diloco.step()
        self.thetas.append(flat(self.model).numpy())  # which is theta, to the bit
        digest = self.diloco.state_digest()
        assert self.digests.setdefault(outer.outer_step, digest) == digest
        return outer


def flat(model: Any) -> Any:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- trajectories ----


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_trajectories_with_one_lost_and_one_joining(address: str, mode: str) -> None:
    """`c` leaves before it gives its second pseudo-gradient; `d` joins some rounds later."""
    first_is_in, two_rounds = threading.Event(), threading.Event()
    begin: list[Any] = []
    rounds: dict[str, list[Any]] = {"a": [], "b": [], "d": []}

    def train(name: str) -> Any:
        if name != "a":
            assert first_is_in.wait(DEADLINE_S)
        with pccl.Communicator(address) as comm:
            first_is_in.set()
            peer = Peer(comm, name, mode=mode, min_peers=3, **SETTINGS)
            begin.append(flat(peer.model).double().numpy())
            admitted_at = -1
            while admitted_at < 0 or len(rounds[name]) < admitted_at + 5:
                rounds[name].append(peer.round())
                if len(rounds[name]) == 3:
                    two_rounds.set()
                if rounds[name][-1].admitted:
                    admitted_at = len(rounds[name])
            return peer

    def desert() -> None:
        assert first_is_in.wait(DEADLINE_S)
        call = "all_reduce" if mode == "sync" else "all_reduce_async"
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving = Deserter(comm, call, 2)
            peer = Peer(leaving, "c", mode=mode, min_peers=3, **SETTINGS)
            leaving.armed = True
            while True:
                peer.round()

    def join() -> Any:
        assert two_rounds.wait(DEADLINE_S)
        with pccl.Communicator(address) as comm:
            peer = Peer(comm, "d", mode=mode, min_peers=3, **SETTINGS)
            rounds["d"] = [peer.round() for _ in range(5)]
            return peer

    a, b, _, d = together(lambda: train("a"), lambda: train("b"), desert, join)
    admitted_at = len(rounds["a"]) - 5
    contributors = [["a", "b", "c"], *[["a", "b"]] * (admitted_at - 1), *[["a", "b", "d"]] * 5]
    expected = getattr(diloco_oracle, mode)(
        PROBLEM, diloco_oracle.Outer(begin[0], 0.3, 0.5), contributors
    )
    for peer, wanted in ((a, expected), (b, expected), (d, expected[-5:])):
        np.testing.assert_allclose(peer.thetas, wanted, rtol=0, atol=1e-5)
    assert a.digests == b.digests and d.digests.items() <= a.digests.items()
    applied = contributors if mode == "sync" else [[], *contributors[:-1]]
    for name, wanted in (("a", applied), ("b", applied), ("d", applied[-5:])):
        assert [outer.contributors for outer in rounds[name]] == [len(peers) for peers in wanted]


def test_delayed_with_the_mean_awaited_at_once_is_sync_shifted_by_one(address: str) -> None:
    """To the bit, for the same pseudo-gradients: those of a model that moves by given numbers."""
    moves = {"a": [2.0, -1.0, 0.5, 4.0, 0.0], "b": [1.0, 3.0, -2.0, 0.0, 0.0]}

    def peer(address: str, name: str, mode: str) -> Callable[[], Any]:
        def body() -> Any:
            model = Model(1.0)
            seen = []
            with pccl.Communicator(address) as comm:
                options = {"outer_lr": 0.5, "outer_momentum": 0.5, "min_peers": 2}
                diloco = make(comm, model, mode=mode, **options)
                for move in moves[name]:
                    model.move(move)
                    diloco.step()
                    state = diloco.state_dict()  # it waits for the mean
                    seen.append((state["theta"], state["velocity"], diloco.outer_step))
            return seen

        return body

    synced, _ = together(peer(address, "a", "sync"), peer(address, "b", "sync"))
    with pccl.MasterNode("127.0.0.1:0") as master:
        late, other = together(
            peer(master.address, "a", "delayed"), peer(master.address, "b", "delayed")
        )
    assert torch.equal(late[0][0], torch.ones(1000)) and late[0][2] == 0
    for (theta, v, k), (late_theta, late_v, late_k), (theirs, _, _) in zip(
        synced[:-1], late[1:], other[1:], strict=True
    ):
        assert torch.equal(theta, late_theta) and torch.equal(v, late_v) and k == late_k
        assert torch.equal(theirs, late_theta)


# ---- what is refused ----


def test_peers_in_different_modes_are_refused(address: str) -> None:
    ready, refused = threading.Event(), threading.Event()

    def incumbent() -> None:
        with pccl.Communicator(address) as comm:
            model = Model()
            diloco = make(comm, model)
            ready.set()
            while not refused.is_set():
                model.move(0.0)
                diloco.step()

    def misfit() -> None:
        assert ready.wait(DEADLINE_S)
        try:
            with (
                pccl.Communicator(address) as comm,
                pytest.raises((ValueError, pccl.PCCLError), match=r"diloco\.delayed"),
            ):
                make(comm, Model(), mode="delayed")
        finally:
            refused.set()

    together(incumbent, misfit)


def test_an_unknown_mode_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match="mode='late' must be"):
        make(comm, Model(), mode="late")
