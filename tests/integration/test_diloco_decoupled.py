"""DiLoCo with mode="decoupled": learners do not wait for each other, and all hold theta."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers.processes import Master  # noqa: E402
from training.small import (  # noqa: E402
    PATIENCE_S,
    Cut,
    Deserter,
    Left,
    Model,
    N,
    Places,
    StoppedSyncer,
    compute,
    make,
    random,
    together,
)

import pccl  # noqa: E402
from pccl.diloco.outer import OuterState  # noqa: E402

DECOUPLED = {"mode": "decoupled", "inner_steps": 4, "fragments": 2}
SLACK = 0.08  # a later mean, of more contributors, may take back what one has too much
PEERS, STEPS = 3, 20_000  # of each run of a test, at most


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Peer:
    """A learner that has made `taken` steps."""

    def __init__(self, number: int, comm: Any, model: Places | None = None, **options: Any) -> None:
        self.number, self.comm, self.taken = number, comm, 0
        self.model = model or Places(PEERS, STEPS)
        self.diloco = make(comm, self.model, **{**DECOUPLED, **options})  # type: ignore[arg-type]

    def step(self) -> Any:
        compute()
        self.model.move(self.number, self.taken)
        self.taken += 1
        return self.diloco.step()

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.step()


PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "weight": "peers"}


class Run:
    """What is left of peers that have trained, and finished: `taken` steps each, and theta."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}
        self.digests: dict[int, str] = {}
        self.theta: Any = None
        self.residual = torch.zeros(PEERS * STEPS)  # the sum of those of all peers

    def ended(self, peer: Peer) -> None:
        state = peer.diloco.state_dict()
        assert torch.equal(peer.model.flat(), state["theta"])
        self.taken[peer.number] = peer.taken
        self.digests[peer.number] = peer.diloco.state_digest()
        self.theta = state["theta"]
        self.residual += state["averager"].get("residual", 0.0)

    def check(self) -> None:
        """Each step is in one mean, of up to three contributors, and all peers hold the same bits.

        What quantization has left of it is in a residual. Otherwise no step that is in no mean, or
        in two of which one is of three, has the share of one.
        """
        assert len({*self.digests.values()}) == 1
        steps = Places(PEERS, STEPS).steps
        for peer, (shares, left) in enumerate(
            zip(steps(-self.theta), steps(self.residual), strict=True)
        ):
            taken = self.taken.get(peer, 0)
            assert not shares[taken:].any()
            shares, rest = shares[:taken], 1 - left[:taken]
            assert (shares > rest / PEERS - SLACK).all() and (shares < rest + SLACK).all()
            if not left.any():
                counts = 1 / shares
                assert (counts - counts.round()).abs().max() < 1e-5, counts

    def sizes(self) -> set[int]:
        """The numbers of contributors of its means, if nothing is quantized."""
        shares = -self.theta
        return {*(1 / shares[shares != 0]).round().int().tolist()}


def run(
    address: str,
    numbers: int,
    train: Callable[[Peer], object],
    result: Run | None = None,
    through: Callable[[pccl.Communicator], Any] = lambda comm: comm,
    **options: Any,
) -> Run:
    """Peers that train, and finish; `through` gives the communicators that they use."""
    result = result or Run()

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            with pccl.Communicator(address) as comm:
                peer = Peer(number, through(comm), **{**PLAIN, "min_peers": numbers, **options})
                train(peer)
                peer.diloco.finish()
                with lock:
                    result.ended(peer)

        return run

    lock = threading.Lock()
    together(*(body(number) for number in range(numbers)))
    return result


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_theta_is_the_same_everywhere(address: str, wire: str) -> None:
    """Each weighs by its samples, squared, and divided by its steps."""

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 2)

    rates = {"outer_lr": 0.3, "outer_momentum": 0.5, "weight": "rate"}
    assert len({*run(address, 3, train, wire=wire, **rates).digests.values()}) == 1


