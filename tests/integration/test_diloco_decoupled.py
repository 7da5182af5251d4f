"""DiLoCo with mode="decoupled": learners do not wait for each other, and all hold theta."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers.processes import Master  # noqa: E402
from training.small import DEADLINE_S, Model, N, compute, make, random, together  # noqa: E402

import pccl  # noqa: E402

pytestmark = pytest.mark.timeout(60)
DECOUPLED = {"mode": "decoupled", "inner_steps": 4, "fragments": 2}
CUT = N // 4 * 3  # where `Model` has its second parameter, and so its second fragment


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Notes:
    """The contributions of all syncers to each mean, and theta after each step."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, int], dict[int, tuple[int, Any]]] = defaultdict(dict)
        self.thetas: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.moved: dict[int, Any] = defaultdict(lambda: torch.zeros(N))

    def follow(self, diloco: Any, peer: int) -> None:
        for number, exchange in enumerate(diloco._exchanges):
            load, step = exchange._load, exchange.step

            def noted(exchange: Any = exchange, number: int = number, load: Any = load) -> None:
                load()
                given = exchange.weight.value, exchange._state.delta.numpy().copy()
                self.given[number, exchange.outer_step][peer] = given

            def stepped(
                contributors: int, exchange: Any = exchange, number: int = number, step: Any = step
            ) -> None:
                k = exchange.outer_step
                step(contributors)
                self.thetas[number, k][peer] = exchange._state.theta.numpy().copy()

            exchange._load, exchange.step = noted, stepped

    def check(self, lr: float, momentum: float) -> None:
        """All peers hold the same bits, and each step is that of an oracle in numpy."""
        for number, n in enumerate((CUT, N - CUT)):
            theta, v = np.zeros(n), np.zeros(n)
            for k in range(sum(fragment == number for fragment, _ in self.thetas)):
                peers = self.thetas[number, k]
                given = [self.given[number, k][peer] for peer in peers if self.given[number, k]]
                total = sum(weight for weight, _ in given)
                mean = sum(weight * d.astype(float) for weight, d in given) / total
                v = momentum * v + mean
                theta = theta - lr * (mean + momentum * v)
                for held in peers.values():
                    assert held.tobytes() == next(iter(peers.values())).tobytes(), (number, k)
                    np.testing.assert_allclose(held, theta, rtol=0, atol=1e-4)


class Peer:
    """A learner that moves by numbers of its own."""

    def __init__(self, notes: Notes, number: int, comm: Any, **options: Any) -> None:
        self.notes, self.number, self.model = notes, number, Model()
        self.taken = 0
        self.diloco = make(comm, self.model, **{**DECOUPLED, **options})
        notes.follow(self.diloco, number)

    def step(self) -> Any:
        move = random(1000 * self.number + self.taken)
        self.taken += 1
        compute()
        self.model.move(move)
        self.notes.moved[self.number] += move
        return self.diloco.step()

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.step()


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_theta_is_that_of_the_oracle_and_the_same_everywhere(address: str, wire: str) -> None:
    """Each weighs by its samples, squared, and divided by its steps."""
    notes = Notes()
    rates = {"outer_lr": 0.3, "outer_momentum": 0.5}

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            with pccl.Communicator(address) as comm:
                peer = Peer(notes, number, comm, min_peers=3, wire=wire, **rates)
                peer.until(lambda: peer.diloco.outer_step >= 2)
                peer.diloco.finish()
                state = peer.diloco.state_dict()
                assert torch.equal(peer.model.flat(), state["theta"])
                return peer.diloco.state_digest()

        return run

    assert len({*together(*(body(number) for number in range(3)))}) == 1
    if wire == "fp32":
        notes.check(0.3, 0.5)


class Conserved(Notes):
    """Also what the means have of each peer, with weights of 1 or 0."""

    def total(self) -> Any:
        """The sum of all progress that is in theta."""
        parts = []
        for number, n in enumerate((CUT, N - CUT)):
            total = np.zeros(n)
            for k in range(sum(fragment == number for fragment, _ in self.thetas)):
                given = self.given[number, k]
                total += sum(given[peer][1] for peer in self.thetas[number, k] if given[peer][0])
            parts.append(total)
        return np.concatenate(parts)

    def check_total(self) -> None:
        """Nothing is lost, or counted twice."""
        trained = sum(self.moved.values()).numpy()
        size = np.abs(trained).max()  # rounded in fp32 at each step
        np.testing.assert_allclose(self.total(), trained, rtol=0, atol=1e-5 * size)


PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "weight": "peers"}


def run(
    notes: Notes,
    address: str,
    numbers: int,
    train: Callable[[Peer], object],
    end: Callable[[Peer], object] = lambda peer: None,
    **options: Any,
) -> list[Any]:
    """Peers that train, and finish; returns their digests."""

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            with pccl.Communicator(address) as comm:
                peer = Peer(notes, number, comm, **{**PLAIN, "min_peers": numbers, **options})
                train(peer)
                peer.diloco.finish()
                assert torch.equal(peer.model.flat(), peer.diloco.state_dict()["theta"])
                end(peer)
                return peer.diloco.state_digest()

        return run

    return together(*(body(number) for number in range(numbers)))


def test_a_stopped_learner_costs_the_others_nothing(address: str) -> None:
    """They go on, and in the end its progress is in theta as well."""
    notes, still = Conserved(), threading.Event()

    def train(peer: Peer) -> None:
        outer = peer.diloco
        peer.until(lambda: outer.outer_step >= 2)
        if peer.number == 2:
            assert still.wait(DEADLINE_S)
        peer.until(lambda: outer.outer_step >= 4)
        still.set()

    assert len({*run(notes, address, 3, train, grace=0.2)}) == 1
    notes.check(1.0, 0.0)
    notes.check_total()
    late = [given for given in notes.given.values() if 2 in given and given[2][0] == 0]
    assert late, "its syncer took part with weight 0"


