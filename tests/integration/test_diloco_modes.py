"""The common behavior of DiLoCo's modes, in loops, in `with` blocks and with schedules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from combinations import IN_STEP
from oracles import diloco as diloco_oracle

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Model, desert, make, refuse, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

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
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=PROBLEM.rate)
        self.diloco = DiLoCo(
            comm, self.model, self.optimizer, inner_steps=PROBLEM.inner_steps, **options
        )
        self.target = PROBLEM.targets[name]

    def backward(self) -> None:
        loss = sum((p - self.target).pow(2).sum() / 2 for p in self.model.parameters())
        loss.backward()

    def round(self) -> None:
        """A round of inner steps, and the outer round at its end."""
        outer = None
        while outer is None:
            self.backward()
            outer = self.diloco.step()


# ---- modes that agree ----


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


def test_eager_is_another_name_of_delayed(address: str) -> None:
    """Peers with either name train together."""

    def peer(mode: str) -> Callable[[], Any]:
        def body() -> Any:
            model = Model()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode=mode, min_peers=2)
                for move in (2.0, -1.0, 0.5):
                    model.move(move)
                    diloco.step()
                starts = model.flat()
                diloco.finish()
            return starts.tolist(), diloco.outer_step, diloco.state_digest()

        return body

    first, second = together(peer("eager"), peer("delayed"))
    assert first == second and first[1] == 3


def test_a_lone_survivor_has_its_progress_and_no_estimate(address: str) -> None:
    """The progress of two rounds: the one with the pending mean, and the one trained meanwhile."""
    launched, left = threading.Event(), threading.Event()

    def veteran() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(
                comm, model, mode="delayed", min_peers=2, outer_lr=0.5, outer_momentum=0.0
            )
            model.move(8.0)
            diloco.step()
            assert torch.equal(model.flat(), torch.full((1000,), -6.0))
            launched.set()
            assert left.wait(PATIENCE_S)
            for moved in (9.0, 10.0):
                model.move(1.0)
                diloco.step()
                assert torch.equal(model.flat(), torch.full((1000,), -moved))
            assert diloco.outer_step == 0

    def leaver() -> None:
        events = {"after": launched, "left": left}
        options = {"mode": "delayed", "min_peers": 2, "outer_lr": 0.5, "outer_momentum": 0.0}
        desert(address, "all_reduce_async", by=8.0, **events, **options)

    together(veteran, leaver)


# ---- a loop as it is ----


@pytest.mark.parametrize("mode", IN_STEP)
def test_a_block_makes_a_loop_as_it_is_a_diloco(address: str, mode: str) -> None:
    """To the bit: what calls of `step`, and `finish`, make of it."""

    def peer(address: str, name: str, in_a_block: bool) -> Callable[[], Any]:
        def body() -> Any:
            with pccl.Communicator(address) as comm:
                peer = Peer(comm, name, mode=mode, min_peers=2, **SETTINGS)
                diloco, steps = peer.diloco, 3 * PROBLEM.inner_steps
                if in_a_block:
                    with diloco as entered:
                        assert entered is diloco and diloco.last_round is None
                        for step in range(steps):
                            peer.optimizer.zero_grad()
                            peer.backward()
                            if step == 1:  # which is not counted twice
                                assert diloco.step() is diloco.last_round is not None
                            else:
                                peer.optimizer.step()
                    peer.optimizer.step()
                    assert diloco.inner_step == 0, "an optimizer outside of the block is free"
                    assert diloco.last_round.contributors == 2
                else:
                    for _ in range(3):
                        peer.round()
                    diloco.finish()
                return diloco.outer_step, diloco.state_digest()

        return body

    first, second = together(peer(address, "a", True), peer(address, "b", True))
    with pccl.MasterNode("127.0.0.1:0") as master:
        known = together(*(peer(master.address, name, False) for name in "ab"))
    assert first == second == known[0] == known[1] and first[0] == 3


def test_an_exception_in_a_block_finishes_nothing(address: str) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, mode="delayed", alone="step")
        with pytest.raises(KeyError), diloco:
            model.move(1.0)
            diloco.step()
            raise KeyError
        assert diloco.outer_step == 0
        diloco.finish()
        assert diloco.outer_step == 1


# ---- what is refused ----


def test_peers_in_different_modes_are_refused(address: str) -> None:
    errors = (ValueError, pccl.PCCLError)
    refuse(address, r"diloco\.delayed", {}, {"mode": "delayed"}, errors)


def test_an_unknown_mode_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match="mode='late' must be"):
        make(comm, Model(), mode="late")


def test_rates_follow_the_outer_step_which_a_newcomer_has_too(address: str) -> None:
    """And of defaults, the learning rate follows the number of contributors."""
    begun = threading.Event()
    ended = threading.Barrier(2)
    by_step = {"outer_lr": [(0, 1.0), (2, 0.5)], "outer_momentum": 0.0}

    def first() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, alone="step", **by_step)
            for at in (-1.0, -1.75):
                model.move(1.0)
                diloco.step()
                assert torch.equal(model.flat(), torch.full((1000,), at))
            begun.set()
            while diloco.last_round is None or diloco.last_round.contributors < 2:
                model.move(1.0)
                diloco.step()
            ended.wait(PATIENCE_S)
            return diloco.state_digest()

    def second() -> Any:
        assert begun.wait(PATIENCE_S)
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, alone="step", **by_step)
            before = model.flat()
            model.move(1.0)
            diloco.step()
            assert torch.equal(model.flat(), before - 0.5)
            ended.wait(PATIENCE_S)
            return diloco.state_digest()

    ours, theirs = together(first, second)
    assert ours == theirs


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_a_default_rate_is_that_of_the_contributors(address: str, mode: str) -> None:
    def peer() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            # with 0 it would be another one where means are late
            options = {"outer_lr": None, "outer_momentum": 1e-9, "min_peers": 2}
            diloco = make(comm, model, mode=mode, **options)
            for _ in range(2):
                model.move(1.0)
                diloco.step()
            diloco.finish()
            return model.flat()

    for flat_ in together(peer, peer):
        torch.testing.assert_close(flat_, torch.full((1000,), -1.2))