@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "e3m0"])
def test_a_stopped_learner_costs_the_others_nothing(address: str, wire: str) -> None:
    """They go on, and in the end its progress is in theta as well, or else in their residuals."""
    still = threading.Event()

    def train(peer: Peer) -> None:
        outer = peer.diloco
        peer.until(lambda: outer.outer_step >= 2)
        if peer.number == 2:
            assert still.wait(PATIENCE_S)
        peer.until(lambda: outer.outer_step >= 4)
        still.set()

    found = run(address, 3, train, wire=wire, grace=0.2)
    found.check()
    if wire == "fp32":
        assert found.sizes() >= {2, 3}, "its syncer took part with weight 0"


def test_a_stopped_peer_is_dropped_and_comes_back(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its syncer, as a stopped process; its progress is in a later mean."""
    stop = StoppedSyncer(monkeypatch)

    def train(peer: Peer) -> None:
        diloco = peer.diloco
        peer.until(lambda: diloco.outer_step >= 2)
        if peer.number == 2:
            stop.comms.append(peer.comm)
            peer.until(lambda: bool(diloco.last_round and diloco.last_round.rejoined))
        else:
            peer.until(lambda: stop.away.is_set() and diloco.world_size == 2)
            begin = diloco.outer_step
            peer.until(lambda: diloco.outer_step >= begin + 3)
            stop.back.set()
            peer.until(lambda: diloco.world_size == 3)
        peer.until(lambda: diloco.last_round is not None and diloco.last_round.contributors == 3)

    run(address, 3, train, grace=0.3).check()


@pytest.mark.parametrize("call", ["all_reduce", "sync_shared_state"])
def test_a_peer_that_is_dropped_in_a_meeting_gives_no_step_twice(address: str, call: str) -> None:
    """What it has given to that mean is lost if the others have made the mean without it."""
    back = threading.Event()

    def train(peer: Peer) -> None:
        diloco = peer.diloco
        peer.until(lambda: diloco.outer_step >= 2)
        if peer.number == 2:
            peer.comm.armed = True
            peer.until(lambda: bool(diloco.last_round and diloco.last_round.rejoined))
            back.set()
        peer.until(back.is_set)
        seen = diloco.outer_step
        peer.until(lambda: diloco.outer_step >= seen + 2 and diloco.world_size == 3)

    found = run(address, 3, train, through=lambda comm: Cut(comm, call, 1), grace=20.0)
    assert len({*found.digests.values()}) == 1
    steps = Places(PEERS, STEPS).steps(-found.theta)
    for number, taken in found.taken.items():
        shares = steps[number, :taken]
        lost = shares == 0
        assert (number == 2 and call == "all_reduce") or not lost.any()
        assert lost.sum() < taken / 2
        sizes = 1 / shares[~lost]
        assert (sizes - sizes.round()).abs().max() < 1e-5, "in no mean, or in one"


def test_a_peer_that_has_given_away_quantized_progress_keeps_its_error(address: str) -> None:
    """Others may have applied it, so what they lack is what the quantization has left."""
    with pccl.Communicator(address) as comm:
        cut: Any = Cut(comm, "all_gather_async", 1)
        model = Model()
        diloco = make(cut, model, wire="int8", **DECOUPLED)
        cut.armed = True
        while not (diloco.last_round and diloco.last_round.rejoined):
            compute()
            model.move(random(0))
            diloco.step()
        diloco.finish()
        assert diloco.state_dict()["averager"]["residual"].any()


# ---- against an oracle ----

BY = 3.0  # by which each step moves: in a mean of two or three peers, all numbers have few bits
LR, MU = 0.5, 0.5


class History:
    """theta and v after each mean of each of two fragments, as all peers have seen them."""

    def __init__(self, steps: int) -> None:
        self.places = Places(PEERS, steps)
        self.seen: list[dict[int, tuple[Any, Any]]] = [{}, {}]  # by the number of means
        self.lock = threading.Lock()

    def add(self, state: dict[str, Any]) -> None:
        """All peers hold the same bits."""
        whole = [self.places.steps(state[name]).numpy() for name in ("theta", "velocity")]
        for fragment, seen in enumerate(self.seen):
            theta, v = (each[:, fragment::2].copy() for each in whole)
            with self.lock:
                before = seen.setdefault(int(state["clock"][fragment]), (theta, v))
            assert [each.tobytes() for each in before] == [theta.tobytes(), v.tobytes()]

    def means(self, fragment: int, near: float) -> list[Any]:
        """The means that v says there were, in numpy; theta must follow from them."""
        seen, lr, mu = self.seen[fragment], np.float32(LR), np.float32(MU)
        assert sorted(seen) == [*range(len(seen))], "a mean was not seen"
        found = []
        for k in range(len(seen) - 1):
            (theta, v), (after, v_after) = seen[k], seen[k + 1]
            found.append(v_after - mu * v)
            wanted = theta - lr * (found[-1] + mu * v_after)
            assert np.abs(wanted - after).max() <= near
        return found

    def sizes(self, near: float, residual: Any) -> tuple[set[int], Any]:
        """The numbers of peers in the means, and what all have given at each place, in means and
        in their residuals."""
        sizes, given = set(), self.places.steps(residual).numpy().copy()
        for fragment in range(2):
            size = PEERS
            for mean in self.means(fragment, near):
                if mean.max() > BY / 2 / PEERS:  # else only of what quantization had left
                    size = round(BY / float(mean.max()))
                sizes.add(size)
                given[:, fragment::2] += size * mean
        return sizes, given


@pytest.mark.parametrize(("wire", "near", "lost"), [("fp32", 0.0, 0.0), ("int8", 1e-6, 0.1)])
def test_theta_momentum_and_weights_equal_the_oracle(
    address: str, wire: str, near: float, lost: float
) -> None:
    """Also after a peer is killed in a meeting: what others cannot have is lost, with its residual.

    Learners look at the state after each step, and wait for each other: so no mean is missed.
    """
    steps = 400
    history = History(steps)
    alone: dict[int, list[int]] = {0: [], 1: []}  # the outer steps that each survivor has seen
    ended = threading.Event()  # for both at once: who went on would wait for the other

    def decide() -> None:
        if all(seen[-1] >= seen[0] + 3 for seen in alone.values()):
            ended.set()

    of_all, of_rest = threading.Barrier(PEERS), threading.Barrier(PEERS - 1, decide)
    taken: dict[int, int] = {}
    residual = torch.zeros(PEERS * steps)  # the sum of those of the survivors
    options = {"outer_lr": LR, "outer_momentum": MU, "weight": "peers", "grace": 50.0}

    def look(peer: Peer) -> Any:
        """The weights are theta, perhaps of one mean ago, and what the learner has not given."""
        state, w = peer.diloco.state_dict(), peer.model.steps(peer.model.flat()).numpy()
        history.add(state)
        for fragment in range(2 if wire == "fp32" else 0):
            latest, count = int(state["clock"][fragment]), len(range(fragment, peer.taken, 2))
            found = []
            for k in range(max(latest - 1, 0), latest + 1):
                wanted = history.seen[fragment][k][0].copy()
                own = wanted[peer.number, :count]
                own[own == 0] = -BY
                found.append(np.array_equal(wanted, w[:, fragment::2]))
            assert any(found)
        return state

    def body(number: int) -> None:
        with pccl.Communicator(address) as comm:
            dies: Any = Deserter(comm, "sync_shared_state" if wire == "int8" else "all_reduce", 1)
            model = Places(PEERS, steps, BY)
            peer = Peer(number, dies, model, min_peers=PEERS, wire=wire, **options)
            while not ended.is_set():
                peer.step()
                taken[number] = peer.taken
                outer_step = int(look(peer)["clock"][:2].min())
                if number == 2 and outer_step >= 3:
                    dies.armed = True
                    of_all.abort()
                    continue
                try:
                    of_all.wait(PATIENCE_S)
                except threading.BrokenBarrierError:
                    alone[number].append(outer_step)
                    of_rest.wait(PATIENCE_S)
            peer.diloco.finish()
            state = look(peer)
            assert torch.equal(model.flat(), state["theta"])
            with history.lock:
                residual.add_(state["averager"].get("residual", 0.0))

    def die() -> None:
        with pytest.raises(Left):
            body(2)

    together(lambda: body(0), lambda: body(1), die)
    sizes, given = history.sizes(near, residual)
    assert sizes >= {2, 3}
    for number in range(PEERS):
        for fragment in range(2):
            times = given[number, fragment::2] / BY
            count = len(range(fragment, taken[number], 2))
            if number == 2:  # the last ones were in no mean
                count = int(np.count_nonzero(times > 0.5))
            assert count and np.abs(times[:count] - 1).max() <= lost
            assert np.abs(times[count:]).max() <= lost


def test_a_newcomer_receives_theta_while_the_others_train(address: str) -> None:
    begun, result = threading.Event(), Run()

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 2)
        begun.set()
        peer.until(lambda: peer.diloco.world_size == 3)
        seen = peer.diloco.outer_step
        peer.until(lambda: peer.diloco.outer_step >= seen + 2)

    def join() -> None:
        assert begun.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            peer = Peer(2, comm, **PLAIN)
            assert peer.diloco.outer_step >= 2
            peer.until(lambda: peer.diloco.last_round is not None)
            peer.diloco.finish()
            result.ended(peer)

    together(lambda: run(address, 2, train, result), join)
    result.check()


def test_a_lone_peer_keeps_its_progress_or_steps(address: str) -> None:
    for alone, steps in (("continue", 0), ("step", 2)):
        with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
            peer = Peer(0, comm, **PLAIN, alone=alone)
            rounds = 0
            while rounds < 4 or peer.diloco.outer_step < steps:
                rounds += peer.step() is not None
            if not steps:
                assert peer.diloco.outer_step == 0
                assert -peer.model.flat().sum() == peer.taken


def test_the_error_of_a_syncer_is_raised_in_the_learner(address: str) -> None:
    with pccl.Communicator(address) as comm:
        peer = Peer(0, comm, **PLAIN)
        comm.close()
        with pytest.raises(pccl.PCCLError):
            peer.until(lambda: False)
        with pytest.raises(pccl.PCCLError):
            peer.diloco.finish()


def test_an_exception_while_the_model_is_moved_costs_its_peer_its_own_steps_alone(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C, which the program of the learner catches. Half of the model has moved then."""
    learner, left, move = threading.local(), threading.Event(), OuterState.move

    def half(state: OuterState, by: Any) -> None:
        some = len(by) // 2
        if getattr(learner, "fails", False) and by[:some].any() and not left.is_set():
            move(state, torch.cat([by[:some], torch.zeros(len(by) - some)]))
            left.set()
            raise Left
        move(state, by)

    def train(peer: Peer) -> None:
        peer.until(lambda: peer.diloco.outer_step >= 4)
        learner.fails = peer.number == 0
        ends = 0
        while not left.is_set() or peer.diloco.outer_step < (ends := ends or later(peer)):
            with contextlib.suppress(Left):
                peer.step()

    def later(peer: Peer) -> int:
        return peer.diloco.outer_step + 6

    monkeypatch.setattr(OuterState, "move", half)
    result = run(address, 2, train, **PLAIN)
    assert len({*result.digests.values()}) == 1
    ours, theirs = Places(PEERS, STEPS).steps(-result.theta)[:2]
    theirs = theirs[: result.taken[1]]
    assert (theirs > 0).all() and not ours[result.taken[0] :].any()
    counts = 1 / torch.cat([ours[ours != 0], theirs])
    assert (counts - counts.round()).abs().max() < 1e-5, counts
    assert counts.min() >= 1 and counts.max() <= 2 + SLACK, counts


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
    again, master = threading.Event(), Master("--state", str(tmp_path / "master.db"))

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
        run(master.address, 3, train).check()
    finally:
        master.kill()