class Returned(Notes):
    """The applied outer steps times their peers, and the residuals at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: dict[tuple[int, int], Any] = {}
        self.residuals: dict[int, Any] = {}

    def follow(self, diloco: Any, peer: int) -> None:
        super().follow(diloco, peer)
        for number, exchange in enumerate(diloco._exchanges):
            step = exchange.step

            def stepped(
                contributors: int, exchange: Any = exchange, number: int = number, step: Any = step
            ) -> None:
                applied = exchange._state.mean.numpy().astype(float) * contributors
                self.applied[number, exchange.outer_step] = applied
                step(contributors)

            exchange.step = stepped

    def check_total(self) -> None:
        parts = [np.zeros(n) for n in (CUT, N - CUT)]
        for (number, _), applied in self.applied.items():
            parts[number] += applied
        total = np.concatenate(parts) + sum(each.numpy() for each in self.residuals.values())
        trained = sum(self.moved.values()).numpy()
        np.testing.assert_allclose(total, trained, rtol=0, atol=2e-5 * np.abs(trained).max())


@pytest.mark.parametrize("wire", ["int8", "int4", "e3m0"])
def test_residuals_hold_the_rest_of_quantized_means(address: str, wire: str) -> None:
    """It holds even if a learner stands still and takes part with weight 0."""
    notes, still = Returned(), threading.Event()

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 2)
        if peer.number == 2:
            assert still.wait(DEADLINE_S)
        peer.until(lambda: peer.diloco.outer_step >= 4)
        still.set()

    def end(peer: Peer) -> None:
        state = peer.diloco.state_dict()
        notes.residuals[peer.number] = state["averager"]["residual"]

    assert len({*run(notes, address, 3, train, end, wire=wire, grace=0.2)}) == 1
    notes.check_total()


def test_a_stopped_peer_is_dropped_and_comes_back(address: str) -> None:
    """With its syncer, as a stopped process; its progress is in a later mean."""
    notes, away, back = Conserved(), threading.Event(), threading.Event()

    def train(peer: Peer) -> None:
        diloco = peer.diloco
        peer.until(lambda: diloco.outer_step >= 2)
        if peer.number == 2:
            arrive = diloco._group.arrive

            def stop(*arguments: Any) -> None:
                diloco._group.arrive = arrive  # type: ignore[method-assign]
                away.set()
                assert back.wait(DEADLINE_S)
                arrive(*arguments)

            diloco._group.arrive = stop  # type: ignore[method-assign]
            peer.until(lambda: bool(diloco.last_round and diloco.last_round.rejoined))
        else:
            peer.until(lambda: away.is_set() and diloco.world_size == 2)
            begin = diloco.outer_step
            peer.until(lambda: diloco.outer_step >= begin + 3)
            back.set()
            peer.until(lambda: diloco.world_size == 3)
        peer.until(lambda: diloco.last_round is not None and diloco.last_round.contributors == 3)

    assert len({*run(notes, address, 3, train, grace=0.3)}) == 1
    notes.check(1.0, 0.0)
    notes.check_total()


def test_a_newcomer_receives_theta_while_the_others_train(address: str) -> None:
    notes, begun = Conserved(), threading.Event()

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 2)
        begun.set()
        peer.until(lambda: peer.diloco.world_size == 3)
        seen = peer.diloco.outer_step
        peer.until(lambda: peer.diloco.outer_step >= seen + 2)

    def join() -> Any:
        assert begun.wait(DEADLINE_S)
        with pccl.Communicator(address) as comm:
            peer = Peer(notes, 2, comm, **PLAIN)
            assert peer.diloco.outer_step >= 2
            peer.until(lambda: peer.diloco.last_round is not None)
            peer.diloco.finish()
            return peer.diloco.state_digest()

    ends, new = together(lambda: run(notes, address, 2, train), join)
    assert {*ends} == {new}
    notes.check_total()


def test_a_lone_peer_keeps_its_progress_or_steps(address: str) -> None:
    for alone, steps in (("continue", 0), ("step", 2)):
        notes = Conserved()
        with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
            peer = Peer(notes, 0, comm, **PLAIN, alone=alone)
            rounds = 0
            while rounds < 4 or peer.diloco.outer_step < steps:
                rounds += peer.step() is not None
            if not steps:
                assert peer.diloco.outer_step == 0
                torch.testing.assert_close(-peer.model.flat(), notes.moved[0])


def test_the_error_of_a_syncer_is_raised_in_the_learner(address: str) -> None:
    with pccl.Communicator(address) as comm:
        peer = Peer(Notes(), 0, comm, **PLAIN)
        comm.close()
        with pytest.raises(pccl.PCCLError):
            peer.until(lambda: False)
        with pytest.raises(pccl.PCCLError):
            peer.diloco.finish()


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("needs inner_steps", {"inner_steps": None, "inner_seconds": 1.0, "grace": 1.0}),
        ("overlap=1", {"overlap": 1}),
        ("late_decay=0.5", {"late_decay": 0.5}),
        ("would be read while", {"buffers": "first"}),
        ("fragments=5", {"fragments": 5}),
    ],
)
def test_options_of_other_modes_are_refused(why: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=why):
        make(None, Model(), **{**DECOUPLED, **options})  # type: ignore[arg-type]


def test_norms_and_directions_are_averaged_apart(address: str) -> None:
    """The norm of each tensor is the mean of the norms; an embedding is averaged as usual."""

    class Embedded(Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 2)
            torch.nn.init.zeros_(self.table.weight)

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Embedded()
            with pccl.Communicator(address) as comm:
                options = {**PLAIN, "min_peers": 2, "merge": "radial", "weight": "samples"}
                diloco = make(comm, model, **options)
                model.move(random(number) * (1 + number))
                model.table.weight.grad = torch.full((4, 2), 1.0 + number)
                diloco.step(samples=3 if number == 0 else 1)
                return model.flat(), model.table.weight.detach().clone(), diloco.state_digest()

        return run

    (flat, table, digest), (_, _, other) = together(body(0), body(1))
    assert digest == other
    torch.testing.assert_close(table, torch.full((4, 2), -(3 * 1.0 + 2.0) / 4))
    cut = Model().weight.numel()
    for part in (slice(0, cut), slice(cut, N)):
        ours, theirs = random(0)[part].double(), 2 * random(1)[part].double()
        norm = (3 * ours.norm() + theirs.norm()) / 4
        way = 3 * ours / ours.norm() + theirs / theirs.norm()
        torch.testing.assert_close(flat[part].double(), -norm * way / way.norm(), rtol=0, atol=1e-5)


def test_a_master_that_is_killed_and_started_again_costs_no_progress(tmp_path: Path) -> None:
    """Learners train while it is away."""
    notes, again = Conserved(), threading.Event()
    master = Master("--state", str(tmp_path / "master.db"))

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 2)
        if peer.number == 0:
            master.kill()
            master.start()
            again.set()
        peer.until(again.is_set)
        begin = peer.diloco.outer_step
        peer.until(lambda: peer.diloco.outer_step >= begin + 2)

    try:
        assert len({*run(notes, master.address, 3, train)}) == 1
    finally:
        master.kill()
    notes.check(1.0, 0.0)
    notes.check_total()
